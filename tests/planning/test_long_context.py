"""Rules and memory of documents, of the exchange between context-parallel ranks, and of recomputed modules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcgen.planning.memory import estimate_memory
from hpcgen.planning.repairs import check
from hpcgen.planning.setup import Setup
from tests.planning.cases import broken, errors, valid_facts, warned, warnings
from tests.planning.test_model_size import llama3_8b
from trainer.contract.config import ParallelismConfig, RopeScaling, TrainingConfig
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW
from trainer.contract.rules import context_parallel, cuda_graphs, data, model, recompute
from trainer.contract.rules.facts import Rule

DOCUMENTS = {"data__reset_attention_mask": True}
CP, KIND = "parallelism__context_parallel_size", "parallelism__cp_comm_type"
SIZES = "parallelism__hierarchical_context_parallel_sizes"
MODULES, SELECTIVE = "training__recompute_modules", {"training__recompute_granularity": "selective"}
TORCH = {"training__transformer_impl": "torch"}
NO_BIAS = {"model__add_bias_linear": False}
MLA = {"model__position_embedding_type": "rope", "model__multi_latent_attention": True}


REFUSED = {
    "documents without Transformer Engine": (
        {**DOCUMENTS, **TORCH},
        "data.reset_attention_mask",
        data.documents_need_transformer_engine_on_gpus,
    ),
    "graphs with documents": (
        {**DOCUMENTS, "training__cuda_graph_impl": "transformer_engine"},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_one_document,
    ),
    "the end of a document that nothing reads": (
        {"data__eod_id": 7},
        "data.eod_id",
        data.end_of_document_is_used,
    ),
    "the end of a document beyond the vocabulary": (
        {**DOCUMENTS, "data__eod_id": 60000},
        "data.eod_id",
        data.end_of_document_has_row,
    ),
    "p2p with documents": (
        {**DOCUMENTS, CP: 2, KIND: "p2p"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_fits_attention,
    ),
    "p2p with a window": (
        {"model__window_size": 512, CP: 2, KIND: "p2p"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_fits_attention,
    ),
    "CP with a width that Transformer Engine does not support": (
        {**MLA, CP: 2, "model__v_head_dim": 12},
        "parallelism.context_parallel_size",
        context_parallel.heads_fit_kernels,
    ),
    "an exchange without CP": (
        {KIND: "a2a"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_needs_context_parallel,
    ),
    "a2a without Transformer Engine": (
        {**TORCH, CP: 2, KIND: "a2a"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_fits_kernels,
    ),
    "a2a that does not divide the query groups": (
        {"model__num_query_groups": 2, CP: 4, KIND: "a2a"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_divides_heads,
    ),
    "two levels without sizes": (
        {CP: 4, KIND: "a2a+p2p"},
        "parallelism.hierarchical_context_parallel_sizes",
        context_parallel.hierarchy_fits_ranks,
    ),
    "two levels with another product": (
        {CP: 4, KIND: "a2a+p2p", SIZES: (4, 2)},
        "parallelism.hierarchical_context_parallel_sizes",
        context_parallel.hierarchy_fits_ranks,
    ),
    "sizes without two levels": (
        {CP: 4, KIND: "a2a", SIZES: (2, 2)},
        "parallelism.hierarchical_context_parallel_sizes",
        context_parallel.hierarchy_fits_ranks,
    ),
    "two levels that do not divide the query groups": (
        {CP: 8, KIND: "a2a+p2p", SIZES: (4, 2), "model__num_query_groups": 2},
        "parallelism.hierarchical_context_parallel_sizes",
        context_parallel.exchange_divides_heads,
    ),
    "modules without recompute": (
        {MODULES: ("mlp",), **NO_BIAS},
        "training.recompute_modules",
        recompute.modules_need_selective,
    ),
    "the MLP with biases": (
        {**SELECTIVE, MODULES: ("core_attn", "mlp")},
        "training.recompute_modules",
        recompute.modules_can_be_recomputed,
    ),
    "no modules": (
        {**SELECTIVE, MODULES: ()},
        "training.recompute_modules",
        recompute.modules_need_selective,
    ),
    "experts of a model without them": (
        {**SELECTIVE, MODULES: ("moe",)},
        "training.recompute_modules",
        recompute.modules_exist,
    ),
    "the activation of experts without grouped GEMM": (
        {
            **SELECTIVE,
            **NO_BIAS,
            MODULES: ("moe_act",),
            "model__num_moe_experts": 8,
            "parallelism__moe_grouped_gemm": False,
        },
        "training.recompute_modules",
        recompute.modules_can_be_recomputed,
    ),
    "norms of a dense model": (
        {**SELECTIVE, MODULES: ("layernorm",)},
        "training.recompute_modules",
        recompute.modules_exist,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


@pytest.mark.parametrize(
    "changes",
    [
        {**DOCUMENTS, "data__eod_id": 50256},
        {**DOCUMENTS, CP: 2, KIND: "all_gather"},
        {"model__window_size": 512, CP: 2, KIND: "a2a"},
        {CP: 8, KIND: "a2a+p2p", SIZES: (4, 2), "model__num_query_groups": 4},
        {**TORCH, CP: 2, KIND: "all_gather"},
        {**MLA, CP: 2, KIND: "p2p"},
        {**MLA, **TORCH, CP: 2, KIND: "all_gather"},
        {**MLA, **DOCUMENTS, "data__eod_id": 3, CP: 2, KIND: "all_gather"},
        {**SELECTIVE, MODULES: ("core_attn", "mlp"), **NO_BIAS},
    ],
)
def test_valid_values_pass(changes: dict[str, object]) -> None:
    assert errors(**changes) == []


def rope(length: int, **scaling: Any) -> dict[str, object]:
    """A sequence of `length` tokens on a device with room for it."""
    return {
        "model__position_embedding_type": "rope",
        "model__rope_scaling": RopeScaling(original_max_position_embeddings=8192, factor=4.0, **scaling),
        "model__seq_length": length,
        "device_memory_gib": 10_000,
    }


WARNED = {
    "YaRN that does not reach the sequence": (
        rope(131072, rope_type="yarn"),
        "model.rope_scaling.factor",
        model.yarn_reaches_sequence,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), WARNED.values(), ids=WARNED)
def test_yarn_should_reach_the_sequence(changes: dict[str, Any], path: str, rule: Rule) -> None:
    assert warned(**changes) == [(path, rule)]


@pytest.mark.parametrize(
    "changes",
    [
        rope(32768, rope_type="yarn"),
        rope(131072, rope_type="llama3", low_freq_factor=1.0, high_freq_factor=4.0),
    ],
)
def test_scaling_without_a_warning(changes: dict[str, Any]) -> None:
    assert warnings(**changes) == []


def test_documents_need_no_transformer_engine_on_cpus() -> None:
    facts = valid_facts(device="cpu", **DOCUMENTS, data__eod_id=3)
    assert check(facts)[0] == []


def gib(
    context_parallel: int, documents: bool = False, seq_length: int = 131072, **training: object
) -> float:
    """Activations of Llama 3 8B on 8 GPUs with TP 1."""
    model = dataclasses.replace(llama3_8b(32), seq_length=seq_length, max_position_embeddings=seq_length)
    parallelism = ParallelismConfig(context_parallel_size=context_parallel)
    config = TrainingConfig(micro_batch_size=1, global_batch_size=8, train_iters=1, **training)
    layout = Layout.make(model, parallelism, config, 8)
    assert layout is not None
    found = estimate_memory(Setup(model, parallelism, config, layout, ADAMW, documents))
    return found.activation_bytes / 2**30


def test_context_parallelism_divides_activations() -> None:
    of_output_weight = 2 * 128256 * 4096 / 2**30  # its gradient, which every rank has
    assert (gib(1) - of_output_weight) / (gib(8) - of_output_weight) == pytest.approx(8)
    assert gib(8) == pytest.approx(gib(1, seq_length=16384), rel=0.01)


def test_a_recomputed_mlp_keeps_its_input() -> None:
    """Llama 3 8B: 4096 wide, with an MLP of 14336. Its 32 layers store 3 x 14336 + 4096 values per token less.

    One layer at a time computes them again, which needs less memory than the logits.
    """
    stored = gib(8) - gib(8, recompute_granularity="selective", recompute_modules=("mlp",))
    assert stored == pytest.approx(32 * 16384 * 2 * (3 * 14336 + 4096) / 2**30, rel=0.01)


def test_documents_keep_gathered_keys_and_values() -> None:
    """8 groups of 128 channels, of 7/8 of the sequence, for 32 layers.

    With recomputation, one layer at a time has them, when the logits are released. All layers then keep 4096 queries
    and 1024 keys before their rotation.
    """
    gathered = 131072 * 7 / 8 * 2 * 2 * 1024 / 2**30
    assert gib(8, documents=True) - gib(8) == pytest.approx(32 * gathered, rel=0.01)
    recomputed = gib(8, documents=True, recompute_granularity="selective")
    assert recomputed - gib(8) == pytest.approx(32 * 16384 * 2 * (4096 + 1024) / 2**30)
    assert gib(1, documents=True) == gib(1)
