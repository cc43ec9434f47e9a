"""The memory estimate against peaks that H200 GPUs showed (torch.cuda.max_memory_allocated)."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.planning.layout import Layout
from hpcgen.planning.memory import MemoryEstimate, bytes_per_parameter, estimate_memory
from hpcgen.planning.model_size import parameter_count
from tests.planning.test_model_size import gpt3, llama3_8b
from trainer.contract.config import ParallelismConfig, TrainingConfig

GPT = gpt3(24, 2048, 16)
MIXTRAL = dataclasses.replace(
    llama3_8b(8), num_moe_experts=8, moe_ffn_hidden_size=14336, moe_aux_loss_coeff=0.01
)
EXPERT = 3 * 4096 * 14336
"""Parameters of one expert of MIXTRAL."""
MIXTRAL_3_LAYERS = dataclasses.replace(
    MIXTRAL, num_layers=3, moe_layer_freq=(1,) * 3, seq_length=4096, vocab_size=50257, padded_vocab_size=50304
)
TP2_PP2 = {"micro": 4, "world_size": 4, "tp": 2, "pp": 2, "sp": True, "num_microbatches": 8}


def estimate(
    model,
    *,
    world_size=1,
    micro=1,
    num_microbatches=4,
    tp=1,
    pp=1,
    vpp=None,
    sp=False,
    split=None,
    ep=1,
    etp=None,
    **training,
) -> MemoryEstimate:
    parallelism = ParallelismConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        sequence_parallel=sp,
        pipeline_model_parallel_layout=split,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    batch = micro * num_microbatches * world_size // (tp * pp)
    config = TrainingConfig(micro_batch_size=micro, global_batch_size=batch, train_iters=1, **training)
    layout = Layout.make(model, parallelism, config, world_size)
    assert layout is not None
    return estimate_memory(model, parallelism, config, layout)


@pytest.mark.parametrize(
    ("model", "run", "peak_gib"),
    [
        (GPT, {"micro": 4}, 35.32),
        (GPT, {"micro": 8}, 48.19),
        (llama3_8b(8), {"micro": 1}, 53.96),
        (llama3_8b(8), {"micro": 2}, 59.29),
        (llama3_8b(16), {"micro": 1}, 87.47),
        (GPT, {"micro": 4, "world_size": 4}, 24.29),
        (GPT, {"micro": 2, "world_size": 4, "pp": 4, "num_microbatches": 16}, 13.56),
        (GPT, TP2_PP2, 12.33),
        (GPT, {"micro": 4, "world_size": 4, "cuda_graph_impl": "transformer_engine"}, 24.87),
        (GPT, TP2_PP2 | {"cuda_graph_impl": "transformer_engine"}, 13.07),
        (MIXTRAL_3_LAYERS, {"micro": 2}, 87.40),
        (llama3_8b(8, 8192), {"micro": 2}, 69.7),
        (llama3_8b(8, 8192), {"micro": 2, "world_size": 2}, 54.0),
        (llama3_8b(8, 32768), {"micro": 1}, 91.0),
        (GPT, {"micro": 4, "transformer_impl": "torch"}, 38.04),
    ],
    ids=[
        *("GPT micro 4", "GPT micro 8", "Llama 8 layers", "Llama micro 2", "Llama 16 layers", "DP4", "PP4"),
        *("TP2 x PP2", "DP4, graphs", "TP2 x PP2, graphs", "Mixtral"),
        *("Llama 8k", "Llama 8k, DP2", "Llama 32k", "GPT, torch"),
    ],
)
def test_the_estimate_is_near_gpu_measurements(model, run, peak_gib):
    assert estimate(model, **run).total_gib == pytest.approx(peak_gib, rel=0.06)


@pytest.mark.parametrize(
    ("few", "many", "difference_gib"),
    [
        ((GPT, 4), (GPT, 8), 48.19 - 35.32),
        ((llama3_8b(8), 1), (llama3_8b(8), 2), 59.29 - 53.96),
        ((llama3_8b(8, 8192), 2), (llama3_8b(8, 32768), 1), 91.0 - 69.7),
    ],
    ids=["GPT", "Llama 4k", "Llama 32k"],
)
def test_more_tokens_need_as_much_more_as_on_gpus(few, many, difference_gib):
    """With this difference, weights and workspaces cancel out."""
    less, more = (estimate(model, micro=micro).total_gib for model, micro in (few, many))
    assert more - less == pytest.approx(difference_gib, rel=0.01)


@pytest.mark.parametrize(
    ("training", "bytes_per_logit"),
    [
        ({}, 2),
        ({"transformer_impl": "torch"}, 10),
        ({"transformer_impl": "torch", "cross_entropy_fusion_impl": "te"}, 2),
        ({"cross_entropy_fusion_impl": "native"}, 10),
        ({"precision": "fp16"}, 6),
        ({"precision": "fp16", "cross_entropy_fusion_impl": "te"}, 2),
        ({"deterministic_mode": True}, 6),
        ({"precision": "fp32"}, 4),
    ],
)
def test_logits_need_what_their_cross_entropy_keeps(training, bytes_per_logit):
    large = dataclasses.replace(GPT, vocab_size=200_000, padded_vocab_size=200_000)
    tokens, rows = 16 * 2048, 200_000 - 50304
    found = (
        estimate(large, micro=16, **training).activation_bytes
        - estimate(GPT, micro=16, **training).activation_bytes
    )
    of_weight = 0 if bytes_per_logit > 4 else bytes_per_logit * 2048
    assert found == rows * (tokens * bytes_per_logit + of_weight)


@pytest.mark.parametrize(
    ("precision", "alone", "sharded"), [("bf16", 18, 9), ("fp16", 18, 9), ("fp32", 16, 10)]
)
def test_the_distributed_optimizer_shards_over_data_and_context(precision, alone, sharded):
    training = TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=1, precision=precision)
    for parallelism, world_size, expected in (
        (ParallelismConfig(), 1, alone),
        (ParallelismConfig(), 4, sharded),
        (ParallelismConfig(context_parallel_size=2), 4, sharded),
    ):
        layout = Layout.make(GPT, parallelism, training, world_size)
        assert layout is not None
        assert bytes_per_parameter(training, layout) == expected


def test_each_instance_of_the_optimizer_has_the_whole_state():
    training = TrainingConfig(micro_batch_size=1, global_batch_size=8, train_iters=1)
    parallelism = ParallelismConfig(num_distributed_optimizer_instances=4)
    layout = Layout.make(GPT, parallelism, training, 8)
    assert layout is not None
    assert bytes_per_parameter(training, layout) == 6 + 12 / 2


def test_fp8_keeps_its_weights_and_their_transposes():
    half, fp8 = estimate(GPT), estimate(GPT, fp8="hybrid")
    assert fp8.parameter_bytes / half.parameter_bytes == pytest.approx(20 / 18)
    assert fp8.activation_bytes == half.activation_bytes


def test_activations_match_the_paper():
    """arXiv 2205.05198, with fused attention: 34 bytes, 10 + 24 / TP, and 34 / TP with sequence parallel."""
    model = dataclasses.replace(GPT, hidden_dropout=0.1)
    tokens_by_layers = 2048 * 2048 * 24
    logits = 2 * 2048 * 50304
    of_weight, of_input = 2 * 2048 * 50304, 2 * 2048 * 2048  # gradients of the output layer
    output = 2 * 2 * 2048 * 2048  # inputs of the final norm and of the output layer
    for axes, coefficient in (({}, 34), ({"tp": 2}, 10 + 24 / 2), ({"tp": 2, "sp": True}, 34 / 2)):
        tp = axes.get("tp", 1)
        found = estimate(model, world_size=tp, **axes).activation_bytes
        layers = tokens_by_layers * coefficient + output // (tp if "sp" in axes else 1)
        assert found == layers + (logits + of_weight) // tp + of_input


def test_full_recompute_keeps_little():
    whole = estimate(GPT).activation_bytes
    one_by_one = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    half = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 12}
    assert estimate(GPT, **one_by_one).activation_bytes < estimate(GPT, **half).activation_bytes < whole


def test_interleaving_keeps_more_microbatches():
    """By 1 + (PP - 1) / (PP x VPP), arXiv 2205.05198, section 4.2.3."""
    plain = estimate(GPT, world_size=4, pp=4, num_microbatches=16)
    interleaved = estimate(GPT, world_size=4, pp=4, vpp=3, num_microbatches=16)
    assert interleaved.activation_bytes / plain.activation_bytes == pytest.approx(1 + 3 / 12)
    assert interleaved.parameter_bytes == plain.parameter_bytes


def test_the_stage_with_the_most_memory_counts():
    """The last stage holds weights and logits, and one microbatch; the first has twice the microbatches."""
    even = estimate(GPT, world_size=2, pp=2)
    last = estimate(GPT, world_size=2, pp=2, split="Et|t*23L")
    first = estimate(GPT, world_size=2, pp=2, split="Et*23|tL")
    assert even.total_gib < last.total_gib < first.total_gib
    assert first.activation_bytes / even.activation_bytes == pytest.approx(23 / 12)
    one_stage = estimate(GPT)
    assert last.parameter_bytes / one_stage.parameter_bytes == pytest.approx(23 / 24, abs=0.02)


def test_torchs_kernels_keep_one_mask_for_windows():
    """Two bytes per query and key, shared by all layers; Transformer Engine needs none."""
    sliding = dataclasses.replace(GPT, window_size=512)
    of_torch = {"transformer_impl": "torch", "cross_entropy_fusion_impl": "te"}
    full, engine = estimate(GPT, **of_torch), estimate(sliding)
    torch = estimate(sliding, **of_torch)
    assert torch.activation_bytes - full.activation_bytes == 2 * 2048 * 2048
    assert engine == full


def test_normalized_queries_and_keys_are_kept_before_and_after():
    model = llama3_8b(8)
    plain, normalized = estimate(model), estimate(dataclasses.replace(model, qk_layernorm=True))
    in_layers = 2 * 4096 * 8 * (4096 + 1024)  # bytes x tokens x layers x width
    assert normalized.activation_bytes - plain.activation_bytes == in_layers
    assert normalized.parameter_bytes - plain.parameter_bytes == 18 * 8 * 2 * 128


@pytest.mark.parametrize(
    ("axes", "experts_per_rank", "expert_data_parallel_size"),
    [
        ({}, 8, 8),
        ({"ep": 4}, 2, 2),
        ({"ep": 8}, 1, 1),
        ({"ep": 2, "tp": 2, "sp": True}, 2, 2),  # ETP is TP
        ({"ep": 8, "tp": 2, "sp": True, "etp": 1}, 1, 1),
    ],
)
def test_experts_are_divided_by_their_own_ranks(axes, experts_per_rank, expert_data_parallel_size):
    """Weight and gradient (6 bytes) of the rank's experts, and a part of their optimizer state (12 bytes)."""
    tp = axes.get("tp", 1)
    router = 8 * 8 * 4096 / tp * (6 + 12 / (8 // tp))
    dense = estimate(llama3_8b(8), world_size=8, tp=tp, sp=tp > 1).parameter_bytes
    mlps = 8 * EXPERT / tp * (6 + 12 / (8 // tp))
    experts = 8 * experts_per_rank * EXPERT * (6 + 12 / expert_data_parallel_size)
    found = estimate(MIXTRAL, world_size=8, **axes).parameter_bytes
    assert found == pytest.approx(dense - mlps + router + experts, rel=1e-12)


def test_activations_of_experts_follow_the_routed_tokens():
    """Each of two experts keeps its input, and its MLP before and after the activation function."""
    dense, experts = estimate(llama3_8b(8), world_size=8), estimate(MIXTRAL, world_size=8, ep=8)
    tokens_by_layers = 4096 * 8
    mlp = 2 * 3 * 14336
    per_token = 2 * (2 * 4096 + mlp) - mlp + 12 * 8
    assert experts.activation_bytes - dense.activation_bytes == tokens_by_layers * per_token
    half = dataclasses.replace(MIXTRAL, moe_expert_capacity_factor=0.5)
    dropped = estimate(half, world_size=8, ep=8)
    assert experts.activation_bytes - dropped.activation_bytes == tokens_by_layers * (2 * 4096 + mlp)
    padded = dataclasses.replace(
        MIXTRAL, moe_expert_capacity_factor=2.0, moe_pad_expert_input_to_capacity=True
    )
    more = estimate(padded, world_size=8, ep=8)
    assert more.activation_bytes - experts.activation_bytes == tokens_by_layers * 2 * (2 * 4096 + mlp)


def test_only_layers_with_experts_keep_routed_tokens():
    half = dataclasses.replace(MIXTRAL, moe_layer_freq=(0, 1) * 4)
    none, some, all_layers = (estimate(model, world_size=8, ep=8) for model in (llama3_8b(8), half, MIXTRAL))
    assert 2 * some.activation_bytes == none.activation_bytes + all_layers.activation_bytes
    assert 2 * some.parameter_bytes == pytest.approx(none.parameter_bytes + all_layers.parameter_bytes)


def test_latent_attention_keeps_its_latents():
    """Queries, keys, values and the output by head, and the latents before and after their norm."""
    model = llama3_8b(8)
    latent = dataclasses.replace(
        model,
        multi_latent_attention=True,
        qk_layernorm=True,
        num_query_groups=32,
        **{"q_lora_rank": 768, "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64},
        **{"v_head_dim": 96, "kv_channels": 192},
    )
    plain_widths, widths = 2 * (4096 + 1024), 32 * (192 + 192 + 96 + 96) + 2 * (768 + 512)
    difference = 2 * 4096 * 8 * (widths - plain_widths)  # bytes x tokens x layers x width
    assert estimate(latent).activation_bytes - estimate(model).activation_bytes == difference


def test_the_last_stage_has_the_mtp_layers():
    """A layer, its projection and norms, the logits, and in a pipeline a copy of the embedding."""
    model = llama3_8b(8)
    mtp = dataclasses.replace(model, mtp_num_layers=1)
    weights = parameter_count(mtp) - parameter_count(model)
    one = estimate(mtp).parameter_bytes - estimate(model).parameter_bytes
    assert one == 18 * weights
    run = {"world_size": 2, "pp": 2, "split": "Et|t*7mL", "num_microbatches": 8}
    last = (
        estimate(mtp, **run).parameter_bytes - estimate(model, **run | {"split": "Et|t*7L"}).parameter_bytes
    )
    table = 128256 * 4096
    assert last == 18 * (weights + table)
    tied = dataclasses.replace(mtp, untie_embeddings_and_output_weights=False)
    assert estimate(mtp, **run).parameter_bytes - estimate(tied, **run).parameter_bytes == 18 * table
    assert estimate(mtp).activation_bytes - estimate(model).activation_bytes > 2 * 4096 * 128256
