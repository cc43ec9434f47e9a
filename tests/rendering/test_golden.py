"""Golden scripts: whole files in git, read in review like code, and held to more than sameness."""

from __future__ import annotations

import difflib
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcgen.rendering.contract import check_script
from hpcgen.stages import STAGES
from tests.rendering.golden import GOLDEN, SCRIPTS, folded, planned_case, render, rendered

UPDATE = "pytest tests/rendering/test_golden.py --update-golden"
ALL = pytest.mark.parametrize(("case", "stage"), SCRIPTS, ids=[f"{case}-{stage}" for case, stage in SCRIPTS])


def test_every_folder_is_a_case_and_holds_every_stage() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {case for case, _ in SCRIPTS}
    for case in GOLDEN.iterdir():
        assert {path.stem for path in case.glob("*.sbatch")} == set(STAGES)


@ALL
def test_the_script_is_the_golden_one(case: str, stage: str, request: pytest.FixtureRequest) -> None:
    path, now = GOLDEN / case / f"{stage}.sbatch", folded(rendered(case, stage))
    if request.config.getoption("--update-golden"):
        path.write_text(now, encoding="utf-8")
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if now != before:
        lines = difflib.unified_diff(
            before.splitlines(), now.splitlines(), str(path), "rendered now", lineterm=""
        )
        pytest.fail("\n".join([*lines, "", f"If the change is meant, run: {UPDATE}"]), pytrace=False)


@pytest.fixture(scope="module")
def script_files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every script as a file."""
    directory = tmp_path_factory.mktemp("scripts")
    files = {script: directory / f"{'-'.join(script)}.sh" for script in SCRIPTS}
    for (case, stage), path in files.items():
        path.write_text(rendered(case, stage), encoding="utf-8")
    return files


def output_of_each(command: list[str], files: Mapping[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    """What a command says about each file, some at a time."""

    def run(path: Path) -> str:
        found = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        return found.stdout + found.stderr or f"status {found.returncode}" * bool(found.returncode)

    with ThreadPoolExecutor(max_workers=4) as threads:
        return dict(zip(files, threads.map(run, files.values()), strict=True))


@pytest.fixture(scope="module")
def said_by_bash(script_files: dict[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    """The complaints of bash about each script."""
    return output_of_each(["bash", "-n"], script_files)


@pytest.fixture(scope="module")
def said_by_shellcheck(script_files: dict[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    """The complaints of shellcheck about each script."""
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    return output_of_each(["shellcheck", "--norc", "--shell=bash"], script_files)


@ALL
def test_bash_can_read_it(case: str, stage: str, said_by_bash: dict[tuple[str, str], str]) -> None:
    assert said_by_bash[case, stage] == ""


@ALL
def test_shellcheck_has_nothing_to_say(
    case: str, stage: str, said_by_shellcheck: dict[tuple[str, str], str]
) -> None:
    assert said_by_shellcheck[case, stage] == ""


@ALL
def test_it_holds_to_the_contract(case: str, stage: str) -> None:
    """What `hpcgen templates check` asks of a site's scripts, asked of ours."""
    assert check_script(rendered(case, stage), planned_case(case).stages[stage]) == []


@ALL
def test_every_task_runs_in_the_container(case: str, stage: str) -> None:
    """What srun starts without the container's words is the node's own: scratch, the image, the check of nodes."""
    script = folded(rendered(case, stage)).replace("\\\n", "")
    tasks = [
        line
        for line in script.splitlines()
        if re.search(r"^[^#]*(srun|launch) .* (python3 -m|bash \"\$scratch)", line)
    ]
    assert tasks
    for line in tasks:
        assert '"${container[@]}" env "${task_environment[@]}"' in line


def test_nothing_is_taken_from_where_it_was_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("USER", "somebody")
    for case, stage in SCRIPTS[:: len(STAGES) + 1]:
        assert render(case, stage) == rendered(case, stage)
    for case, stage in SCRIPTS:
        # the header names a site's profile, which folded() shortens
        assert str(GOLDEN.parents[1]) not in folded(rendered(case, stage))


@pytest.mark.parametrize(("case", "stage"), [("azure-ndv5-pyxis", "train"), ("site-group", "node-health")])
def test_the_command_line_prints_the_same(
    case: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("HPCGEN_TEMPLATES", raising=False)
    found = subprocess.run(
        [sys.executable, "-m", "hpcgen", "render", stage, "-c", GOLDEN / case / "run.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout == rendered(case, stage)
