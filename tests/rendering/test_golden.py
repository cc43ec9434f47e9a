"""Golden scripts: complete files in git, read in review like code, and checked for more than sameness."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcgen.stages import STAGES
from tests.rendering.golden import CASES, GOLDEN, SCRIPTS, folded, render, rendered

ALL = pytest.mark.parametrize(("case", "stage"), SCRIPTS, ids=[f"{case}-{stage}" for case, stage in SCRIPTS])


def test_every_golden_file_is_a_case() -> None:
    files = {(path.parent.name, path.stem) for path in GOLDEN.glob("*/*.sbatch")}
    assert files == set(SCRIPTS)
    assert {stage for _, stage in SCRIPTS} == set(STAGES)
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == set(CASES)


@ALL
def test_the_script_is_the_golden_one(
    case: str, stage: str, compare_golden: Callable[[Path, str], None]
) -> None:
    compare_golden(GOLDEN / case / f"{stage}.sbatch", folded(rendered(case, stage)))


@pytest.fixture(scope="module")
def script_files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """Every script as a file."""
    directory = tmp_path_factory.mktemp("scripts")
    files = {script: directory / f"{'-'.join(script)}.sh" for script in SCRIPTS}
    for (case, stage), path in files.items():
        path.write_text(rendered(case, stage), encoding="utf-8")
    return files


def output_of_each(command: list[str], files: Mapping[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    """Output of a command for each file, run in batches."""

    def run(path: Path) -> str:
        found = subprocess.run([*command, path], capture_output=True, text=True, check=False)
        return found.stdout + found.stderr or f"status {found.returncode}" * bool(found.returncode)

    with ThreadPoolExecutor(max_workers=4) as threads:
        return dict(zip(files, threads.map(run, files.values()), strict=True))


@pytest.fixture(scope="module")
def said_by_bash(script_files: dict[tuple[str, str], Path]) -> dict[tuple[str, str], str]:
    """The complaints of bash about each script."""
    return output_of_each(["bash", "-n"], script_files)


@pytest.mark.process
@ALL
def test_bash_can_read_it(case: str, stage: str, said_by_bash: dict[tuple[str, str], str]) -> None:
    assert said_by_bash[case, stage] == ""


@pytest.mark.process
@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_shellcheck_reports_nothing(script_files: dict[tuple[str, str], Path], every: bool) -> None:
    """A long script takes a second. The default is the longest four; test_libraries.py reads each library."""
    by_size = sorted(script_files.items(), key=lambda file: file[1].stat().st_size)
    chosen = dict(by_size if every else by_size[-4:])
    reported = output_of_each(["shellcheck", "--norc", "--shell=bash"], chosen)
    assert reported == dict.fromkeys(chosen, "")


@ALL
def test_a_script_defines_everything_and_then_calls_main(case: str, stage: str) -> None:
    """A function that is called and not defined could come from the submitting shell."""
    lines = rendered(case, stage).splitlines()
    assert lines[-1] == 'main "$@"'
    defined = {found[1] for line in lines if (found := re.match(r"([a-z_]+)\(\) [{(]", line))}
    assert {"launch", "prepare_node", "conclude"} <= defined
    begin = lines.index("main() {")
    called = {line.split()[0] for line in lines[begin + 1 : lines.index("}", begin)]} - {"((terminated))"}
    assert called <= defined


@ALL
def test_every_task_runs_in_the_container(case: str, stage: str) -> None:
    """Only steps for the node itself run without the container's words: scratch, the image, the check of nodes."""
    script = folded(rendered(case, stage)).replace("\\\n", "")
    tasks = [
        line for line in script.splitlines() if re.search(r"srun .*(import_check|nccl_tests|step\[@\])", line)
    ]
    assert (
        'launch() { run_step srun "${step[@]}" "${container[@]}" env "${task_environment[@]}" "$@"; }'
        in tasks
    )
    for line in tasks:
        assert '"${container[@]}"' in line


def test_the_script_of_175b_is_read_in_five_minutes() -> None:
    """The launch, the settings and the job's story come before the job's files and the libraries."""
    lines = rendered("azure-ndv5-pyxis", "train").splitlines()
    assert max(map(len, lines)) < 2000
    assert next(number for number, line in enumerate(lines, 1) if "run_until_good launch" in line) <= 125
    assert lines.index("# ==== the job's files ====") <= 138
    assert sum('{"prefix"' not in line for line in lines) <= 634


def test_a_script_does_not_depend_on_where_it_was_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("USER", "somebody")
    for case, stage in SCRIPTS[::4]:
        assert render(case, stage) == rendered(case, stage)
    for case, stage in SCRIPTS:
        # the header names a site's profile, which folded() shortens
        assert str(GOLDEN.parents[1]) not in folded(rendered(case, stage))


@pytest.mark.process
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
