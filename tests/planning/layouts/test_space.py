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


def test_the_stages_of_the_run_are_among_those_tried() -> None:
    facts = valid_facts(
        nodes=1,
        parallelism__pipeline_model_parallel_size=4,
        parallelism__num_layers_in_first_pipeline_stage=2,
        parallelism__num_layers_in_last_pipeline_stage=6,
    )
    space = Space(facts, ("PP",))
    found = [each.chunk_layers for each in space.pipelines(next(space.layers()))]
    assert found.count((2, 2, 2, 6)) == 1


def test_the_embedding_and_the_loss_count_as_layers() -> None:
    """Ten layers on four stages: the embedding and the loss count as one layer each, or the loss as two."""
    facts = valid_facts(nodes=1, model__num_layers=10)
    space = Space(facts, ("PP",))
    found = [each for each in space.pipelines(next(space.layers())) if each.parallelism.num_chunks == 1]
    of_four = [each for each in found if each.parallelism.pipeline_model_parallel_size == 4]
    assert [each.chunk_layers for each in of_four] == [(3, 3, 3, 1), (2, 3, 3, 2)]
    assert of_four[0].parallelism.pipeline_model_parallel_layout == "Et*3|(t*3|)*2tL"
    assert of_four[1].parallelism.account_for_embedding_in_pipeline_split
    assert of_four[1].parallelism.account_for_loss_in_pipeline_split


def test_keys_without_meaning_return_to_their_defaults() -> None:
    facts = valid_facts(
        nodes=1,
        parallelism__tensor_model_parallel_size=2,
        parallelism__sequence_parallel=True,
        parallelism__tp_comm_overlap=True,
        parallelism__context_parallel_size=2,
        parallelism__cp_comm_type="all_gather",
    )
    runs = [each.parallelism for each in Space(facts, ("TP", "CP")).layers()]
    assert {each.tensor_model_parallel_size for each in runs} == {1, 2, 4, 8}
    for each in runs:
        assert each.tp_comm_overlap == each.sequence_parallel == (each.tensor_model_parallel_size > 1)
        assert each.cp_comm_type == ("all_gather" if each.context_parallel_size > 1 else None)


def test_groups_that_exchange_activations_stay_in_a_domain_unless_samples_are_long() -> None:
    def sizes(seq_length: int) -> set[tuple[int, int]]:
        facts = valid_facts(nodes=4, model__seq_length=seq_length)
        runs = (each.parallelism for each in Space(facts).layers())
        return {(each.tensor_model_parallel_size, each.context_parallel_size) for each in runs}

    assert all(tensor * context <= 8 for tensor, context in sizes(2048))
    assert (8, 4) in sizes(131072)
    assert max(tensor for tensor, _ in sizes(131072)) == 8


def test_recomputation_grows_by_modules_that_the_model_has() -> None:
    gated = {"model__add_bias_linear": False, "model__swiglu": True}
    experts = gated | {"model__num_moe_experts": 4, "model__moe_router_topk": 2}
    assert modules(**gated) == [("mlp",)]
    assert modules(**experts) == [("layernorm",), ("layernorm", "moe_act"), ("layernorm", "moe")]
    assert modules() == []  # Megatron-Core cannot recompute an MLP with biases


def modules(**changes: object) -> list[tuple[str, ...] | None]:
    """The sets of modules that are recomputed."""
    facts = valid_facts(nodes=1, **changes)
    kinds = Space(facts).recomputed(facts)
    return [each.training.recompute_modules for each in kinds[0]]
