"""The memory of each pipeline stage, stacked by what it holds, next to the memory of a device."""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.memory import GIB, OTHER_GIB, estimate_stage
from hpcgen.planning.setup import Setup
from hpcgen.report.chart import Tick
from hpcgen.report.scale import Scale
from hpcgen.text import counted
from trainer.contract.model.pipeline import embedding_stages, mtp_stage

PARTS = (
    "weights",
    "gradients",
    "optimizer state",
    "activations",
    "logits and other short-lived tensors",
    "buffers of kernels",
    "CUDA and fragments",
    "NCCL (may take)",
)
"""Parts of the bars. Their colors are those of the page, in order."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """A bar: the devices of a pipeline stage, in GiB."""

    name: str
    contents: str
    """The layers and what else the stage has."""
    parts: tuple[float, ...]
    """In the order of PARTS."""
    free: float
    """Free memory. NCCL's buffers come out of it."""

    @property
    def used(self) -> float:
        """All parts but NCCL's buffers."""
        return sum(self.parts[:-1])


@dataclass(frozen=True, kw_only=True)
class MemoryPicture:
    """The bars of a layout."""

    stages: tuple[StageMemory, ...]
    device_gib: float
    high_gib: float
    """Length of the axis."""
    ticks: tuple[Tick, ...]
    summary: str
    """Text for screen readers."""

    def percent(self, gib: float) -> float:
        """Length on the axis."""
        return 100 * gib / self.high_gib


def memory_picture(layout: RankedLayout) -> MemoryPicture:
    """The bars of all stages."""
    device_gib = layout.facts.device_memory_gib
    assert device_gib is not None
    stages = [
        _stage(layout, stage, device_gib) for stage in range(layout.layout.pipeline_model_parallel_size)
    ]
    high_gib = 1.01 * max(device_gib, *(sum(stage.parts) for stage in stages))
    scale = Scale(low=0.0, high=high_gib)
    fullest = min(stages, key=lambda stage: stage.free)
    return MemoryPicture(
        stages=tuple(stages),
        device_gib=device_gib,
        high_gib=high_gib,
        ticks=tuple(Tick(at=100 * scale.place(tick), text=f"{tick:g}") for tick in scale.ticks(5)),
        summary=f"S{fullest.name[1:]} is the fullest: {fullest.used:.1f} of {device_gib:g} GiB, so "
        f"{fullest.free:.1f} GiB are free",
    )


def _stage(layout: RankedLayout, stage: int, device_gib: float) -> StageMemory:
    found = estimate_stage(Setup.of_facts(layout.facts, layout.layout), stage)
    sizes = (
        found.parameter_bytes - found.gradient_bytes - found.optimizer_bytes,
        found.gradient_bytes,
        found.optimizer_bytes,
        found.activation_bytes - found.moment_bytes,
        found.moment_bytes,
        found.kernel_bytes,
    )
    used = (*(size / GIB for size in sizes), OTHER_GIB)
    return StageMemory(
        name=f"stage {stage}",
        contents=_contents(layout, stage),
        parts=(*used, layout.nccl_gib),
        free=device_gib - sum(used),
    )


def _contents(layout: RankedLayout, stage: int) -> str:
    """Contents of a stage: "8 layers, embedding"."""
    model, parallelism = layout.facts.resolved_model, layout.facts.parallelism
    has = [counted(layout.layout.stage_layers(stage), "layer")]
    if stage in embedding_stages(model, parallelism):
        has.append("embedding")
    if model.mtp_num_layers is not None and stage == mtp_stage(parallelism):
        has.append("MTP")
    if stage == layout.layout.pipeline_model_parallel_size - 1:
        has.append("logits")
    return ", ".join(has)
