"""Megatron-Core's configuration for the model, the layout and the kernels of a run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.activations import squared_relu
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig, TrainerConfig, TrainingConfig
from trainer.contract.model.experts import MODEL_KEYS, core_moe_layer_freq, expert_tensor_parallel_size
from trainer.contract.model.pipeline import core_layout
from trainer.model import experts
from trainer.model.attention import core as core_attention
from trainer.model.attention import parts_of
from trainer.model.kernels import Kernels

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""Data type of the model for each precision that has fp32 master weights."""


def transformer_config(config: TrainerConfig, kernels: Kernels) -> TransformerConfig:
    """Megatron-Core's configuration."""
    model, attention = config.model, parts_of(config.model)
    return attention.config(
        **_shape(model),
        **attention.core_arguments(model, kernels),
        **core_attention.core_arguments(config, uses_engine=kernels.transformer_engine is not None),
        **(_multi_token(model) if model.mtp_num_layers is not None else {}),
        **(_experts(config, kernels) if model.num_moe_experts is not None else {}),
        **_layout(config),
        **_precision(config.training),
        **_recomputation(config.training),
        **_kernels(config, kernels),
        # The loss is the mean over the tokens of the global batch, independent of their distribution over ranks.
        calculate_per_token_loss=True,
        init_method=_leave_as_is,
        output_layer_init_method=_leave_as_is,
    )


def _shape(model: ModelConfig) -> dict[str, Any]:
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "normalization": model.normalization,
        "layernorm_epsilon": model.layernorm_epsilon,
        "gated_linear_unit": model.swiglu,
        "add_bias_linear": model.add_bias_linear,
        "add_qkv_bias": model.add_qkv_bias,
        "qk_layernorm": model.qk_layernorm,
        "attention_dropout": model.attention_dropout,
        "hidden_dropout": model.hidden_dropout,
    }


def _multi_token(model: ModelConfig) -> dict[str, Any]:
    return {key: getattr(model, key) for key in ("mtp_num_layers", "mtp_loss_scaling_factor")}


def _experts(config: TrainerConfig, kernels: Kernels) -> dict[str, Any]:
    model, layout = config.model, config.parallelism
    return {
        **{key: getattr(model, key) for key in ("num_moe_experts", *MODEL_KEYS)},
        "moe_layer_freq": core_moe_layer_freq(model),
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": expert_tensor_parallel_size(layout),
        "moe_token_dispatcher_type": layout.moe_token_dispatcher_type,
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": kernels.grouped_gemm,
        "moe_permute_fusion": experts.fuses_permutation(layout.moe_token_dispatcher_type, kernels),
    }


def _layout(config: TrainerConfig) -> dict[str, Any]:
    model, layout = config.model, config.parallelism
    interleaved = layout.virtual_pipeline_model_parallel_size is not None
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "pipeline_model_parallel_layout": core_layout(model.num_layers, layout, model.mtp_num_layers),
        "context_parallel_size": layout.context_parallel_size,
        "hierarchical_context_parallel_sizes": list(layout.hierarchical_context_parallel_sizes or ()) or None,
        "sequence_parallel": layout.sequence_parallel,
        "tp_comm_overlap": layout.tp_comm_overlap,
        # In an interleaved schedule with 2 stages, batched point-to-point calls silently produce wrong gradients.
        "overlap_p2p_comm": interleaved,
        "batch_p2p_comm": not interleaved,
        # A stage's output is needed only until it is sent. An interleaved schedule may release it earlier: NCCL keeps
        # the memory until then, and gloo does not.
        "deallocate_pipeline_outputs": not interleaved or config.device == "cuda",
    }


def _precision(training: TrainingConfig) -> dict[str, Any]:
    dtype = HALF.get(training.precision, torch.float32)
    return {
        "bf16": training.precision == "bf16",
        "fp16": training.precision == "fp16",
        "fp8": training.fp8,
        "fp8_recipe": training.fp8_recipe,
        "fp8_amax_history_len": training.fp8_amax_history_len,
        "fp8_amax_compute_algo": training.fp8_amax_compute_algo,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
    }


def _recomputation(training: TrainingConfig) -> dict[str, Any]:
    modules = training.recompute_modules
    return {
        "recompute_granularity": training.recompute_granularity,
        "recompute_method": training.recompute_method,
        "recompute_num_layers": training.recompute_num_layers,
        "recompute_modules": None if modules is None else list(modules),
    }


def _kernels(config: TrainerConfig, kernels: Kernels) -> dict[str, Any]:
    model, training = config.model, config.training
    on_gpu, has_engine = kernels.on_gpu, kernels.transformer_engine is not None
    activation_func, bias_activation_fusion = activation(model, on_gpu=on_gpu)
    return {
        "use_cpu_initialization": not on_gpu,
        "activation_func": activation_func,
        "bias_activation_fusion": bias_activation_fusion,
        "bias_dropout_fusion": on_gpu,
        "masked_softmax_fusion": False,
        "persist_layer_norm": has_engine,
        "gradient_accumulation_fusion": kernels.weight_gradient is not None,
        "cross_entropy_loss_fusion": on_gpu and _fuses_cross_entropy(training, kernels),
        "cross_entropy_fusion_impl": kernels.cross_entropy,
        "cuda_graph_impl": training.cuda_graph_impl,
        "deterministic_mode": training.deterministic_mode,
    }


def _fuses_cross_entropy(training: TrainingConfig, kernels: Kernels) -> bool:
    """False where the fused cross entropy is not deterministic (according to Megatron-LM) or not exact.

    Core's own rounds the gradient to bf16 in every precision (fusions/fused_cross_entropy.py, calculate_gradients).
    """
    rounds = kernels.cross_entropy == "native" and training.precision != "bf16"
    return not (training.deterministic_mode or rounds)


def _leave_as_is(weight: torch.Tensor) -> torch.Tensor:
    """Initialization hook for Core that does nothing. `initialize_by_name` initializes the chunk after it is built.

    perform_initialization = False would also skip the attribute that marks a weight as split over tensor-parallel
    ranks, and the gradient norm would then only count one rank's part.
    """
    return weight


Activation = Callable[[torch.Tensor], torch.Tensor]

FUNCTIONS: dict[str, Activation] = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "squared_relu": squared_relu,
}


def activation(model: ModelConfig, *, on_gpu: bool) -> tuple[Activation, bool]:
    """The values of Core's `activation_func` and `bias_activation_fusion` for the resolved `model`.

    Core's kernel for torch's gelu computes the tanh approximation (fused_bias_gelu.py), needs a bias, and does not
    weight the outputs of experts. All others are computed unfused. The kernel for SwiGLU has neither restriction.
    """
    if model.swiglu:
        return torch.nn.functional.silu, on_gpu
    assert model.activation_func
    has_kernel = on_gpu and model.add_bias_linear and model.num_moe_experts is None
    if model.activation_func == "gelu_tanh" and has_kernel:
        return torch.nn.functional.gelu, True
    return FUNCTIONS[model.activation_func], False
