"""A site's template must replace blocks that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.rendering.blocks import require_known_blocks
from hpcgen.rendering.environment import make_environment

NAME = "slurm/train.sbatch.j2"


def site(directory: Path, text: str) -> Path:
    (directory / "slurm").mkdir()
    (directory / NAME).write_text('{% extends "hpcgen/slurm/train.sbatch.j2" %}\n' + text)
    return directory


def test_a_misspelt_block_is_refused_with_its_line_and_the_right_name(tmp_path: Path) -> None:
    directory = site(tmp_path, "{% block prolog %}\nmodule load cuda\n{% endblock %}\n")
    with pytest.raises(HpcgenError, match=r"train\.sbatch\.j2:2: block 'prolog' .*did you mean prologue\?"):
        require_known_blocks(make_environment([directory]), NAME)


def test_blocks_of_every_ancestor_and_new_ones_inside_them_are_fine(tmp_path: Path) -> None:
    text = "{% block header %}\n{% endblock %}\n{% block checks %}\n{% block ours %}\n{% endblock %}\n{% endblock %}\n"
    require_known_blocks(make_environment([site(tmp_path, text)]), NAME)
