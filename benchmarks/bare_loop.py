"""Minimal GPT training loop with Megatron-Core: one constant batch, no data, log, schedule, checks or checkpoints.

benchmarks.train compares the trainer with this loop. It runs it with the trainer's configuration, with one process per
GPU, and passes ranks and rendezvous address in the environment:

    python -m benchmarks.bare_loop CONFIG.json WARM_STEPS STEPS

Rank 0 prints the times of the timed steps as JSON (seconds).
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import TrainingConfig

HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None
"""False only where the loop is tried out, such as on a CPU. Times are those of Transformer Engine."""


def main() -> None:
    """Train repeatedly on one batch."""
    config, warm, steps = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), int(sys.argv[3])
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl", rank=rank, world_size=config["world_size"])
    layout = config["parallelism"]
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=layout.get("pipeline_model_parallel_size", 1),
        expert_model_parallel_size=layout.get("expert_model_parallel_size", 1),
    )
    model_parallel_cuda_manual_seed(1234)
    step = step_function(config)
    gc.collect()
    gc.disable()
    times = []
    for index in range(warm + steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if index >= warm:
            times.append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps(times))
    torch.distributed.destroy_process_group()


def core_config(config: dict[str, Any]) -> TransformerConfig:
    """Megatron-Core's fastest settings that only require Transformer Engine, and without it, none."""
    model, layout, training = config["model"], config["parallelism"], TrainingConfig(**config["training"])
    swiglu = model.get("swiglu", False)
    return TransformerConfig(
        num_layers=model["num_layers"],
        hidden_size=model["hidden_size"],
        num_attention_heads=model["num_attention_heads"],
        num_query_groups=model.get("num_query_groups"),
        ffn_hidden_size=model.get("ffn_hidden_size"),
        normalization=model.get("normalization", "LayerNorm"),
        gated_linear_unit=swiglu,
        activation_func=torch.nn.functional.silu if swiglu else torch.nn.functional.gelu,
        add_bias_linear=model.get("add_bias_linear", True),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        tensor_model_parallel_size=layout.get("tensor_model_parallel_size", 1),
        pipeline_model_parallel_size=layout.get("pipeline_model_parallel_size", 1),
        sequence_parallel=layout.get("sequence_parallel", False),
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        fp8=training.fp8,
        fp8_recipe=training.fp8_recipe,
        fp8_amax_history_len=training.fp8_amax_history_len,
        fp8_amax_compute_algo=training.fp8_amax_compute_algo,
        **(fusions(model) if HAS_ENGINE else {}),
        **expert_config(config),
    )


def fusions(model: dict[str, Any]) -> dict[str, Any]:
    """Kernels that do the work of several. All but one need a GPU."""
    return {
        "gradient_accumulation_fusion": has_weight_gradient_kernel(),
        "cross_entropy_loss_fusion": True,
        "cross_entropy_fusion_impl": "te",
        "bias_activation_fusion": model.get("swiglu", False) or model.get("add_bias_linear", True),
        "bias_dropout_fusion": True,
        "apply_rope_fusion": model.get("position_embedding_type") == "rope",
        "persist_layer_norm": True,
    }


def expert_config(config: dict[str, Any]) -> dict[str, Any]:
    """Megatron-Core's fastest settings for experts. Empty for a dense model."""
    model = config["model"]
    if "num_moe_experts" not in model:
        return {}
    return {
        **{name: value for name, value in model.items() if "moe" in name},
        "moe_ffn_hidden_size": model["ffn_hidden_size"],
        "expert_model_parallel_size": config["parallelism"]["expert_model_parallel_size"],
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": True,
        "moe_permute_fusion": True,
        "moe_router_force_load_balancing": True,
    }


def has_weight_gradient_kernel() -> bool:
    """True if Core found the kernel of NVIDIA's apex. Without it, the trainer's replacement is used here too."""
    from megatron.core.tensor_parallel import layers

    from trainer.model import kernels

    return layers._grad_accum_fusion_available or kernels.weight_gradient_kernel() is not None


def step_function(config: dict[str, Any]) -> Callable[[], None]:
    """Return a function that runs one optimizer step."""
    overlap = parallel_state.get_data_parallel_world_size() > 1
    chunks = [build_chunk(config, overlap)]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config["optimizer"]["lr"],
            weight_decay=0.1,
            adam_beta2=0.95,
            bf16=True,
            params_dtype=torch.bfloat16,
            use_distributed_optimizer=True,
            overlap_param_gather=overlap,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    run = forward_backward(config, chunks)

    def step() -> None:
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        run()
        optimizer.step()

    return step


def build_chunk(config: dict[str, Any], overlap: bool) -> DistributedDataParallel:
    """Build this rank's part of the model. `overlap` hides the gradient exchange behind the backward pass."""
    model, core = config["model"], core_config(config)
    gpt = GPTModel(
        core,
        layer_spec(core),
        vocab_size=model["padded_vocab_size"],
        max_sequence_length=model["seq_length"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not model.get("untie_embeddings_and_output_weights", False),
        position_embedding_type=model.get("position_embedding_type", "learned_absolute"),
    ).cuda()
    data_parallel = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
    )
    chunk = DistributedDataParallel(core, data_parallel, Float16Module(core, gpt))
    core.finalize_model_grads_func = finalize_model_grads
    if overlap:
        core.no_sync_func = chunk.no_sync
        core.grad_sync_func = chunk.start_grad_sync
    return chunk


def layer_spec(core: TransformerConfig) -> ModuleSpec:
    """Parts of a layer: Transformer Engine's, if it is installed."""
    kind = {"num_experts": core.num_moe_experts, "moe_grouped_gemm": core.moe_grouped_gemm}
    if HAS_ENGINE:
        return get_gpt_layer_with_transformer_engine_spec(**kind)
    return get_gpt_layer_local_spec(**kind, normalization=core.normalization)


def first_tokens(config: dict[str, Any], size: tuple[int, int]) -> torch.Tensor:
    """This rank's part of the first tokens of the corpus. Their frequencies determine the load of experts."""
    [corpus] = config["data"]["datasets"]
    stored = IndexedDataset(corpus["prefix"])
    start, count = parallel_state.get_data_parallel_rank() * math.prod(size), math.prod(size)
    tokens = np.fromfile(
        f"{corpus['prefix']}.bin", stored.index.dtype, count, offset=start * stored.index.dtype_size
    )
    return torch.from_numpy(tokens.astype(np.int64)).view(size)


def forward_backward(config: dict[str, Any], chunks: list[DistributedDataParallel]) -> Callable[[], Any]:
    """Return a function that runs all microbatches of one step, always on the same tokens."""
    model, training = config["model"], config["training"]
    size = (training["micro_batch_size"], model["seq_length"])
    tokens = first_tokens(config, size).cuda()
    positions = torch.arange(model["seq_length"], device="cuda").expand(size).contiguous()
    samples = training["micro_batch_size"] * parallel_state.get_data_parallel_world_size()

    def forward(_: Any, chunk: torch.nn.Module) -> Any:
        losses = chunk(tokens, positions, None, labels=tokens)
        return losses, lambda output: (output.float().mean(), {})

    return functools.partial(
        get_forward_backward_func(),
        forward_step_func=forward,
        data_iterator=None,
        model=chunks,
        num_microbatches=training["global_batch_size"] // samples,
        seq_length=model["seq_length"],
        micro_batch_size=training["micro_batch_size"],
        forward_only=False,
    )


if __name__ == "__main__":
    main()
