"""The memory estimate next to what others measured with other versions of Megatron-LM and Transformer Engine."""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks.planner.memory import stages
from benchmarks.planner.tables import markdown, memory_table

ROOT = Path(__file__).parents[2]


def test_the_estimate_is_near_the_ranks_of_megatron_lm() -> None:
    found = list(stages())
    assert len(found) == 23
    errors = [abs(each.error) for each in found]
    assert statistics.median(errors) < 0.002
    assert max(errors) < 0.007
    dense = [each for each in found if each.model.startswith("llama3")]
    assert max(abs(each.estimated_gib - each.allocated_gib) for each in dense) < 0.6
    assert all(each.reserved_gib > each.allocated_gib for each in found)


def test_the_page_has_this_table() -> None:
    assert markdown(memory_table()) in (ROOT / "docs" / "performance.md").read_text()
