"""A layout that was chosen, in the run file: which keys change, and the text with them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcgen.config.document import read_text
from hpcgen.config.edits import with_values
from hpcgen.config.loader import load_run
from hpcgen.errors import HpcgenError
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.space import KEYS
from hpcgen.planning.request import make_allocation
from hpcgen.run_plan.layouts.result import NODES
from hpcgen.stages.train import TRAIN
from hpcgen.text import few
from trainer.contract.record import record

LAYOUT_KEYS = tuple(itertools.chain.from_iterable(KEYS.values()))
"""The keys that a search may change."""


@record(kw_only=True)
class Choice:
    """A run file with a layout that was chosen."""

    file: Path
    text: str
    changes: Mapping[str, tuple[object, object]]
    """Dotted path -> the value so far, from the file or its preset, and the new one. Empty if the file has the layout
    already."""


def require_no_others(file: Path, overrides: Sequence[str]) -> None:
    """Checks that --set sets only keys of the layout, which the run file will have.

    Raises:
        HpcgenError: it sets other keys, without which the layout may be wrong.
    """
    keys = (override.partition("=")[0] for override in overrides)
    if others := [key for key in keys if key not in (*LAYOUT_KEYS, NODES)]:
        raise HpcgenError(
            f"--write leaves out --set {few(others, 4)}, without which the layout may be wrong or slow",
            f"write {'it' if len(others) == 1 else 'them'} into {file} first",
        )


def choose(file: Path, overrides: Sequence[str], layout: RankedLayout, num_nodes: int, reason: str) -> Choice:
    """The run file with a layout and a number of nodes. A comment begins with `reason`. Writes nothing.

    `overrides` are the values of --set with which the layout was found.

    Raises:
        HpcgenError: see `require_no_others`, or the file cannot be edited.
    """
    require_no_others(file, overrides)
    values = {key: layout.facts.value_at(key) for key in LAYOUT_KEYS} | {NODES: num_nodes}
    before = _values_before(file)
    changed = {key: value for key, value in values.items() if value != before[key]}
    text = read_text(file)
    return Choice(
        file=file,
        text=with_values(text, str(file), changed, reason) if changed else text,
        changes={key: (before[key], value) for key, value in changed.items()},
    )


def _values_before(file: Path) -> dict[str, Any]:
    """The values of the keys in the run file and its preset, without --set."""
    run = load_run(file)
    values: dict[str, Any] = {key: operator.attrgetter(key)(run.config) for key in LAYOUT_KEYS}
    return values | {NODES: make_allocation(TRAIN, run.config, run.cluster, run.node_type).nodes}
