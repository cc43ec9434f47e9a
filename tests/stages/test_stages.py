"""The stages and their rows: what reading the rows costs, and who else knows the names."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.config.stages import FRAMES
from hpcgen.data.stages import DATA_STAGES
from hpcgen.planning.kind import Stage
from hpcgen.slurm.rendering.environment import make_environment
from hpcgen.slurm.rendering.inventory import template_chain
from hpcgen.stages import STAGES

ROOT = Path(__file__).parents[2]
LIFE_OF_A_MODEL = ("image", "download", "extract", "concat", "tokenize", "prepare", "index-cache", "train")
PACKAGES = ("cli", "config", "planning", "run_plan", "slurm")
"""Packages that ask a stage what it is, and not what its name is."""


def test_stages_come_in_the_order_in_which_they_run() -> None:
    assert tuple(name for name in STAGES if name in LIFE_OF_A_MODEL) == LIFE_OF_A_MODEL


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES)
def test_each_has_a_template_that_extends_its_frame(stage: Stage) -> None:
    template, parent, *_ = template_chain(make_environment(), stage.name)
    assert (template.name, parent.name) == (stage.template, f"slurm/{stage.frame}.sbatch.j2")


def test_a_variable_names_a_file_and_submitit_starts_the_program_that_reads_it() -> None:
    with_variable, with_file, by_submitit = (
        {name for name, stage in STAGES.items() if getattr(stage, key)}
        for key in ("config_variable", "config_file", "by_submitit")
    )
    assert "train" in with_variable <= with_file <= by_submitit


def test_the_data_stages_are_those_of_the_data_tools() -> None:
    assert tuple(name for name, stage in STAGES.items() if stage.is_array) == tuple(DATA_STAGES)
    assert FRAMES == ("base", "data")


@pytest.mark.process
def test_reading_their_rows_imports_nothing_of_what_they_do() -> None:
    program = "import sys, hpcgen.config.stages; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = {name for name in found.stdout.split() if name.startswith(("hpcgen.", "trainer."))}
    assert imported == {
        "hpcgen.config",
        "hpcgen.config.stages",
        "hpcgen.version",
        "trainer.contract",
        "trainer.contract.record",
    }
    assert not {"numpy", "submitit", "pydantic", "jinja2", "click"} & set(found.stdout.split())


@pytest.mark.parametrize("package", PACKAGES)
def test_no_module_compares_the_name_of_a_stage(package: str) -> None:
    compared = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "hpcgen" / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Compare)
        for operand in (node.left, *node.comparators)
        for part in ast.walk(operand)
        if isinstance(part, ast.Constant) and part.value in STAGES
    ]
    assert compared == []


def row(stage: Stage) -> str:
    """A stage as docs/stages.md describes it."""
    runs_on = "one task"
    if stage.is_array:
        runs_on = "a job array"
    elif stage.uses_gpus:
        runs_on = "every GPU of its nodes"
    others = [*(["submit"] if stage.by_submitit else []), *([stage.name] if stage.has_command else [])]
    starts = ", ".join(f"`{command}`" for command in ("render", *others))
    needs = "run file" if stage.needs else "run file or cluster"
    return f"| `{stage.name}` | {stage.summary} | {runs_on} | {stage.time_limit or 'none'} | {starts} | {needs} |"


def test_the_documentation_has_a_row_for_each() -> None:
    page = (ROOT / "docs" / "stages.md").read_text(encoding="utf-8")
    documented = [line for line in page.splitlines() if line.startswith("| `")]
    assert documented == [row(stage) for stage in STAGES.values()]
