"""Site directories, good ones and bad ones, as `hpcgen templates check` judges them."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import pytest

from hpcgen.check import comparison
from hpcgen.check.lint.check import Finding
from hpcgen.check.scripts import ReadScripts, read_by_lint
from hpcgen.check.shell_programs import read_by_shell_programs
from hpcgen.check.site import Report, Seen, check_site, explanation
from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.replaced import shipped_functions, with_records
from hpcgen.stages import STAGES
from tests.cli import command
from tests.rendering.scripts import write_templates
from tests.runs import write_yaml
from tests.selection import select

TRAIN = '{% extends "hpcgen/slurm/train.sbatch.j2" %}\n'
BASE = '{% extends "hpcgen/slurm/base.sbatch.j2" %}\n'
SUPER = "{{ super() }}"
SCRIPTS = len(STAGES) + 1
"""Number of scripts for one cluster and runtime: every stage, and training with preflight."""

GOOD = {
    "slurm/base.sbatch.j2": BASE
    + """
{% block environment %}
{{ super() }}
export SITE_CACHE=/nvme/cache
{% endblock %}

{% block site %}
site_prologue() {
    source /etc/profile.d/modules.sh
    module load cuda/12.8 || die "no cuda"
    say "on $(hostname)"
    task_environment+=("SITE_CACHE=$SITE_CACHE")
}

site_epilogue() {
    ((rc == 0)) || cp -- "$run_dir/$stage-$SLURM_JOB_ID.log" /shared/failed/ || say "the log was not copied"
}
{% endblock %}
""",
    "slurm/train.sbatch.j2": TRAIN
    + """
{% block directives %}
{{ super() }}
#SBATCH --mail-type=FAIL
#SBATCH --comment={{ run_name | directive }}
{% endblock %}

{% block settings %}
{{ super() }}
step+=(--network=sharp)
archive={{ run_dir }}/archive
{% endblock %}

{% block site %}
{{ super() }}
launch() { run_step srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" numactl --localalloc "$@"; }
{% endblock %}
""",
}
GOOD["slurm/train.sbatch.j2"] = with_records(GOOD["slurm/train.sbatch.j2"], shipped_functions("train"))


def nothing(scripts: Sequence[str]) -> list[list[Finding]]:
    """Instead of bash and shellcheck, which take most of the time."""
    return [[] for _ in scripts]


@pytest.fixture(autouse=True, scope="module")
def each_script_is_parsed_once() -> Iterator[None]:
    """The shipped scripts are the same in most tests, and parsing them takes longer than comparing them."""
    with mock.patch.object(comparison, "read_once", functools.cache(comparison.read_once)):
        yield


@pytest.fixture
def few_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage for each template that these tests change."""
    names = ("image", "tensorboard", "train")
    stages = {name: stage for name, stage in STAGES.items() if name in names}
    monkeypatch.setattr("hpcgen.check.representative.STAGES", stages)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    """A profile without GPUs and with containers: three runtimes, few scripts."""
    values = {
        "extends": "local",
        "container": {"runtime": "pyxis", "image": "/images/site.sqsh"},
        "partitions": {"short": {"max_time": "2:00:00", "max_nodes": 1}},
        "slurm": {"partition": "short", "time": "1:00:00"},
    }
    return str(write_yaml(tmp_path / "site-cluster.yaml", values))


@pytest.fixture
def site(tmp_path: Path) -> Path:
    directory = tmp_path / "site"
    directory.mkdir()
    return directory


def reading(part: str, read_one: Callable[[str], list[Finding]] = read_by_shell_programs) -> ReadScripts:
    """A reader for the shortest script that holds a text. It reads a script for half a second or more."""

    def read(scripts: Sequence[str]) -> list[list[Finding]]:
        shortest = min((script for script in scripts if part in script), key=len)
        return [read_one(script) if script is shortest else [] for script in scripts]

    return read


def checked(site: Path, cluster: str, templates: Mapping[str, str]) -> Report:
    return check_site([write_templates(site, templates)], [cluster], nothing, named=True)


def only(report: Report) -> Seen:
    assert len(report.findings) == 1, [
        (one.where, one.finding.rule, one.finding.problem.reason) for one in report.findings
    ]
    return report.findings[0]


def test_nothing_is_wrong_with_the_shipped_templates(cluster: str) -> None:
    report = check_site([], ["azure-ndv5", "local", cluster], nothing, named=True)
    assert report.findings == ()
    # six stages, and training with preflight, for the runtimes of each
    assert report.num_scripts == SCRIPTS * (3 + 1 + 3)


@pytest.mark.usefixtures("few_stages")
def test_a_good_site(site: Path) -> None:
    write_templates(site, GOOD)
    shell_programs = reading("numactl") if shutil.which("shellcheck") else nothing
    assert check_site([site], ["local"], shell_programs, named=True).findings == ()


@pytest.mark.usefixtures("few_stages")
def test_a_function_without_its_comment_would_never_be_stale(site: Path) -> None:
    """A function that is typed by hand. A hook whose shipped version does nothing needs no comment."""
    launch = GOOD["slurm/train.sbatch.j2"].rpartition("#}\n")[2]
    hooks = 'prepare_node() { say "$node"; }\nsite_prologue() { say hello; }\n'
    text = f"{TRAIN}{{% block site %}}\n{hooks}{launch}".replace("train", "tensorboard")
    seen = only(checked(site, "local", {"slurm/tensorboard.sbatch.j2": text}))
    assert (seen.finding.rule, seen.finding.severity) == ("unrecorded", "warning")
    assert seen.where == f"{site}/slurm/tensorboard.sbatch.j2:5"
    assert "`hpcgen templates diff tensorboard` shows, then run it with --accept" in seen.finding.problem.hint
    listed = command.hpcgen("templates", "list", "--templates", site).stdout
    assert "launch (not recorded)" in listed
    assert command.hpcgen("templates", "diff", "tensorboard", "--accept", "--templates", site).status == 0
    assert check_site([site], ["local"], nothing, named=True).findings == ()


@pytest.mark.usefixtures("few_stages")
def test_a_good_launch_at_every_container_runtime(site: Path, cluster: str) -> None:
    """With the template of a short script."""
    template = GOOD["slurm/train.sbatch.j2"].replace("train", "tensorboard")
    assert checked(site, cluster, {"slurm/tensorboard.sbatch.j2": template}).findings == ()


def one_block(template: str, block: str, *lines: str) -> dict[str, str]:
    """A site that replaces one block; its first line is the file's third."""
    text = [f'{{% extends "hpcgen/slurm/{template}.sbatch.j2" %}}', f"{{% block {block} %}}", *lines]
    return {f"slurm/{template}.sbatch.j2": "\n".join([*text, "{% endblock %}", ""])}


LAUNCH = 'launch() { srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" "$@"; }'
BAD = {
    "another directive": (
        one_block("train", "directives", SUPER, "#SBATCH --no-requeue=x", "#SBATCH --requeue=x"),
        ("directive-lost", 5),
    ),
    "no directives": (one_block("image", "directives", "#SBATCH --comment=x"), ("directive-lost", 2)),
    "a changed setting": (
        one_block("tensorboard", "settings", SUPER, "run_dir=/elsewhere"),
        ("setting-lost", 4),
    ),
    "no variables": (one_block("tensorboard", "environment", "export SITE=1"), ("variable-lost", 2)),
    "an emptied block": (one_block("tensorboard", "main"), ("function-lost", 2)),
    "a main without a step": (
        one_block("image", "main", "main() {", "    begin", "    set_environment", "    conclude", "}"),
        ("step-lost", 3),
    ),
    "a library's function": (one_block("tensorboard", "site", "conclude() { say bye; }"), ("overwritten", 3)),
    "a function of other stages": (
        one_block("tensorboard", "site", "site_prologue() {", "    list_nodes", "}"),
        ("unknown-command", 4),
    ),
    "an unset variable in the epilogue": (
        one_block("tensorboard", "site", "site_epilogue() {", '    cp -- "$results" /shared', "}"),
        ("unset-variable", 4),
    ),
    "a launch in the foreground": (one_block("tensorboard", "site", LAUNCH), ("launch-foreground", 3)),
    "a misspelled block": (one_block("train", "enviroment", "true"), ("template", 2)),
    "a block of earlier versions": (one_block("train", "prologue", "module load x"), ("template", 2)),
    "a mistake of Jinja": (one_block("train", "site", "{% if device == %}"), ("template", 3)),
    "a value in shell code": (one_block("train", "site", "cd {{ run_dir }}"), ("template", 3)),
    "quotes around a value": (one_block("train", "settings", 'x="{{ run_dir }}"'), ("template", 3)),
    "no such variable": (one_block("base", "environment", "export X={{ run_directory }}"), ("template", 3)),
}
"""A template of a site, the rule that it breaks, and the line of its file. The first line of a block is line 3."""
OFTEN = (
    "no directives",
    "a changed setting",
    "an emptied block",
    "an unset variable in the epilogue",
    "a misspelled block",
    "a mistake of Jinja",
    "no such variable",
)
"""Mistakes that are found in different ways. test_rules.py has each rule."""


@pytest.mark.usefixtures("few_stages")
@pytest.mark.parametrize(("templates", "expected"), select(BAD, OFTEN))
def test_findings_of_a_bad_site_have_rule_file_and_line(
    site: Path, cluster: str, templates: dict[str, str], expected: tuple[str, int]
) -> None:
    rule, line = expected
    report = checked(site, "local", templates)
    [finding] = [one for one in report.findings if one.finding.rule != "unrecorded"]
    assert (finding.finding.rule, finding.where) == (rule, f"{site / next(iter(templates))}:{line}")
    assert finding.finding.problem.hint
    assert explanation(rule)


def test_a_finding_shared_by_scripts_is_reported_once(site: Path) -> None:
    finding = only(checked(site, "local", one_block("train", "site", "set -e")))
    assert finding.scripts == ("train (local, none)", "train (local, none, preflight)")
    shared = only(checked(site, "local", one_block("base", "site", "{{ run_directory }}")))
    assert len(shared.scripts) == SCRIPTS


@pytest.mark.usefixtures("few_stages")
def test_consequences_of_a_lost_block_are_not_reported(site: Path) -> None:
    """shellcheck misses run_dir and more in shipped lines. Of the site's own lines it may speak."""
    [(template, text)] = one_block("tensorboard", "settings", "run_dir=/elsewhere").items()
    copies = "site_epilogue() { cp $SLURM_JOB_NAME /shared/kept; }"
    write_templates(site, {template: f"{text}{{% block site %}}\n{copies}\n{{% endblock %}}\n"})
    report = check_site([site], ["local"], reading("run_dir=/elsewhere"), named=True)
    assert {finding.finding.rule for finding in report.findings} >= {"setting-lost", "SC2086"}
    assert all(finding.finding.path.startswith(f"{site}/") for finding in report.findings)


@pytest.mark.slow
def test_many_lost_variables_are_one_finding(site: Path, cluster: str) -> None:
    finding = only(checked(site, cluster, one_block("train", "environment", "unset PATH_OF_SITE")))
    assert re.fullmatch(r"not exported: (\w+, ){3}\w+ and \d+ more", finding.finding.problem.reason)


def test_a_template_that_extends_none_is_one_finding(site: Path) -> None:
    """Everything that its scripts lack follows from this, and is not reported."""
    own = "#!/bin/bash\n#SBATCH --nodes=1\n{% block site %}\nlaunch() { sleep 60; }\n{% endblock %}\n"
    finding = only(checked(site, "local", {"slurm/tensorboard.sbatch.j2": own}))
    assert (finding.finding.rule, finding.where) == ("no-extends", f"{site}/slurm/tensorboard.sbatch.j2:1")
    assert '{% extends "hpcgen/slurm/tensorboard.sbatch.j2" %}' in finding.finding.problem.hint
    assert all(seen.startswith("tensorboard (") for seen in finding.scripts)


def test_a_missing_parent_is_named(site: Path) -> None:
    templates = {"slurm/train.sbatch.j2": '{% extends "hpcgen/slurm/trian.sbatch.j2" %}\n'}
    finding = only(checked(site, "local", templates))
    assert "template 'hpcgen/slurm/trian.sbatch.j2' does not exist" in finding.finding.problem.reason
    assert {seen.split()[0] for seen in finding.scripts} == {"train"}


def test_a_file_that_is_not_used_is_a_finding(site: Path) -> None:
    finding = only(checked(site, "local", {"slurm/trian.sbatch.j2": TRAIN}))
    assert (finding.finding.rule, finding.where) == ("unused-file", f"{site}/slurm/trian.sbatch.j2")
    assert f"did you mean {site}/slurm/train.sbatch.j2?" in finding.finding.problem.reason


def test_a_file_that_everybody_may_write_to_is_a_finding(site: Path) -> None:
    write_templates(site, {"slurm/train.sbatch.j2": GOOD["slurm/train.sbatch.j2"]})
    (site / "slurm/train.sbatch.j2").chmod(0o666)
    finding = only(checked(site, "local", {}))
    assert finding.where == f"{site}/slurm/train.sbatch.j2"
    assert "all users can write to it" in finding.finding.problem.reason


def test_a_directory_that_everybody_may_write_to_is_refused(site: Path) -> None:
    site.chmod(0o777)
    with pytest.raises(HpcgenError, match="all users can write to it"):
        check_site([site], ["local"], nothing)


@pytest.mark.usefixtures("few_stages")
def test_a_mistake_of_bash_is_found_with_its_template(site: Path) -> None:
    write_templates(site, one_block("train", "site", "if [[ -e /shared ]]; then", "    say there"))
    report = check_site([site], ["local"], reading("if [[ -e /shared ]]"), named=True)
    assert {finding.finding.rule for finding in report.findings} == {"syntax"}


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.usefixtures("few_stages")
def test_a_finding_of_shellcheck_has_the_template_line(site: Path) -> None:
    write_templates(
        site, one_block("tensorboard", "site", "site_epilogue() { cp -- $SLURM_JOB_NAME /shared/kept/; }")
    )
    finding = only(check_site([site], ["local"], reading("cp -- $SLURM_JOB_NAME"), named=True))
    assert (finding.finding.rule, finding.where) == ("SC2086", f"{site}/slurm/tensorboard.sbatch.j2:3")


def test_an_invalid_profile_is_a_finding_unless_it_was_requested(tmp_path: Path) -> None:
    broken = str(write_yaml(tmp_path / "broken.yaml", {"extends": "local", "scrach": "/nvme"}))
    report = check_site([], [broken, "local"], nothing)
    assert (only(report).finding.rule, report.num_scripts) == ("profile", SCRIPTS)
    assert "scrach" in only(report).finding.problem.reason
    with pytest.raises(HpcgenError, match="scrach"):
        check_site([], [broken, "local"], nothing, named=True)


@pytest.mark.usefixtures("few_stages")
def test_a_directive_after_a_command_is_found_by_lint(site: Path) -> None:
    write_templates(site, one_block("tensorboard", "environment", SUPER, "#SBATCH --mail-type=END"))
    finding = only(check_site([site], ["local"], reading("mail-type=END", read_by_lint), named=True))
    assert (finding.finding.rule, finding.where) == (
        "directive-after-command",
        f"{site}/slurm/tensorboard.sbatch.j2:4",
    )
