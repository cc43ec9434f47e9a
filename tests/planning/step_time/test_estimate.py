"""The predicted step: the work that it counts, and how its parts follow from layouts and settings."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.memory.parameters import stage_parameter_counts
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, StepTime, estimate_step_time, schedule, transfers
from hpcgen.planning.step_time import estimate as estimate_module
from hpcgen.planning.step_time.estimate import Estimator
from hpcgen.planning.step_time.host import host_rows, host_time, layers_of
from hpcgen.planning.step_time.kernels import Attention, Kernels, Product
from hpcgen.planning.step_time.machine import Constant
from hpcgen.planning.step_time.measurements import Measurements
from tests.planning.test_memory import GPT, MIXTRAL_3_LAYERS
from tests.planning.test_model_size import llama3_8b
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import LoraConfig, ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.flops import flops
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW

AXES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
}
H200 = dataclasses.replace(Machine.of(load_node_type("h200-sxm"), nvlink_devices=8), measurements=None)
LLAMA = llama3_8b(8, 8192)
MIXTRAL_8 = dataclasses.replace(MIXTRAL_3_LAYERS, num_layers=8, moe_layer_freq=(1,) * 8)
MIXTRAL_4 = dataclasses.replace(MIXTRAL_3_LAYERS, num_layers=4, moe_layer_freq=(1,) * 4)
LATENT = resolve_model(
    ModelConfig(
        num_layers=4,
        hidden_size=2048,
        num_attention_heads=16,
        seq_length=4096,
        position_embedding_type="rope",
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        multi_latent_attention=True,
        q_lora_rank=1536,
        qk_layernorm=True,
        num_moe_experts=64,
        moe_ffn_hidden_size=1408,
        moe_router_topk=6,
        moe_shared_expert_intermediate_size=2816,
        moe_layer_freq=(0, 1, 1, 1),
        ffn_hidden_size=10944,
        mtp_num_layers=1,
        vocab_size=102400,
        untie_embeddings_and_output_weights=True,
    )
)


def setup(
    model: ModelConfig, *, ranks: int = 1, micro: int = 1, num_microbatches: int = 8, **keys: Any
) -> Setup:
    """A run; `keys` are axes, and keys of the sections parallelism and training."""
    axes = {AXES.get(name, name): value for name, value in keys.items() if not hasattr(TrainingConfig, name)}
    training = {name: value for name, value in keys.items() if hasattr(TrainingConfig, name)}
    axes = {
        "sequence_parallel": "tp" in keys,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    } | axes
    parallelism = ParallelismConfig(**axes)
    replicas = ranks // (keys.get("tp", 1) * keys.get("pp", 1) * keys.get("cp", 1))
    batch = micro * num_microbatches * replicas
    config = TrainingConfig(micro_batch_size=micro, global_batch_size=batch, train_iters=1, **training)
    layout = Layout.make(model, parallelism, config, ranks)
    assert layout is not None
    return Setup(model, parallelism, config, layout, ADAMW)


def step(model: ModelConfig, **keys: Any) -> StepTime:
    return estimate_step_time(setup(model, **keys), H200)


class FlopCounter(Kernels):
    """Kernels that take a second for each floating-point operation of a product, and no time for anything else."""

    def product(self, product: Product) -> float:
        return 2.0 * product.m * product.n * product.k * product.groups

    def attention(self, attention: Attention) -> float:
        pairs = attention.batch * attention.heads * attention.seq**2 / 2
        passes = {"forward": 1, "backward": 2}[
            attention.direction
        ]  # without the scores that are computed again
        return 2.0 * passes * pairs * (attention.qk_dim + attention.v_dim)

    def memory(self, *_: object, **__: object) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        (GPT, {}),
        (LLAMA, {"micro": 2}),
        (dataclasses.replace(LLAMA, window_size=1024), {}),
        (LLAMA, {"ranks": 4, "tp": 4}),
        (LLAMA, {"ranks": 4, "cp": 4}),
        (LLAMA, {"ranks": 4, "cp": 4, "cp_comm_type": "a2a"}),
        (LLAMA, {"ranks": 4, "cp": 4, "cp_comm_type": "all_gather"}),
        (
            LLAMA,
            {"ranks": 8, "cp": 8, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)},
        ),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "ep": 4}),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "ep": 2, "tp": 2}),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "tp": 4, "moe_token_dispatcher_type": "allgather"}),
        (LATENT, {"ranks": 4, "tp": 2, "ep": 4, "expert_tensor_parallel_size": 1}),
        (LLAMA, {"freeze": ("embedding.*", "decoder.layers.[0-3].*")}),
        (LLAMA, {"freeze": ("decoder.layers.[0-3].*", "output_layer.*")}),
        (LLAMA, {"freeze": ("embedding.*", "decoder.layers.0.*", "*.linear_qkv.*", "*.linear_fc2.*")}),
        (GPT, {"freeze": ("embedding.*", "*.mlp.*"), "micro": 2}),
        (MIXTRAL_3_LAYERS, {"ranks": 4, "ep": 4, "freeze": ("embedding.*", "*.experts.*")}),
    ],
    ids=[
        *("GPT", "Llama", "window", "TP", "CP ring", "CP heads", "CP gathered", "CP in two levels"),
        *("EP", "ETP", "allgather", "latent attention with shared experts and MTP"),
        *("frozen half", "frozen below the embedding", "frozen parts", "frozen MLPs", "frozen experts"),
    ],
)
def test_all_products_of_the_model_are_counted(
    model: ModelConfig, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products of all ranks are those of Megatron-LM's formula, which leaves out the router."""
    monkeypatch.setattr(estimate_module, "kernels_of", FlopCounter)
    found = setup(model, **keys)
    tokens = found.training.global_batch_size * model.seq_length
    pairs = found.training.global_batch_size * visible_pairs(model, [model.seq_length])
    expected = flops(model, tokens, pairs, found.training.freeze)
    counted = estimate_step_time(found, H200).compute * found.layout.world_size
    assert counted == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("model", "run", "measured_ms", "tolerance"),
    [
        (GPT, {"micro": 8, "num_microbatches": 4}, 1006.6, 0.05),
        (LLAMA, {"micro": 2, "num_microbatches": 4}, 1720.5, 0.05),
        (LLAMA, {"micro": 2, "num_microbatches": 4, "fp8": "hybrid"}, 1264.0, 0.06),
        (dataclasses.replace(LLAMA, seq_length=32768), {"num_microbatches": 2}, 2374.0, 0.05),
        (MIXTRAL_3_LAYERS, {"micro": 2, "num_microbatches": 4}, 577.3, 0.05),
    ],
    ids=["GPT", "Llama", "Llama in FP8", "long samples", "experts"],
)
def test_steps_of_one_gpu(
    model: ModelConfig, run: dict[str, Any], measured_ms: float, tolerance: float
) -> None:
    """Steps of the trainer on an H200 (docs/performance.md), from general constants alone."""
    assert step(model, **run).total * 1e3 == pytest.approx(measured_ms, rel=tolerance)


EXPERTS_ALONE = {"ranks": 2, "ep": 2, "num_microbatches": 4, "moe_grouped_gemm": False}
ADAPTERS = LoraConfig(rank=16)
OF_ATTENTION = LoraConfig(rank=16, target_modules=("linear_qkv", "linear_proj"))


@pytest.mark.parametrize(
    ("model", "run", "lora", "measured_ms", "tolerance"),
    [
        (LLAMA, {"num_microbatches": 4}, LoraConfig(), 895.2, 0.05),
        (LLAMA, {"num_microbatches": 4}, ADAPTERS, 692.6, 0.05),
        (MIXTRAL_4, EXPERTS_ALONE, ADAPTERS, 815.3, 0.15),
    ],
    ids=["all weights", "adapters", "adapters of experts"],
)
def test_steps_of_fine_tuning(
    model: ModelConfig, run: dict[str, Any], lora: LoraConfig, measured_ms: float, tolerance: float
) -> None:
    """Steps of the trainer on H200s (docs/performance.md)."""
    found = estimate_step_time(dataclasses.replace(setup(model, **run), lora=lora), H200)
    assert found.total * 1e3 == pytest.approx(measured_ms, rel=tolerance)


def test_adapters_of_experts_take_longer_than_all_weights_in_grouped_products() -> None:
    """The host launches the kernels of each expert. Adapters of the attention alone leave the products grouped."""
    of_all, alone, grouped, of_attention = (
        estimate_step_time(
            dataclasses.replace(
                setup(MIXTRAL_4, **{**EXPERTS_ALONE, "moe_grouped_gemm": is_grouped}), lora=lora
            ),
            H200,
        )
        for is_grouped, lora in (
            *((False, ADAPTERS), (False, LoraConfig())),
            *((True, LoraConfig()), (True, OF_ATTENTION)),
        )
    )
    assert of_attention.total < grouped.total < alone.total < of_all.total
    assert of_all.host > of_all.compute
    assert any("adapters of experts guessed" in guess for guess in of_all.guesses)
    assert not any("adapters" in guess for guess in grouped.guesses)


def test_a_cluster_measures_layers_with_adapters() -> None:
    """Its times of layers without adapters are those to which adapters are added."""
    found = dataclasses.replace(setup(MIXTRAL_4, **EXPERTS_ALONE), lora=ADAPTERS)
    [(row, _)] = host_rows(found, H200)
    plain = row | {"layers": layers_of(setup(MIXTRAL_4, ranks=2, ep=2), has_experts=True)}
    other = row | {"layers": "other layers", "us": 90_000.0}
    added = host_time(found, H200, has_experts=True).value - 12e-3

    def measured(*rows: dict[str, Any]) -> Constant:
        table = Measurements("H200", host=(*rows, other))
        return host_time(
            found, dataclasses.replace(H200, measurements=table, cluster=table), has_experts=True
        )

    of_plain, of_these = measured(plain | {"us": 6_000.0}), measured(row | {"us": 40_000.0})
    assert (of_plain.value, of_plain.is_measured) == (pytest.approx(6e-3 + added), False)
    assert (of_these.value, of_these.is_measured) == (40e-3, True)


def test_frozen_weights_shorten_the_step() -> None:
    """The forward pass takes as long. What the upper half of a pipeline receives still has gradients."""
    half = ("embedding.*", "decoder.layers.[0-3].*")
    for keys in (
        {},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ):
        full, upper, head = (
            step(LLAMA, freeze=freeze, **keys) for freeze in ((), half, ("decoder.*", "emb*"))
        )
        assert full.stages[0].forward == upper.stages[0].forward == head.stages[0].forward
        whole, half_of_it, rest = (each.stages[0].backward for each in (full, upper, head))
        assert 0.45 < (half_of_it - rest) / (whole - rest) < 0.5  # the embedding is frozen too
        assert full.optimizer > upper.optimizer > head.optimizer
    lower, upper_stage = step(LLAMA, ranks=2, pp=2, freeze=half).stages
    assert lower.backward < 0.05 * lower.forward
    assert upper_stage == step(LLAMA, ranks=2, pp=2).stages[1]


def test_parts_add_up() -> None:
    """The parts are the time of the busiest stage, and what it waits for."""
    found = step(GPT, ranks=8, tp=2, pp=4)
    busiest = max(found.stages, key=lambda stage: stage.forward + stage.backward)
    waits = found.pipeline_bubble + found.pipeline_transfers + found.data_parallel + found.optimizer
    assert found.total == pytest.approx(8 * (busiest.forward + busiest.backward) + waits)
    assert (
        min(vars(found)[name] for name in ("compute", "tensor_parallel", "pipeline_bubble", "optimizer")) > 0
    )
    assert found.context_parallel == found.expert_parallel == 0


@pytest.mark.parametrize(
    "keys", [{}, {"ranks": 8, "pp": 4}, {"ranks": 8, "pp": 4, "vpp": 2}, {"ranks": 8, "pp": 4, "tp": 2}]
)
@pytest.mark.parametrize("num_microbatches", [8, 400])
def test_schedules_take_as_long_as_the_step(keys: dict[str, Any], num_microbatches: int) -> None:
    found = setup(LLAMA, num_microbatches=num_microbatches, **keys)
    picture = schedule(found, H200)
    assert picture.total == pytest.approx(estimate_step_time(found, H200).total)
    assert max(each.end for each in picture.passes.intervals) == pytest.approx(picture.passes.total)
    assert (picture.passes.cut is None) == (num_microbatches == 8)


def test_bytes_that_ranks_send() -> None:
    """On the last stage: its four layers and the output layer exchange hidden states."""
    found = setup(LLAMA, ranks=32, tp=4, pp=2, num_microbatches=8)
    sent = {each.axis: each for each in transfers(found, H200)}
    assert set(sent) == {"tensor", "pipeline", "data"}
    hidden = 8192 * LLAMA.hidden_size * 2
    of_layer = 4 + 6  # the backward pass gathers the inputs of two products again
    assert sent["tensor"].sent == pytest.approx(8 * (4 * of_layer + 3) * hidden * 3 / 4)
    assert sent["tensor"].in_network == 0
    assert sent["pipeline"].sent == sent["pipeline"].in_network == 8 * hidden / 4
    tied = dataclasses.replace(LLAMA, untie_embeddings_and_output_weights=False)
    ends = {each.axis: each for each in transfers(dataclasses.replace(found, model=tied), H200)}
    gradient = 4 * LLAMA.padded_vocab_size * LLAMA.hidden_size / 4
    assert ends["pipeline"].sent == sent["pipeline"].sent + gradient  # summed with that of the other end
    weights = stage_parameter_counts(found, 1)
    assert sent["data"].sent == pytest.approx((weights.layers + weights.tables) * 6 * 3 / 4)
    assert sent["data"].in_network == sent["data"].sent / 2  # two ranks of a group are on a node


@pytest.mark.parametrize(("ranks", "outside"), [(8, 0.0), (16, 8 / 15)])
def test_experts_on_other_nodes_receive_tokens_over_the_network(ranks: int, outside: float) -> None:
    model = dataclasses.replace(MIXTRAL_8, num_moe_experts=16)
    (sent,) = [each for each in transfers(setup(model, ranks=ranks, ep=ranks), H200) if each.axis == "expert"]
    copies = 8 * 8 * 4096 * model.moe_router_topk * model.hidden_size * 2
    assert sent.sent == pytest.approx(4 * copies * (ranks - 1) / ranks)  # there and back, in both passes
    assert sent.in_network == pytest.approx(outside * sent.sent)


def test_the_output_layer_makes_the_last_stage_the_slowest() -> None:
    stages = step(LLAMA, ranks=4, pp=4).stages
    assert max(stages, key=lambda stage: stage.forward) == stages[-1]


@pytest.mark.parametrize(
    "model", [GPT, LLAMA, MIXTRAL_8, LATENT], ids=["GPT", "Llama", "experts", "latent attention"]
)
def test_no_layout_beats_the_peak(model: ModelConfig) -> None:
    """Parts are never negative, and model FLOPs stay below the peak of the GPUs."""
    tokens, pairs = model.seq_length, visible_pairs(model, [model.seq_length])
    axes = itertools.product((1, 2, 8), (1, 2), (1, 2), (1, 4))
    for tp, pp, cp, ep in axes:
        experts = {"ep": ep, "expert_tensor_parallel_size": 1} if model.num_moe_experts else {}
        found = setup(model, ranks=32, tp=tp, pp=pp, cp=cp, sequence_parallel=tp > 1, **experts)
        estimate = estimate_step_time(found, H200)
        parts = [value for value in vars(estimate).values() if isinstance(value, float)]
        peak = found.layout.world_size * H200.peak_flops["bf16"]
        assert min(parts) >= 0
        assert found.training.global_batch_size * flops(model, tokens, pairs) < 0.8 * peak * estimate.total


LAYERS_OF_TWO = {"recompute_granularity": "full", "recompute_num_layers": 2}
RECOMPUTED = {
    "nothing": {},
    "attention": {"recompute_granularity": "selective"},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ("layernorm",)},
    "MLP": {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    "some layers": LAYERS_OF_TWO | {"recompute_method": "block"},
    "all layers": LAYERS_OF_TWO | {"recompute_method": "uniform"},
}


def test_recomputation_lengthens_the_backward_pass() -> None:
    """A dense layer of Transformer Engine has no norm of its own to recompute."""
    found = {name: step(LLAMA, micro=2, tp=2, ranks=2, **keys).stages[0] for name, keys in RECOMPUTED.items()}
    assert len({stage.forward for stage in found.values()}) == 1
    backward = {name: stage.backward for name, stage in found.items()}
    assert backward["norms"] == backward["nothing"]
    assert backward["nothing"] < backward["attention"] < backward["MLP"] < backward["all layers"]
    again = backward["all layers"] - backward["nothing"]
    assert backward["some layers"] - backward["nothing"] == pytest.approx(again / 4)
    assert again < found["nothing"].forward  # all but the embedding and the output layer


def test_experts_recompute_their_activation_function_or_all() -> None:
    modules = {"moe_act": ("moe_act",), "moe": ("moe",), "both": ("moe", "moe_act"), "norms": ("layernorm",)}
    selective = {"recompute_granularity": "selective"}
    backward = {
        name: step(MIXTRAL_3_LAYERS, **selective, recompute_modules=value).stages[0].backward
        for name, value in modules.items()
    }
    assert backward["norms"] < backward["moe_act"] < backward["moe"] == backward["both"]


@pytest.mark.parametrize(
    ("keys", "slower"),
    [
        ({}, {"micro": 1, "num_microbatches": 16}),  # products of fewer tokens
        ({"fp8": "hybrid", "fp8_recipe": "delayed"}, {"fp8": "hybrid"}),
        ({"fp8": "hybrid"}, {}),
        ({}, {"cross_entropy_fusion_impl": "native"}),
        ({"ranks": 4, "tp": 4, "tp_comm_overlap": True}, {"ranks": 4, "tp": 4}),
        ({"ranks": 4, "tp": 4}, {"ranks": 4, "tp": 4, "sequence_parallel": False}),
        ({"ranks": 2, "pp": 2, "vpp": 4}, {"ranks": 2, "pp": 2}),
        ({"ranks": 2}, {"ranks": 2, "overlap_grad_reduce": False, "overlap_param_gather": False}),
        ({"ranks": 8}, {"ranks": 8, "num_distributed_optimizer_instances": 2}),
    ],
    ids=["tokens", "FP8 scaling", "bf16", "cross entropy", "UB", "SP", "VPP", "DP overlap", "instances"],
)
def test_slower_settings(keys: dict[str, Any], slower: dict[str, Any]) -> None:
    """Settings that need more time on the same ranks with the same batch."""
    size = {"micro": 2, "num_microbatches": 8}
    assert step(LLAMA, **(size | keys)).total < step(LLAMA, **(size | slower)).total


def test_long_samples_are_divided() -> None:
    """Context parallelism divides the attention, and its ring hides most transfers."""
    model = dataclasses.replace(LLAMA, seq_length=65536)
    one, four = step(model), step(model, ranks=4, cp=4)
    assert four.compute == pytest.approx(one.compute / 4, rel=0.05)
    assert 0 < four.context_parallel < 0.02 * four.total


def test_documents_shorten_attention() -> None:
    """Pairs of tokens in different documents are not computed. Without lengths, a sample is one document."""
    separate = dataclasses.replace(setup(LLAMA), separates_documents=True)
    complete, short, equal = (
        estimate_step_time(separate, H200, documents=lengths) for lengths in ((), (1024,) * 8, (8192,))
    )
    assert short.total < 0.95 * complete.total
    assert complete.total == equal.total == step(LLAMA).total
    assert any("one document per sample" in guess for guess in complete.guesses)
    assert not any("one document per sample" in guess for guess in short.guesses)


def test_the_host_limits_small_layers() -> None:
    """CUDA graphs help where the host is slower than the GPU."""
    model = dataclasses.replace(
        LLAMA, hidden_size=1024, ffn_hidden_size=2816, num_attention_heads=8, seq_length=1024
    )
    eager, graphs = step(model), step(model, cuda_graph_impl="transformer_engine")
    assert eager.host > eager.compute
    assert graphs.total < 0.6 * eager.total
    assert step(LLAMA, micro=4).host == 0


def test_launches_that_were_not_measured_follow_from_others() -> None:
    """FP8 with tensor parallelism, and experts with CUDA graphs, which record the attention only."""

    def seconds(model: ModelConfig, **keys: Any) -> float:
        return host_time(setup(model, ranks=2, **keys), H200, has_experts=model is MIXTRAL_3_LAYERS).value

    graphs = {"cuda_graph_impl": "transformer_engine"}
    in_fp8 = seconds(LLAMA, tp=2, fp8="hybrid") - seconds(LLAMA, tp=2)
    assert in_fp8 == pytest.approx(seconds(LLAMA, fp8="hybrid") - seconds(LLAMA))
    saved = seconds(MIXTRAL_3_LAYERS) - seconds(MIXTRAL_3_LAYERS, **graphs)
    assert saved == pytest.approx(seconds(LLAMA) - seconds(LLAMA, **graphs))


def test_unequal_experts_take_longer() -> None:
    found = [
        estimate_step_time(setup(MIXTRAL_3_LAYERS, ranks=4, ep=4), H200, imbalance=imbalance)
        for imbalance in (1.0, 1.5)
    ]
    assert found[1].expert_parallel == pytest.approx(1.5 * found[0].expert_parallel, rel=0.1)
    assert found[1].compute > 1.2 * found[0].compute
    assert any("1.5 times the mean" in guess for guess in found[1].guesses)


@pytest.mark.parametrize(
    "run",
    [
        setup(LLAMA),
        setup(LLAMA, ranks=64, tp=2, pp=4, num_microbatches=4),
        setup(
            LLAMA,
            ranks=64,
            tp=2,
            pp=4,
            vpp=2,
            num_microbatches=8,
            overlap_grad_reduce=False,
            overlap_param_gather=False,
        ),
        setup(LLAMA, ranks=2048, tp=4, pp=2, num_microbatches=2),
        setup(LLAMA, ranks=8, pp=2, freeze=("embedding.*", "decoder.layers.[0-5].*", "*.mlp.*")),
        setup(
            LLAMA,
            ranks=8,
            pp=2,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=2,
        ),
        setup(
            MIXTRAL_8,
            ranks=64,
            pp=2,
            vpp=4,
            ep=8,
            recompute_granularity="selective",
            recompute_modules=("moe",),
        ),
        setup(LATENT, ranks=16, tp=2, pp=2, ep=8, expert_tensor_parallel_size=1),
        setup(
            LATENT,
            ranks=16,
            pp=4,
            recompute_granularity="full",
            recompute_method="block",
            recompute_num_layers=1,
        ),
    ],
)
def test_no_step_is_shorter_than_its_bounds(run: Setup) -> None:
    estimator = Estimator(H200)
    step = estimator.step_time(run)
    assert step == estimate_step_time(run, H200)
    assert 0.5 * step.total < estimator.least_time(run) <= step.total
    assert estimator.least_time_of_pipelines(run) <= step.total


def test_an_estimator_keeps_parts_of_different_layouts_apart() -> None:
    estimator = Estimator(H200)
    runs = [
        setup(LATENT, ranks=16, tp=tp, ep=ep, micro=micro, **recompute)
        for tp, ep, micro in itertools.product((1, 2), (1, 8), (1, 2))
        for recompute in ({}, {"recompute_granularity": "selective", "recompute_modules": ("moe",)})
    ]
    for run in runs:
        assert estimator.step_time(run) == estimate_step_time(run, H200)
