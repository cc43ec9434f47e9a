"""The table of Megatron-LM's options: what its columns may hold, and what they say of keys and of other options."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import get_args

import pytest

from hpcgen.config.keys import key_paths
from hpcgen.config.megatron_options import TABLE, Kind, row_of, rows
from hpcgen.config.run import RunConfig

ROWS = list(rows().values())
LINES = TABLE.read_text(encoding="utf-8").splitlines()


def test_each_option_has_one_row_and_every_row_is_of_a_known_kind() -> None:
    names = [line.partition("\t")[0] for line in LINES[1:]]
    assert len(set(names)) == len(names)
    assert {line.split("\t")[1] for line in LINES[1:]} == set(get_args(Kind))
    assert all(line == line.rstrip() for line in LINES)
    assert {line.split("\t")[2] for line in LINES[1:] if line.count("\t") > 1} == {"", "same"}


def test_the_keys_of_options_exist() -> None:
    assert {key for row in ROWS for key in row.keys} <= set(key_paths(RunConfig))
    assert not [row.name for row in ROWS if row.kind in ("key", "negated", "converted") and not row.keys]


def test_what_is_no_option_says_what_to_use_or_who_has_the_name() -> None:
    assert not [row.name for row in ROWS if row.kind in ("absent", "removed") and not row.note]
    assert not [row.name for row in ROWS if row.kind == "name" and not row.configuration]


def test_an_option_comes_after_those_that_it_needs() -> None:
    """`init --from` converts them in this order."""
    before: set[str] = set()
    for row in ROWS:
        for need in row.needs:
            path = re.match(r"(?:not )?([\w.-]+)", need)
            assert path is not None
            assert path[1] in before, row.name
        before |= {f"--{row.name}", *row.keys}


def test_the_modules_that_convert_options_exist() -> None:
    modules = {row.carried_by for row in ROWS} - {""}
    assert all(find_spec(f"hpcgen.check.migration.{module}") for module in modules)


@pytest.mark.parametrize(
    ("option", "decides"),
    [
        ("wandb-member-of-a-fork", False),
        ("moe-member-of-a-fork", True),
        ("moe-member-fusion", False),
        ("ckpt-step", True),
        ("ckpt-member", False),
        ("seed", True),
    ],
)
def test_a_row_of_its_own_comes_before_the_family(option: str, decides: bool) -> None:
    row = row_of(option)
    assert row is not None
    assert row.decides is decides


def test_no_row_for_what_nobody_knows() -> None:
    assert row_of("frobnicate") is None
