"""The libraries that scripts carry: plain shell, checked as files of their own."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcgen.resources import shipped
from hpcgen.slurm.rendering import libraries as libraries_module
from hpcgen.slurm.rendering.libraries import stage_libraries
from hpcgen.slurm.rendering.script import render_stage
from tests.rendering.golden import planned_case, rendered

LIBRARIES = sorted((shipped("templates") / "lib").glob("*.sh"))
NAMES = [path.name for path in LIBRARIES]
OF_THE_SCRIPT = "SC2034,SC2154,SC2317"
"""Variables and functions that other parts of a script set, read or call."""


@pytest.mark.parametrize("path", LIBRARIES, ids=NAMES)
def test_bash_and_shellcheck_have_nothing_to_say(path: Path) -> None:
    commands = [["bash", "-n", path]]
    if shutil.which("shellcheck"):
        commands.append(["shellcheck", "--norc", "--shell=bash", f"--exclude={OF_THE_SCRIPT}", path])
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("path", LIBRARIES, ids=NAMES)
def test_a_library_holds_no_value_and_starts_nothing(path: Path) -> None:
    """At its top level it assigns variables and defines functions: `main` does the rest."""
    text = path.read_text(encoding="utf-8")
    assert "{{" not in text
    assert "{%" not in text
    depth = 0
    for line in text.splitlines():
        if depth == 0 and line and not line.startswith("#"):
            assert re.match(r"[a-z_]+(\(\) [{(]|\+?=)", line), line
        if re.match(r"[a-z_]+(\(\) \{|\+?=\()$", line):
            depth += 1
        elif line in ("}", ")"):
            depth -= 1


def test_a_script_carries_a_library_in_full_and_names_its_hash() -> None:
    stage = planned_case("azure-ndv5-enroot").stages["train"]
    script = rendered("azure-ndv5-enroot", "train")
    libraries = stage_libraries(stage)
    assert [library.path.stem for library in libraries[:2]] == ["base", "ranks"]
    for library in libraries:
        assert f"{library.name} sha256 {library.sha256}" in script
        assert library.text in script


def test_every_library_is_carried_by_some_stage() -> None:
    cases = ("azure-ndv5-pyxis", "azure-ndv5-enroot", "site-group")
    stages = [stage for case in cases for stage in planned_case(case).stages.values()]
    assert {library.path for stage in stages for library in stage_libraries(stage)} == set(LIBRARIES)


def test_another_library_gives_another_hash_of_the_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that two scripts with one hash are one script."""
    shutil.copytree(shipped("templates") / "lib", tmp_path / "lib")
    plan = planned_case("local-none")
    monkeypatch.setattr(libraries_module, "shipped", lambda folder: tmp_path)
    before = hash_of_inputs(render_stage(plan, "train").text)
    with (tmp_path / "lib/train.sh").open("a") as library:
        library.write("# changed\n")
    assert hash_of_inputs(render_stage(plan, "train").text) != before


def hash_of_inputs(script: str) -> str:
    """The last line of the header."""
    found = re.search(r"^# inputs: sha256 ([0-9a-f]{64})$", script, re.MULTILINE)
    assert found is not None
    return found[1]
