"""Estimated memory next to what others measured on ranks of Megatron-LM. `data/memory.yaml` has the cases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.planner.published import read
from hpcgen.planning.memory import estimate_stage
from hpcgen.planning.setup import Setup
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig, from_dict
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.layout import Layout
from trainer.contract.optimizers.adamw import ADAMW

NUM_GPUS = 8


@dataclass(frozen=True)
class StageMemory:
    """The memory of a rank of a pipeline stage in GiB."""

    model: str
    layout: str
    seq_length: int
    stage: int
    estimated_gib: float
    allocated_gib: float
    reserved_gib: float

    @property
    def error(self) -> float:
        """The estimate relative to what was allocated, minus 1."""
        return self.estimated_gib / self.allocated_gib - 1


def stages() -> Iterator[StageMemory]:
    """Yields every measured stage."""
    document = read("memory.yaml")
    for case in document["cases"]:
        model = {**document["all_models"], **document["models"][case["model"]]}
        yield from _stages(case, model)


def _stages(case: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[StageMemory]:
    setup = _setup(case, model)
    for stage, allocated in enumerate(case["allocated_gib"]):
        yield StageMemory(
            case["model"],
            str(setup.layout).partition(",")[0],
            case["seq_length"],
            stage,
            estimate_stage(setup, stage).total_gib,
            allocated,
            case["reserved_gib"][stage],
        )


def _setup(case: Mapping[str, Any], model: Mapping[str, Any]) -> Setup:
    shape = resolve_model(from_dict(ModelConfig, {**model, "seq_length": case["seq_length"]}, case["model"]))
    parallelism = from_dict(ParallelismConfig, dict(case["parallelism"]), case["model"])
    training = TrainingConfig(micro_batch_size=1, global_batch_size=case["global_batch_size"], train_iters=1)
    layout = Layout.make(shape, parallelism, training, NUM_GPUS)
    assert layout is not None
    return Setup(shape, parallelism, training, layout, ADAMW)
