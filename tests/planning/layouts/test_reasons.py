"""Why a layout is better than another, in words."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.layouts.reasons import compared, why
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import ranked as ranked_best
from hpcgen.planning.layouts.search import search
from hpcgen.planning.step_time import Machine
from tests.planning.cases import valid_facts

RUN = valid_facts(nodes=1, model__position_embedding_type="rope")


@pytest.fixture(scope="module")
def ranked() -> RankedLayout:
    """The layout of a run: DP8 MBS2."""
    found = search(RUN, Machine.of(load_node_type("h100-sxm"), nvlink_devices=8), vary=()).own
    assert found is not None
    return found


def with_parts(layout: RankedLayout, **seconds: float) -> RankedLayout:
    """The layout with `seconds` more in parts of its step."""
    parts = {part: getattr(layout.step, part) + more for part, more in seconds.items()}
    return dataclasses.replace(layout, step=dataclasses.replace(layout.step, **parts))


def changed(layout: RankedLayout, path: str, value: object) -> RankedLayout:
    """The layout with another value of a key."""
    return dataclasses.replace(layout, facts=layout.facts.with_value(path, value))


@pytest.mark.parametrize(
    ("seconds", "reason"),
    [
        ({"pipeline_bubble": 1}, "it waits 1 s less in the bubble of its pipeline"),
        ({"host": 1, "optimizer": 0.1}, "it waits 1 s less for its host"),
        (
            {"compute": 1.2, "tensor_parallel": 1.1},
            "it computes 1.2 s less and waits 1.1 s less for tensor-parallel transfers",
        ),
        (
            {"expert_parallel": 2, "data_parallel": -0.5},
            "it waits 2 s less for expert-parallel transfers, although it spends 0.5 s more on reducing gradients "
            "and gathering weights",
        ),
    ],
)
def test_the_parts_that_make_the_difference(
    ranked: RankedLayout, seconds: dict[str, float], reason: str
) -> None:
    first = with_parts(ranked, data_parallel=1)
    sentence = why(first, with_parts(first, **seconds))
    assert sentence.startswith("DP8 MBS2 is ")
    assert sentence.endswith(f"% faster than DP8 MBS2: {reason}")


def test_the_cause_of_less_computation(ranked: RankedLayout) -> None:
    slower = with_parts(ranked, compute=1)
    again = changed(slower, "training.recompute_granularity", "full")
    small = changed(slower, "training.micro_batch_size", 1)
    assert why(ranked, again).endswith(
        "than DP8 MBS2, recompute all: it computes 1 s less, because it recomputes less"
    )
    assert why(ranked, small).endswith("it computes 1 s less, because its micro-batches are larger")


def test_layouts_of_the_same_speed(ranked: RankedLayout) -> None:
    risky = dataclasses.replace(ranked, is_risky=True, free_share=0.01)
    full = dataclasses.replace(ranked, free_share=0.08)
    more_chunks = changed(
        changed(ranked, "parallelism.pipeline_model_parallel_size", 2),
        "parallelism.virtual_pipeline_model_parallel_size",
        3,
    )
    fewer_chunks = changed(more_chunks, "parallelism.virtual_pipeline_model_parallel_size", 2)
    more_ranks = changed(ranked, "parallelism.context_parallel_size", 2)
    assert "is as fast as DP8 MBS2, which the prediction cannot tell apart, and leaves" in why(ranked, risky)
    assert "leaves enough memory" in why(ranked, risky)
    assert "instead of 1%" in why(ranked, risky)
    assert "leaves more memory" in why(ranked, full)
    assert why(fewer_chunks, more_chunks).endswith("has 2 chunks per pipeline stage instead of 3")
    assert why(ranked, more_ranks).endswith("divides the model over 1 GPU instead of 2")


def test_a_safe_layout_that_is_slower_than_a_risk(ranked: RankedLayout) -> None:
    risky = dataclasses.replace(ranked, is_risky=True, free_share=0.01)
    slower = with_parts(ranked, compute=0.055 * ranked.step.total)
    [first, second] = ranked_best([risky, slower], 2)
    assert first is slower
    reason = f"leaves enough memory: {ranked.free_share:.0%} instead of 1%"
    assert why(first, second) == f"DP8 MBS2 is 5.2% slower than DP8 MBS2, but {reason}"
    too_slow = with_parts(ranked, compute=0.062 * ranked.step.total)
    assert next(ranked_best([too_slow, risky], 2)) is risky


def test_memory_adds_up_to_that_of_a_gpu(ranked: RankedLayout) -> None:
    rows = [(what, value) for what, value, _ in compared(ranked, ranked)]
    start = [what for what, _ in rows].index("memory of a GPU")
    (_, of_gpu), *parts, _ = [(what, float(value.split()[0])) for what, value in rows[start:]]
    assert parts[-1] == ("free", pytest.approx(ranked.free_gib, abs=0.05))
    assert sum(gib for _, gib in parts) == pytest.approx(of_gpu, abs=0.05 * len(parts))


def test_two_layouts_side_by_side(ranked: RankedLayout) -> None:
    host = 2 - ranked.step.host
    rows = {what: values for what, *values in compared(ranked, with_parts(ranked, host=host))}
    assert rows["waiting for the host"][1] == "2 s"
    assert rows["microbatches"] == ["32", "32"]
    assert rows["computation"][0] == rows["computation"][1]
    assert len(rows) == len(compared(ranked, ranked))
