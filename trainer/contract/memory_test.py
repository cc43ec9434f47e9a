"""The memory test: its configuration, and the file with its result."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.config import Count, PositiveFloat, TrainerConfig
from trainer.contract.record import config_section

RESULT = "memory-test.json"
"""File with the result, in the run directory."""


@config_section
class MemoryTestConfig:
    """Configuration of `python -m trainer.memory_test`. hpcgen writes it as JSON, like `trainer.contract.config`."""

    trainer: TrainerConfig
    """Configuration of the training whose memory is measured."""
    at_once: Count
    """Number of devices of the node, and so of the ranks that run at the same time."""
    estimated_gib: tuple[PositiveFloat, ...]
    """Estimate of hpcgen.planning.memory for each pipeline stage (GiB)."""

    def rank_of_stage(self, stage: int) -> int:
        """The rank of a pipeline stage that is measured. PP is Megatron-Core's outermost axis of ranks, and TP its
        innermost.

        This is the first rank with the last part of the sequence, which needs the most memory: only there, all queries
        see the keys of the other parts (Transformer Engine's dot_product_attention/context_parallel.py, p2p).
        """
        axes = self.trainer.parallelism
        first = stage * (self.trainer.world_size // axes.pipeline_model_parallel_size)
        return first + (axes.context_parallel_size - 1) * axes.tensor_model_parallel_size


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory that a rank of a pipeline stage needed. Sizes in GiB."""

    stage: int
    rank: int
    estimated_gib: float
    """The estimate for the tensors, comparable with `allocated_gib`."""
    allocated_gib: float | None = None
    """Most memory of tensors at one time (torch.cuda.max_memory_allocated). null on a CPU."""
    in_use_gib: float | None = None
    """Memory of the process, including what torch reserves, CUDA itself and libraries. On a CPU, its largest resident
    set."""
    device_gib: float | None = None
    """Memory of the device. null on a CPU."""
    microbatch_s: float | None = None
    """Time of the forward and backward pass of a microbatch, without waiting for other ranks (seconds)."""
    error: str = ""
    """Why the rank did not finish its steps. Empty if it did."""

    def __post_init__(self) -> None:
        for field in ("allocated_gib", "in_use_gib", "device_gib", "microbatch_s"):
            value = getattr(self, field)
            object.__setattr__(self, field, None if value is None else round(value, 4))


def result_text(name: str, config: Path, stages: list[StageMemory]) -> str:
    """Content of the result file. `config` is the file of the configuration that was measured."""
    rows = [dataclasses.asdict(stage) for stage in stages]
    document = {"name": name, "config": str(config), "stages": rows}
    return json.dumps(document, indent=1) + "\n"
