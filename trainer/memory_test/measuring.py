"""Steps of one rank, alone, and their memory. Imports megatron.core, so it must come after `device.prepare` and
`one_rank.replace_collectives`."""

from __future__ import annotations

from trainer.contract.config import TrainerConfig
from trainer.contract.trials import Memory
from trainer.distributed import groups, one_rank
from trainer.distributed.rendezvous import Ranks, select_gpu
from trainer.faults.machine_failures import is_out_of_memory
from trainer.metrics.console import Log
from trainer.trials import steps

STEPS = 3
"""Number of steps to run once CUDA graphs are recorded. The optimizer's state exists after the first step. The last
step is timed."""


def measure(config: TrainerConfig, ranks: Ranks) -> dict[str, float | str | None]:
    """Train a few steps as one rank, alone. Returns fields of StageMemory.

    Raises:
        TrainerError: the configuration does not fit this machine, or gradients overflow.
    """
    if config.device == "cuda":
        select_gpu(ranks)
    one_rank.connect(ranks.rank, ranks.world_size)
    process_groups = groups.build(
        config.parallelism, timeout_minutes=config.training.distributed_timeout_minutes
    )
    # No other rank computes the logits of tokens in its part of the vocabulary.
    rows = config.model.num_rows // config.parallelism.tensor_model_parallel_size
    vocab_size = min(rows, config.model.num_tokens)
    log = Log(is_rank_0=False, progress=False)
    try:
        trained = steps.train(config, process_groups, log, vocab_size, warmup=STEPS - 1, steps=1)
        found = {"microbatch_s": trained.times.compute_s / trained.num_microbatches}
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        found = {"error": f"does not fit: {steps.asked_memory(error)}"}
    return {**found, **of_stage(steps.used_memory(config.device))}


def of_stage(memory: Memory) -> dict[str, float | None]:
    """The fields of StageMemory."""
    return {name: getattr(memory, name) for name in ("allocated_gib", "in_use_gib", "device_gib")}
