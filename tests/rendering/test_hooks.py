"""A site's epilogue: it follows the verdict, knows it, and cannot change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from hpcgen.runs.attempts import read_attempts
from tests.runs import minimal_run, write_yaml
from tests.standins import Batch, batch

pytestmark = pytest.mark.process

EPILOGUE = """\
    say "rc $rc, verdict $verdict, status $exit_status, again ${again-no}"
    again=yes
    cp -- "$log" {directory}/archived.log
    exit 3
"""
MAIN = """\
{% block main %}
main() {
    begin
    set_environment
    run_prologue
    prepare_nodes && launch "${task[@]}" || rc=$?
    run_epilogue
    conclude
}
{% endblock %}
"""
"""The function main of a site's template for hpcgen 0.2.0."""


def concluded(
    directory: Path, *, prologue: str = ":", main: str = "", secrets: tuple[str, ...] = ()
) -> Batch:
    """A job of stage nccl-test with these functions of a site. Its tasks succeed at once."""
    (directory / "runs").mkdir()
    template = directory / "site/slurm/nccl-test.sbatch.j2"
    template.parent.mkdir(parents=True)
    functions = (
        f"site_prologue() {{ {prologue}; }}\n"
        f"site_epilogue() {{\n{EPILOGUE.replace('{directory}', str(directory))}}}\n"
        'launch() { run_step true "$@"; }\n'
    )
    template.write_text(
        '{% extends "hpcgen/slurm/nccl-test.sbatch.j2" %}\n'
        f"{main}{{% block site %}}\n{functions}{{% endblock %}}\n"
    )
    values = minimal_run(paths={"run_dir": "runs"}, secrets=list(secrets))
    run = load_run(write_yaml(directory / "run.yaml", values))
    return batch(render(plan(run, ["nccl-test"]), "nccl-test", [directory / "site"]), directory)


@pytest.mark.parametrize(
    ("given", "message", "told"),
    [
        # the last one also passes
        pytest.param({}, "passed", "rc 0, verdict done, status 0", marks=pytest.mark.slow),
        ({"main": MAIN}, "passed", "rc 0, verdict done, status 0"),
        ({"secrets": ("SITE_TOKEN",)}, "ERROR: SITE_TOKEN is not set", "rc 0, verdict failed, status 1"),
        ({"prologue": 'die "no license"'}, "ERROR: the test came to no", "rc 1, verdict failed, status 1"),
        ({"prologue": "set -e; trap - EXIT; false || :"}, "passed", "rc 0, verdict done, status 0"),
    ],
)
def test_the_epilogue_follows_every_verdict_once(
    tmp_path: Path, given: dict[str, object], message: str, told: str
) -> None:
    done = concluded(tmp_path, **given)
    assert done.status == int(told[-1]), done.log
    said = [line.partition("hpcgen: ")[2] for line in done.log.splitlines()]
    verdict = next(index for index, line in enumerate(said) if line.startswith(message))
    assert said[verdict + 1 :] == [
        f"{told}, again no",
        "WARNING: site_epilogue ended early with status 3 (above)",
    ], done.log
    assert (tmp_path / "archived.log").exists()
    (attempt,) = read_attempts(tmp_path / "runs")
    ended = (attempt.verdict, attempt.status, attempt.reason)
    assert ended == (
        told.split("verdict ")[1].split(",")[0],
        done.status,
        said[verdict].removeprefix("ERROR: "),
    )
