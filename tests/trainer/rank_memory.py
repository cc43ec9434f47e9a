"""One rank of a few training steps. Tests run it; it writes what a step allocates at most. With ALONE=1 it is alone.

The kernels allocate what Transformer Engine's do, as far as torch's can: products add weight gradients to their buffer,
and SwiGLU keeps its input only.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract import config as configuration
from trainer.distributed import device

device.prepare("cpu")

from trainer.distributed import one_rank  # noqa: E402

if "ALONE" in os.environ:
    one_rank.replace_collectives()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel  # noqa: E402
from megatron.core.optimizer import MegatronOptimizer  # noqa: E402
from megatron.core.tensor_parallel import layers as core_layers  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from trainer.contract.config import TrainerConfig  # noqa: E402
from trainer.contract.config.resolve import resolve  # noqa: E402
from trainer.data.microbatch import MicroBatch  # noqa: E402
from trainer.distributed import groups, rendezvous  # noqa: E402
from trainer.faults.best import BestWatch  # noqa: E402
from trainer.faults.spikes import SpikeWatch  # noqa: E402
from trainer.loss import Objective  # noqa: E402
from trainer.model import build, experts, kernels  # noqa: E402
from trainer.optimizer.build import build_optimizer, optimizers_of  # noqa: E402
from trainer.optimizer.schedule import Schedule  # noqa: E402
from trainer.step import TrainingState, Vote, train_step  # noqa: E402


def use_kernels_like_those_of_gpus() -> None:
    def accumulate(activation: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
        main_grad.addmm_(gradient.flatten(0, -2).t(), activation.flatten(0, -2))

    core_layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(wgrad_gemm_accum_fp32=accumulate)
    core_layers._grad_accum_fusion_available = True
    in_core = build.transformer_config

    @functools.wraps(in_core)
    def with_fusions(config: TrainerConfig, chosen: kernels.Kernels) -> Any:
        core = in_core(config, chosen)
        core.gradient_accumulation_fusion = True
        core.bias_activation_fusion = config.model.swiglu
        return core

    build.transformer_config = with_fusions


def microbatches(config: TrainerConfig) -> Iterator[MicroBatch]:
    length = config.model.seq_length // config.parallelism.context_parallel_size
    positions = torch.arange(length).expand(config.training.micro_batch_size, -1)
    # A rank alone has no logits of tokens in other parts of the vocabulary.
    rows = min(
        config.model.vocab_size,
        config.model.padded_vocab_size // config.parallelism.tensor_model_parallel_size,
    )
    while True:
        tokens = torch.randint(rows, positions.shape)
        yield MicroBatch(tokens, tokens, torch.ones(tokens.shape), positions, None)


def largest_allocation(profiler: profile) -> int:
    """Most bytes that existed at a time, of those allocated in the profile, without copies that gloo makes to send.

    A block that a thread of gloo releases does so unseen, so the next allocation at its address ends it.
    """
    events = []
    stack = [(event, False) for event in profiler.profiler.kineto_results.experimental_event_tree()]
    while stack:
        event, is_of_gloo = stack.pop()
        if isinstance(event.extra_fields, torch._C._profiler._ExtraFields_Allocation) and not is_of_gloo:
            events.append((event.start_time_ns, event.extra_fields))
        is_of_gloo = is_of_gloo or event.name.startswith("c10d::")
        stack += [(child, is_of_gloo) for child in event.children]
    alive: dict[int, int] = {}
    total = largest = 0
    for _, allocation in sorted(events, key=lambda event: event[0]):
        total -= alive.pop(allocation.ptr, 0)
        if allocation.alloc_size > 0:
            alive[allocation.ptr] = allocation.alloc_size
            total += allocation.alloc_size
        largest = max(largest, total)
    return largest


def persistent_bytes(model: list[DistributedDataParallel], optimizer: MegatronOptimizer) -> int:
    """Size of the weights, their gradients and the state of the optimizer."""
    parameters = [parameter for chunk in model for parameter in chunk.parameters()]
    tensors = [*parameters, *(each.main_grad for each in parameters if each.requires_grad)]
    for part in optimizers_of(optimizer):
        states = part.optimizer.state.values()
        tensors += [value for state in states for value in state.values() if torch.is_tensor(value)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def main(path: Path) -> None:
    use_kernels_like_those_of_gpus()
    config = resolve(configuration.read(path))
    ranks = rendezvous.find_ranks(os.environ)
    if "ALONE" in os.environ:
        one_rank.connect(ranks.rank, ranks.world_size)
        process_groups = groups.build(config.parallelism, timeout_minutes=1)
    else:
        process_groups = groups.initialize(config, ranks, os.environ)
    model = build.build_model(config, process_groups, kernels.choose(config))
    optimizer = build_optimizer(config, model)
    spikes = SpikeWatch(config.training.loss_spike_factor, config.training.skip_loss_spikes)
    schedule = Schedule(config.optimizer, optimizer, config.training.train_iters)
    state = TrainingState(
        model,
        optimizer,
        schedule,
        spikes,
        Objective(config, model),
        BestWatch(config.training),
        experts.routers(model),
    )
    batches = [microbatches(config) for _ in model]
    train_step(state, batches, config, process_groups, Vote)
    sizes = []
    for _ in range(1 if "ALONE" in os.environ else 2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            train_step(state, batches, config, process_groups, Vote)
        sizes.append(largest_allocation(profiler))
    found = {
        "stage": process_groups.pp.rank(),
        "parameter_bytes": persistent_bytes(model, optimizer),
        "gathered_bytes": sum(
            buffer.nbytes for buffer in parallel_state.get_global_memory_buffer().buffer.values()
        ),
        "parameters": sum(parameter.numel() for chunk in model for parameter in chunk.parameters()),
        # Threads of gloo may release tensors later than the work that needs them ends.
        "activation_bytes": min(sizes),
    }
    Path(f"{path}.{ranks.rank}").write_text(json.dumps(found))
    groups.finalize()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
