"""Golden scripts: whole files in git, read in review like code, and held to more than sameness.

A folder of tests/golden is a case: run.yaml, the profile that it names, and the script of each stage.
"""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen import load_run, plan, render

GOLDEN = Path(__file__).parents[1] / "golden"
UPDATE = "pytest tests/rendering/test_golden.py --update-golden"
CASES = [
    (case.name, stage)
    for case in sorted(path.parent for path in GOLDEN.glob("*/run.yaml"))
    for stage in ("tokenize", "train")
]
ALL = pytest.mark.parametrize(("case", "stage"), CASES, ids=[f"{case}-{stage}" for case, stage in CASES])


def rendered(case: str, stage: str) -> str:
    run = load_run(GOLDEN / case / "run.yaml")
    return render(plan(run, [stage], exists=lambda path: True), stage)


@pytest.fixture(autouse=True)
def no_site_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HPCGEN_TEMPLATES", raising=False)


def test_there_are_cases() -> None:
    assert len(CASES) >= 6


@ALL
def test_the_script_is_the_golden_one(case: str, stage: str, request: pytest.FixtureRequest) -> None:
    path, now = GOLDEN / case / f"{stage}.sbatch", rendered(case, stage)
    if request.config.getoption("--update-golden"):
        path.write_text(now, encoding="utf-8")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if now != before:
        lines = difflib.unified_diff(
            before.splitlines(), now.splitlines(), str(path), "rendered now", lineterm=""
        )
        pytest.fail("\n".join([*lines, "", f"If the change is meant, run: {UPDATE}"]), pytrace=False)


@ALL
def test_bash_can_read_it(case: str, stage: str) -> None:
    found = subprocess.run(
        ["bash", "-n"], input=rendered(case, stage), capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@ALL
def test_shellcheck_has_nothing_to_say(case: str, stage: str) -> None:
    found = subprocess.run(
        ["shellcheck", "--norc", "--shell=bash", "-"],
        input=rendered(case, stage),
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == ""


@ALL
def test_directives_come_before_any_command(case: str, stage: str) -> None:
    """sbatch stops reading at the first command; a backslash or ` #` in a directive would change it."""
    script = rendered(case, stage)
    head, *_ = re.split(r"^[^#\n]", script, maxsplit=1, flags=re.MULTILINE)
    directives = re.findall(r"^#SBATCH .*", script, re.MULTILINE)
    assert len(directives) >= 8
    assert all(line in head for line in directives)
    assert not [line for line in directives if "\\" in line or " #" in line or "'" in line]


@ALL
def test_nothing_prints_what_may_be_secret(case: str, stage: str) -> None:
    script = rendered(case, stage)
    assert not re.search(r"\bset +-\w*x|\bxtrace\b", script)
    assert not re.search(r"^\s*(printenv|env|export -p|declare -p|set)\s*$", script, re.MULTILINE)


@ALL
def test_every_variable_of_the_job_reaches_the_container(case: str, stage: str) -> None:
    script = rendered(case, stage)
    flag = re.search(r"--container-env=([A-Za-z0-9_,]*)", script)
    if flag is None:
        assert "--container-image" not in script
        return
    exported = {
        name
        for line in re.findall(r"^export ([^#\n]*)$", script, re.MULTILINE)
        for name in re.findall(r"(?:^| )([A-Za-z_][A-Za-z0-9_]*)(?==| |$)", line)
    }
    of_the_nodes = {"CHECK_MEMLOCK"}  # read by the node's own shell, outside of the container
    assert exported - of_the_nodes <= set(flag[1].split(","))


@ALL
def test_nothing_is_taken_from_where_it_was_rendered(
    case: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = rendered(case, stage)
    assert rendered(case, stage) == script
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("USER", "somebody")
    assert rendered(case, stage) == script
    assert str(GOLDEN.parents[1]) not in script


@ALL
def test_the_command_line_prints_the_same(case: str, stage: str, tmp_path: Path) -> None:
    run_file = GOLDEN / case / "run.yaml"
    found = subprocess.run(
        [sys.executable, "-m", "hpcgen", "render", stage, "-c", run_file],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == rendered(case, stage)
