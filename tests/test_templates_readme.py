"""templates/README.md names every block and every variable that a site may use, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import meta, nodes

from hpcgen.slurm.rendering.environment import make_environment
from hpcgen.slurm.rendering.filters import LOGIC_FILTERS, OUTPUT_FILTERS
from hpcgen.slurm.rendering.replaced import replaced_functions, shipped_functions, with_records
from hpcgen.slurm.rendering.script import template_context
from hpcgen.stages import STAGES
from tests.rendering.golden import planned_case
from tests.rendering.scripts import write_templates
from tests.runs import big_run, planned

TEMPLATES = Path(__file__).parents[1] / "templates"
README = (TEMPLATES / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.split(f"## {title}\n")[1].split("\n## ")[0]


def first_column(text: str) -> set[str]:
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def parsed() -> list[nodes.Template]:
    environment = make_environment()
    return [environment.parse(path.read_text(encoding="utf-8")) for path in TEMPLATES.rglob("*.j2")]


def test_every_block_and_function_of_a_site_is_documented() -> None:
    blocks = {block.name for tree in parsed() for block in tree.find_all(nodes.Block)}
    base = (
        (TEMPLATES / "slurm/base.sbatch.j2").read_text(encoding="utf-8").partition("functions of the site")[2]
    )
    functions = set(re.findall(r"^(\w+)\(\) ", base, re.MULTILINE))
    assert functions == {"launch", "site_prologue", "prepare_node", "site_epilogue"}
    assert first_column(section("Blocks")) == blocks | functions


def documented_variables() -> dict[str, set[str]]:
    """Variable -> the stages that have it, as the table says."""
    found: dict[str, set[str]] = {}
    for line in section("Variables").splitlines():
        if line.startswith("| `"):
            names, stages, _ = line.strip("|").split("|", 2)
            where = set(STAGES) if stages.strip() == "all" else set(stages.strip().split(", "))
            found |= dict.fromkeys(re.findall(r"`(\w+)`", names), where)
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_every_variable_is_documented_for_the_stages_that_have_it(stage: str) -> None:
    cases = ("site-group", "azure-ndv5-enroot")
    given = {name for case in cases for name in template_context(planned_case(case), stage, sources=())}
    assert given == {name for name, stages in documented_variables().items() if stage in stages}


def test_the_stages_of_the_table_are_stages() -> None:
    assert set().union(*documented_variables().values()) == set(STAGES)


def test_templates_use_no_variable_that_is_not_documented() -> None:
    used = set().union(*(meta.find_undeclared_variables(tree) for tree in parsed()))
    assert used <= first_column(section("Variables"))


def test_every_filter_is_documented() -> None:
    assert first_column(section("Rules")) == {*OUTPUT_FILTERS, *LOGIC_FILTERS}


@pytest.mark.process
@pytest.mark.parametrize("stage", ["base", "train"])
def test_the_examples_in_the_readme_can_be_loaded(tmp_path: Path, stage: str) -> None:
    example = README.split("```jinja\n")[1].split("```")[0].replace("train", stage)
    site = tmp_path / "slurm"
    site.mkdir()
    (site / f"{stage}.sbatch.j2").write_text(example)
    plan = planned(tmp_path, big_run())
    from hpcgen import render

    script = render(plan, "train", [tmp_path])
    assert "module load site-tools" in script
    assert 'task_environment+=("SITE_PROXY=http://proxy:3128")' in script
    assert f"{site}/{stage}.sbatch.j2" in script


GUIDES = [TEMPLATES / "README.md", *sorted((TEMPLATES.parent / "docs").rglob("*.md"))]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(block, id=f"{guide.name}-{number}")
        for guide in GUIDES
        for number, block in enumerate(
            re.findall(r"^```jinja\n(.*?)^```", guide.read_text(encoding="utf-8"), re.M | re.S)
        )
    ],
)
def test_functions_in_examples_have_the_comment_with_their_shipped_version(
    example: str, tmp_path: Path
) -> None:
    """Sites copy them. Without the comment, nothing would tell them when hpcgen changes its own version."""
    name = next(iter(re.findall(r'extends "hpcgen/slurm/([a-z-]+)', example)), "base")
    extends = "" if "{% extends" in example else f'{{% extends "hpcgen/slurm/{name}.sbatch.j2" %}}\n'
    write_templates(tmp_path, {f"slurm/{name}.sbatch.j2": extends + example})
    wrong = [
        each.name
        for each in replaced_functions(make_environment([tmp_path]), name)
        if each.is_stale or each.is_unrecorded
    ]
    assert not wrong, f"write this in the guide:\n{with_records(example, shipped_functions(name))}"
