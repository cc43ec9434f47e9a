"""Why a layout is better than another, in words, and both side by side."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import SAME_SPEED, Preference
from hpcgen.planning.memory import GIB, OTHER_GIB
from hpcgen.text import counted
from trainer.contract.config import TrainingConfig

PARTS = {
    "compute": "computation",
    "host": "waiting for the host",
    "tensor_parallel": "tensor-parallel transfers",
    "context_parallel": "context-parallel transfers",
    "expert_parallel": "expert-parallel transfers",
    "data_parallel": "reducing gradients and gathering weights",
    "pipeline_bubble": "pipeline bubble",
    "pipeline_transfers": "transfers between pipeline stages",
    "optimizer": "updating the weights",
}
"""The parts of a step in words."""
MOST_OF = 0.8
"""Share of the difference between two layouts that the named parts explain."""
NONE = "0 s"
"""The time of a part that a step does not have."""
COUNTERS = 0.25
"""A part that is slower by this share of the difference is named as well."""


def why(first: RankedLayout, other: RankedLayout) -> str:
    """Why `first` precedes `other`, in a sentence."""
    gain = other.step.total / first.step.total - 1
    if gain > SAME_SPEED:
        return f"{first.name} is {gain:.1%} faster than {other.name}: {_faster_parts(first, other)}"
    speed = (
        "as fast as" if abs(gain) < 0.0005 else f"{abs(gain):.1%} {'faster' if gain > 0 else 'slower'} than"
    )
    doubt = "but" if gain < -SAME_SPEED else "which the prediction cannot tell apart, and"
    return f"{first.name} is {speed} {other.name}, {doubt} {_advantage(first, other)}"


def compared(one: RankedLayout, other: RankedLayout) -> list[tuple[str, str, str]]:
    """Rows for two layouts side by side: what, and its value for each of them. Without parts that neither has."""
    return [
        (what, value, other_value)
        for (what, value), (_, other_value) in zip(_rows(one), _rows(other), strict=True)
        if not value == other_value == NONE
    ]


def _rows(layout: RankedLayout) -> Iterator[tuple[str, str]]:
    """Yields what is compared, with its value."""
    memory, axes = layout.memory, layout.layout
    yield "tokens/s per GPU", f"{layout.tokens_per_s / axes.world_size:,.0f}"
    yield "step", _seconds(layout.step.total)
    for part, words in PARTS.items():
        yield words, _seconds(getattr(layout.step, part))
    yield "microbatches", f"{axes.num_microbatches:,}"
    yield "memory of a GPU", f"{layout.device_gib:.1f} GiB"
    yield "weights, gradients and optimizer", f"{memory.parameter_bytes / GIB:.1f} GiB"
    yield "activations", f"{memory.activation_bytes / GIB:.1f} GiB"
    yield "buffers for kernels", f"{memory.kernel_bytes / GIB:.1f} GiB"
    yield "CUDA and fragments", f"{OTHER_GIB:.1f} GiB"
    share = f"{layout.free_share:.0%}" + (", a risk" if layout.is_risky else "")
    yield "free", f"{layout.free_gib:.1f} GiB ({share})"
    yield "of it, NCCL may take", f"{layout.nccl_gib:.1f} GiB"


def _faster_parts(first: RankedLayout, other: RankedLayout) -> str:
    """The parts of the step that make the difference, largest first, and those that reduce it."""
    saved = {part: getattr(other.step, part) - getattr(first.step, part) for part in PARTS}
    total = sum(saved.values())
    faster, explained = [], 0.0
    for part in sorted(saved, key=lambda part: -saved[part]):
        if saved[part] <= 0 or explained >= MOST_OF * total:
            break
        faster.append(f"{_saving(part, saved[part], 'less')}{_cause(part, first, other)}")
        explained += saved[part]
    slower = [
        _saving(part, -saved[part], "more")
        for part in sorted(saved, key=saved.__getitem__)
        if -saved[part] >= COUNTERS * total
    ]
    return f"it {_and(faster)}" + (f", although it {_and(slower)}" if slower else "")


def _saving(part: str, seconds: float, word: str) -> str:
    """How the time of a part differs: "waits 0.4 s less for tensor-parallel transfers"."""
    time = f"{_seconds(seconds)} {word}"
    match part:
        case "compute":
            return f"computes {time}"
        case "host":
            return f"waits {time} for its host"
        case "pipeline_bubble":
            return f"waits {time} in the bubble of its pipeline"
        case "optimizer":
            return f"spends {time} on updating the weights"
        case "data_parallel":
            return f"spends {time} on {PARTS[part]}"
        case _:
            return f"waits {time} for {PARTS[part]}"


def _cause(part: str, first: RankedLayout, other: RankedLayout) -> str:
    """Why a part takes less time, if a single setting explains it."""
    training, other_training = first.facts.training, other.facts.training
    if part != "compute":
        return ""
    if _recomputation(training) != _recomputation(other_training):
        return ", because it recomputes less"
    if training.micro_batch_size > other_training.micro_batch_size:
        return ", because its micro-batches are larger"
    return ""


def _recomputation(training: TrainingConfig) -> tuple[object, ...]:
    return (
        training.recompute_granularity,
        training.recompute_modules,
        training.recompute_method,
        training.recompute_num_layers,
    )


def _advantage(first: RankedLayout, other: RankedLayout) -> str:
    """Why `first` is preferred to a layout of the same speed, or to one that is faster and a risk."""
    better, worse = Preference.of(first), Preference.of(other)
    memory = f"{first.free_share:.0%} instead of {other.free_share:.0%}"
    if better.is_risky != worse.is_risky:
        return f"leaves enough memory: {memory}"
    if better.ranks != worse.ranks:
        return f"divides the model over {counted(better.ranks, 'GPU')} instead of {worse.ranks:,}"
    if better.is_full != worse.is_full:
        return f"leaves more memory: {memory}"
    if better.chunks != worse.chunks:
        return f"has {counted(better.chunks, 'chunk')} per pipeline stage instead of {worse.chunks}"
    return "does not differ in what would decide otherwise"


def _seconds(seconds: float) -> str:
    """Seconds with at least three digits, so that small differences of long steps show."""
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _and(texts: list[str]) -> str:
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
