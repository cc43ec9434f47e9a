"""`hpcgen templates`: list, override, check, as an admin meets them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from hpcgen.check.lint.check import Finding
from hpcgen.check.scripts import read_scripts
from hpcgen.cli.main import cli
from hpcgen.config.stages import FRAMES
from hpcgen.slurm.rendering.block_docs import block_docs
from hpcgen.slurm.rendering.environment import make_environment
from hpcgen.slurm.rendering.inventory import block_names, template_chain
from hpcgen.stages import STAGES
from tests.cli.command import hpcgen
from tests.rendering.scripts import write_templates
from tests.runs import minimal_run, write_yaml

pytestmark = pytest.mark.process

TRAIN = """\
{% extends "hpcgen/slurm/train.sbatch.j2" %}

{% block site %}
site_prologue() { module load cuda/12.8 || die no; }
{% endblock %}

{% block settings %}
{{ super() }}
step+=(--network=sharp)
{% endblock %}
"""
BASE = '{% extends "hpcgen/slurm/base.sbatch.j2" %}\n{% block site %}\nsite_epilogue() { true; }\n{% endblock %}\n'


@pytest.fixture
def cluster(workplace: Path) -> str:
    """This machine under a name of its own."""
    write_yaml(workplace / "clusters/here.yaml", {"extends": "local"})
    return "here"


CHECKED = ("image", "tensorboard", "train")
SCRIPTS = len(CHECKED) + 1
"""Every stage, and training with preflight."""


@pytest.fixture
def few_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few stages are compared, and bash, shellcheck and lint, which take most of the time of a check, read none.

    tests/check/test_site.py checks every stage.
    """
    stages = {name: stage for name, stage in STAGES.items() if name in CHECKED}
    monkeypatch.setattr("hpcgen.check.representative.STAGES", stages)
    monkeypatch.setattr("hpcgen.check.scripts.read_scripts", lambda scripts: [[] for _ in scripts])


@pytest.fixture
def few_are_read(few_are_compared: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash, shellcheck and lint read the shortest script."""

    def read_one(scripts: Sequence[str]) -> list[list[Finding]]:
        shortest = min(scripts, key=len)
        [findings] = read_scripts([shortest])
        return [findings if script is shortest else [] for script in scripts]

    monkeypatch.setattr("hpcgen.check.scripts.read_scripts", read_one)


def rows(stdout: str) -> dict[str, str]:
    return {line.split()[0]: " ".join(line.split()[1:]) for line in stdout.splitlines()}


def test_without_a_site_everything_is_shipped() -> None:
    listed = hpcgen("templates", "list")
    assert (listed.status, listed.stderr) == (0, "")
    assert "\x1b" not in listed.stdout
    assert list(rows(listed.stdout)) == ["template", *FRAMES, *STAGES]
    assert rows(listed.stdout)["train"] == "shipped slurm/base.sbatch.j2"


def test_the_list_says_what_a_site_replaces(workplace: Path) -> None:
    site = write_templates(workplace / "site", {"slurm/train.sbatch.j2": TRAIN, "slurm/base.sbatch.j2": BASE})
    found = rows(hpcgen("templates", "list", "--templates", site).stdout)
    base = f"{site}/slurm/base.sbatch.j2"
    assert found["base"] == f"{base} hpcgen/slurm/base.sbatch.j2 site site_epilogue"
    assert found["tokenize"] == f"shipped slurm/data.sbatch.j2 > {base} > hpcgen/slurm/base.sbatch.j2"
    assert found["train"] == (
        f"{site}/slurm/train.sbatch.j2 hpcgen/slurm/train.sbatch.j2 > {base} > hpcgen/slurm/base.sbatch.j2"
        " site, settings + super site_prologue"
    )


def test_the_list_as_json(workplace: Path) -> None:
    site = write_templates(workplace / "site", {"slurm/train.sbatch.j2": TRAIN})
    found = json.loads(hpcgen("templates", "list", "--json", "--templates", site).stdout)
    assert found["unused"] == []
    [train] = [one for one in found["templates"] if one["name"] == "train"]
    first, *parents = train["files"]
    assert (first["origin"], first["directory"]) == ("site", str(site))
    assert first["extends"] == "hpcgen/slurm/train.sbatch.j2"
    assert first["blocks"] == [
        {"name": "site", "line": 3, "calls_super": False},
        {"name": "settings", "line": 7, "calls_super": True},
    ]
    assert [(one["template"], one["origin"]) for one in parents] == [
        ("hpcgen/slurm/train.sbatch.j2", "shipped"),
        ("slurm/base.sbatch.j2", "shipped"),
    ]


def test_files_that_are_not_used_are_listed_with_the_reason(workplace: Path) -> None:
    names = ("slurm/trian.sbatch.j2", "train.sbatch.j2", "slurm/nccl_test.sbatch.j2", "slurm/zzz.j2")
    first = write_templates(workplace / "first", {"slurm/train.sbatch.j2": TRAIN, **dict.fromkeys(names, "")})
    files = {"slurm/train.sbatch.j2": TRAIN, "README.md": "ours", "slurm/.train.sbatch.j2.swp": ""}
    second = write_templates(workplace / "second", files)
    listed = json.loads(
        hpcgen("templates", "list", "--json", "--templates", first, "--templates", second).stdout
    )
    reasons = {one["path"]: one["reason"] for one in listed["unused"]}
    assert reasons.keys() == {*(f"{first}/{name}" for name in names), f"{second}/slurm/train.sbatch.j2"}
    assert reasons[f"{first}/slurm/trian.sbatch.j2"] == f"did you mean {first}/slurm/train.sbatch.j2?"
    assert reasons[f"{first}/train.sbatch.j2"] == f"did you mean {first}/slurm/train.sbatch.j2?"
    assert reasons[f"{first}/slurm/nccl_test.sbatch.j2"].endswith("/slurm/nccl-test.sbatch.j2?")
    assert "templates are slurm/base.sbatch.j2" in reasons[f"{first}/slurm/zzz.j2"]
    assert reasons[f"{second}/slurm/train.sbatch.j2"] == f"{first}/slurm/train.sbatch.j2 takes precedence"


def test_what_a_template_includes_is_used(workplace: Path) -> None:
    text = TRAIN.replace(
        "site_prologue() { module load cuda/12.8 || die no; }", '{% include "slurm/modules.sh.j2" %}'
    )
    files = {"slurm/train.sbatch.j2": text, "slurm/modules.sh.j2": "site_prologue() { module load cuda; }\n"}
    site = write_templates(workplace / "site", files)
    assert "not used" not in hpcgen("templates", "list", "--templates", site).stdout


@pytest.mark.parametrize("name", ["base", *STAGES])
def test_a_started_template_is_valid_and_changes_nothing(name: str, workplace: Path) -> None:
    site = workplace / "site"
    begun = hpcgen("templates", "override", name, "-o", site)
    target = site / f"slurm/{name}.sbatch.j2"
    assert (begun.status, begun.stdout) == (0, f"{target}\n")
    assert begun.stderr == f"next: edit it, then run hpcgen templates check --templates {site}\n"
    chain = template_chain(make_environment([site]), name)
    assert (chain[0].shipped, chain[0].blocks) == (False, ())
    text = target.read_text()
    for block in block_names(chain):
        assert re.search(
            rf"^\{{#\n\{{% block {block} %\}}\n(?s:.*?)\{{% endblock %\}}\n#\}}$", text, re.MULTILINE
        )
        assert block_docs()[block].holds in text


def test_a_started_template_with_blocks_renders_the_same_script(workplace: Path) -> None:
    before = hpcgen("render", "node-health", "--cluster", "local").stdout
    assert (
        hpcgen("templates", "override", "node-health", "--block", "settings", "--block", "main").status == 0
    )
    after = hpcgen("render", "node-health", "--cluster", "local").stdout

    def code(script: str) -> list[str]:
        return [line for line in script.splitlines() if line and not line.startswith("#")]

    assert code(after) == code(before)
    assert "hpcgen/templates/slurm/node-health.sbatch.j2 sha256 " in after


def test_a_started_block_site_has_each_function_once(workplace: Path) -> None:
    assert hpcgen("templates", "override", "base", "--block", "site").status == 0
    script = hpcgen("render", "node-health", "--cluster", "local").stdout
    for name in ("launch", "site_prologue", "prepare_node", "site_epilogue"):
        assert len(re.findall(rf"^{name}\(\)", script, re.MULTILINE)) == 1


def test_the_users_directory_is_where_it_goes_unless_told(workplace: Path) -> None:
    begun = hpcgen("templates", "override", "base", "--block", "settings")
    target = Path(os.environ["XDG_CONFIG_HOME"]) / "hpcgen/templates/slurm/base.sbatch.j2"
    assert begun.stdout == f"{target}\n"
    assert begun.stderr == "next: edit it, then run hpcgen templates check\n"
    assert rows(hpcgen("templates", "list").stdout)["base"].endswith("settings + super")


def test_others_cannot_write_a_started_template(workplace: Path) -> None:
    before = os.umask(0)
    try:
        assert hpcgen("templates", "override", "train", "-o", workplace / "a/site").status == 0
    finally:
        os.umask(before)
    for path in (workplace / "a", *(workplace / "a").rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & (stat.S_IWGRP | stat.S_IWOTH), path


def test_an_existing_template_is_not_overwritten(workplace: Path) -> None:
    site = write_templates(workplace / "site", {"slurm/train.sbatch.j2": TRAIN})
    refused = hpcgen("templates", "override", "train", "-o", site)
    assert (refused.status, refused.stdout) == (2, "")
    assert "slurm/train.sbatch.j2 already exists" in refused.stderr
    assert (site / "slurm/train.sbatch.j2").read_text() == TRAIN


def test_mistakes_of_override(workplace: Path) -> None:
    assert "did you mean settings?" in hpcgen("templates", "override", "train", "--block", "setings").stderr
    assert hpcgen("templates", "override", "trian").status == 2
    (workplace / "open").mkdir()
    (workplace / "open").chmod(0o777)
    refused = hpcgen("templates", "override", "train", "-o", workplace / "open")
    assert (refused.status, list((workplace / "open").rglob("*.j2"))) == (2, [])
    assert "all users can write" in refused.stderr


def test_completion_knows_templates_and_their_blocks() -> None:
    complete = BashComplete(cli, {}, "hpcgen", "_HPCGEN_COMPLETE")

    def completed(*words: str) -> list[str]:
        *before, incomplete = words
        return [item.value for item in complete.get_completions(list(before), incomplete)]

    assert completed("templates", "override", "t") == ["tokenize", "tune", "train", "tensorboard"]
    assert completed("templates", "override", "train", "--block", "se") == ["settings"]


@pytest.mark.usefixtures("few_are_compared")
def test_a_replaced_function_goes_stale_with_the_shipped_one(cluster: str, workplace: Path) -> None:
    site = workplace / "site"
    assert hpcgen("templates", "override", "train", "--block", "site", "-o", site).status == 0
    target = site / "slurm/train.sbatch.j2"
    shipped, own, earlier = (f"site_prologue() {{ {body}; }}" for body in (":", "say scratch", "true"))
    before, _, after = target.read_text().rpartition(shipped)
    target.write_text(before + own + after)

    def listed() -> dict[str, object]:
        report = json.loads(hpcgen("templates", "list", "--json", "--templates", site).stdout)
        [function] = next(one["functions"] for one in report["templates"] if one["name"] == "train")
        return dict(function)

    run_file = write_yaml(workplace / "run.yaml", minimal_run())

    def named_in_header() -> str:
        script = hpcgen("render", "train", "-c", run_file, "--templates", site).stdout
        [line] = [line for line in script.splitlines() if line.startswith("# replaced by the site: ")]
        return line.removeprefix("# replaced by the site: ")

    assert (listed()["name"], listed()["stale"]) == ("site_prologue", False)
    assert listed()["written_against"] == listed()["shipped"]
    assert named_in_header() == f"site_prologue {str(listed()['shipped'])[:8]}"
    # as if the shipped function had been another one when the site wrote its own
    target.write_text(before.replace(shipped, earlier) + own + after)
    assert listed()["stale"]
    assert named_in_header().endswith(" (stale)")
    line = target.read_text().splitlines().index(own) + 1
    checked = hpcgen("templates", "check", "--templates", site, "--cluster", cluster)
    assert checked.status == 1
    assert f"{target}:{line}: stale: the shipped site_prologue has changed" in checked.stdout
    assert "(stale)" in rows(hpcgen("templates", "list", "--templates", site).stdout)["train"]
    shown = hpcgen("templates", "diff", "train", "--templates", site).stdout
    assert f"-{earlier}\n+{shipped}\n" in shown
    assert f"-{shipped}\n+{own}\n" in shown
    assert hpcgen("templates", "diff", "train", "--accept", "--templates", site).status == 0
    assert target.read_text() == before + own + after
    assert not listed()["stale"]


def test_diff_without_a_site() -> None:
    shown = hpcgen("templates", "diff", "train")
    assert (shown.status, shown.stdout) == (0, "")
    assert "the site replaces no function of template train" in shown.stderr


@pytest.mark.slow  # tests/check/test_site.py; test_check_without_shellcheck_says_so
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.usefixtures("few_are_read")
def test_check_of_a_good_site(cluster: str, workplace: Path) -> None:
    site = write_templates(workplace / "site", {"slurm/base.sbatch.j2": BASE})
    checked = hpcgen("templates", "check", "--templates", site, "--cluster", cluster)
    assert (checked.status, checked.stdout) == (0, "")
    assert checked.stderr.startswith(f"no findings: {SCRIPTS} scripts for here, with {site}\n")


@pytest.mark.usefixtures("few_are_compared")
def test_check_reports_the_problem_its_reason_and_a_remedy(cluster: str, workplace: Path) -> None:
    text = BASE.replace("{% block site %}\nsite_epilogue() { true; }", "{% block settings %}\nstage=none")
    site = write_templates(workplace / "site", {"slurm/base.sbatch.j2": text})
    checked = hpcgen("templates", "check", "--templates", site, "--cluster", cluster)
    assert checked.status == 1
    first = checked.stdout.split(f"{site}")[1]
    assert first.startswith(
        "/slurm/base.sbatch.j2:2: setting-lost: not set as planned: run_name, stage, run_dir, share and "
    )
    assert "\n    why: All functions of the script read the settings." in first
    assert "\n    fix: keep {{ super() }}" in first
    assert "\n    in:  image (here, none); " in first
    assert f"; and {SCRIPTS - 3} more\n" in first
    assert f": {SCRIPTS} scripts" in checked.stderr


@pytest.mark.usefixtures("few_are_compared")
def test_check_as_json(cluster: str, workplace: Path) -> None:
    tensorboard = TRAIN.replace("train", "tensorboard")  # the shorter script
    site = write_templates(
        workplace / "site", {"slurm/trian.sbatch.j2": "", "slurm/tensorboard.sbatch.j2": tensorboard}
    )
    checked = hpcgen("templates", "check", "--json", "--templates", site, "--cluster", cluster)
    report = json.loads(checked.stdout)
    assert (checked.status, checked.stderr) == (1, "")
    assert (report["clusters"], report["scripts"]) == (["here"], SCRIPTS)
    [finding] = report["findings"]
    assert finding["rule"] == "unused-file"
    assert finding["file"] == f"{site}/slurm/trian.sbatch.j2"
    assert set(finding) == {"rule", "severity", "file", "line", "why", "fix", "seen"}


@pytest.mark.usefixtures("few_are_read")
def test_check_without_shellcheck_says_so(
    cluster: str, workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = workplace / "programs"
    programs.mkdir()
    (programs / "bash").symlink_to("/bin/bash")
    monkeypatch.setenv("PATH", str(programs))
    checked = hpcgen("templates", "check", "--cluster", cluster)
    assert checked.status == 0
    assert "shellcheck is not installed, so the scripts were checked without it" in checked.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--templates", "nowhere"), "the template directory does not exist"),
        (("--cluster", "nowhere"), "is not a known cluster profile"),
    ],
)
def test_mistakes_of_check_end_with_2(arguments: tuple[str, str], said: str, cluster: str) -> None:
    checked = hpcgen("templates", "check", *arguments)
    assert (checked.status, checked.stdout) == (2, "")
    assert said in checked.stderr


MODULES = Path("/usr/share/modules/init/bash")


@pytest.mark.skipif(not MODULES.is_file(), reason="environment-modules is not installed")
@pytest.mark.parametrize(
    ("init", "module", "status", "said"),
    [
        (str(MODULES), "cuda/12.8", 0, "cuda is 12.8, and the shell's options "),
        (str(MODULES), "cuda/11.0", 1, "ERROR: module cuda/12.8 cannot be loaded"),
        ("/nowhere/modules.sh", "cuda/12.8", 1, "ERROR: module cuda/12.8 cannot be loaded"),
    ],
)
def test_the_guides_way_to_load_modules_works_with_the_real_ones(
    workplace: Path, init: str, module: str, status: int, said: str
) -> None:
    """Under the script's own options; a module or a `module` command that is missing ends the job."""
    guide = (Path(__file__).parents[2] / "docs/templates.md").read_text(encoding="utf-8")
    [block] = re.findall(r"\{% block site %\}\n(site_prologue.*?)\{% endblock %\}", guide, re.DOTALL)
    path = workplace / "modulefiles" / module
    path.parent.mkdir(parents=True)
    path.write_text("#%Module\nsetenv CUDA_VERSION 12.8\n")
    script = 'set -uo pipefail\ndie() { echo "ERROR: $*"; exit 1; }\n'
    script += block.replace("/etc/profile.d/modules.sh", init)
    script += 'site_prologue\necho "cuda is $CUDA_VERSION, and the shell\'s options $-"\n'
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(workplace), "MODULEPATH": str(path.parents[1])}
    done = subprocess.run(
        ["bash", "--norc"], input=script, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == status, done.stderr
    assert said in done.stdout
    assert status or "u" in done.stdout.rpartition(" ")[2]


@pytest.mark.usefixtures("few_are_read")
@pytest.mark.slow
def test_check_reads_the_scripts_with_hpcgens_own_lint(cluster: str, workplace: Path) -> None:
    text = BASE.replace("epilogue", "prologue").replace("true", "export NCCL_DEBUG=INFOO")
    site = write_templates(workplace / "site", {"slurm/base.sbatch.j2": text})
    checked = hpcgen("templates", "check", "--templates", site, "--cluster", cluster)
    assert checked.status == 1
    assert f"{site}/slurm/base.sbatch.j2:3: nccl-debug-level: NCCL_DEBUG has no level INFOO" in checked.stdout
