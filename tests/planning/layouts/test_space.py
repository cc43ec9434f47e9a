"""The layouts that a search tries."""

from __future__ import annotations

import pytest

from hpcgen.planning.layouts.space import Space
from tests.planning.cases import valid_facts
from trainer.contract.model.pipeline import layout_of, layout_rows


@pytest.mark.parametrize(
    ("layers", "mtp", "text"),
    [
        ((2, 1), 0, "Ett|tL"),
        ((3, *(4,) * 14, 2), 1, "Et*3|(t*4|)*14ttmL"),
        ((1, *(2,) * 30, 0), 1, "Et|(tt|)*30mL"),
        ((0, 3, 2, 2, 0), 0, "E|t*3|(tt|)*2L"),
    ],
)
def test_chunks_as_a_pipeline_layout(layers: tuple[int, ...], mtp: int, text: str) -> None:
    assert layout_of(layers, mtp) == text
    assert tuple(row.count("t") for row in layout_rows(text)) == layers


def test_a_pipeline_layout_of_the_run_is_one_of_those_tried() -> None:
    """`hpcgen layouts --write` writes such a layout, and the next search must not stay with its stages."""
    odd = "Ettt|t|t|tttttttL"
    facts = valid_facts(
        nodes=1,
        model__num_layers=12,
        parallelism__pipeline_model_parallel_size=2,
        parallelism__virtual_pipeline_model_parallel_size=2,
        parallelism__pipeline_model_parallel_layout=odd,
    )
    own = facts.parallelism

    def pipelines(*vary: str) -> list[tuple[int, int | None, str | None]]:
        space = Space(facts, vary)
        found = (each.parallelism for each in space.pipelines(next(space.layers())))
        return [
            (
                each.pipeline_model_parallel_size,
                each.virtual_pipeline_model_parallel_size,
                each.pipeline_model_parallel_layout,
            )
            for each in found
        ]

    alone = (own.pipeline_model_parallel_size, own.virtual_pipeline_model_parallel_size, odd)
    every = pipelines("PP", "VPP")
    assert every.count(alone) == 1
    assert {stages for stages, _, _ in every} >= {1, 2, 4}
    assert pipelines("VPP") == [alone]
