"""A site's template must replace blocks that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.slurm.rendering.blocks import REPLACED, require_known_blocks
from hpcgen.slurm.rendering.environment import make_environment
from hpcgen.slurm.rendering.inventory import block_names, template_chain

NAME = "slurm/train.sbatch.j2"


def site(directory: Path, text: str) -> Path:
    (directory / "slurm").mkdir()
    (directory / NAME).write_text('{% extends "hpcgen/slurm/train.sbatch.j2" %}\n' + text)
    return directory


def test_a_misspelled_block_is_refused_with_its_line_and_the_right_name(tmp_path: Path) -> None:
    directory = site(tmp_path, "{% block enviroment %}\nexport A=1\n{% endblock %}\n")
    with pytest.raises(
        HpcgenError,
        match=r"train\.sbatch\.j2:2: no shipped template has block 'enviroment'; did you mean environment\?",
    ):
        require_known_blocks(make_environment([directory]), NAME)


def test_blocks_of_every_ancestor_and_new_ones_inside_them_are_fine(tmp_path: Path) -> None:
    text = "{% block main %}\n{% endblock %}\n{% block site %}\n{% block ours %}\n{% endblock %}\n{% endblock %}\n"
    require_known_blocks(make_environment([site(tmp_path, text)]), NAME)


@pytest.mark.parametrize(
    ("block", "replacement"),
    [
        ("launch", "function launch"),
        ("prologue", "function site_prologue"),
        ("epilogue", "function site_epilogue"),
        ("cleanup", "function site_epilogue"),
        ("scratch", "function prepare_node"),
        ("container", "block settings"),
        ("functions", "block site"),
    ],
)
def test_a_block_of_earlier_versions_names_its_replacement(
    tmp_path: Path, block: str, replacement: str
) -> None:
    directory = site(tmp_path, f"{{% block {block} %}}\ntrue\n{{% endblock %}}\n")
    with pytest.raises(
        HpcgenError, match=rf"train\.sbatch\.j2:2: block '{block}' no longer exists.*{replacement}"
    ):
        require_known_blocks(make_environment([directory]), NAME)


def test_current_and_earlier_block_names_are_distinct() -> None:
    chain = template_chain(make_environment([]), "train")
    assert set(block_names(chain)) == {"directives", "settings", "environment", "main", "site"}
    assert not REPLACED.keys() & set(block_names(chain))
