"""How far predictions are from measured steps, by group of configurations."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.planner.published import Step, configurations, steps

GROUPS = {
    "Megatron-Bridge, dense": ("bridge",),
    "NeMo 24.07 to 25.02, dense": ("nemo",),
    "complete dense, H100": ("bridge", "nemo"),
    "complete dense, all": ("bridge", "nemo", "a100"),
    "A100, 2022": ("a100",),
    "NVIDIA's recipes, bf16": ("recipes-bf16",),
    "NVIDIA's recipes, FP8": ("recipes-fp8",),
    "bf16, partly stated": ("bf16",),
    "FP8, partly stated": ("partial",),
    "experts": ("experts",),
}
"""Groups of the table, each with its groups of configurations."""


@dataclass(frozen=True)
class Comparison:
    """A configuration's prediction next to its measurements, which differ by release of the software."""

    configuration: str
    group: str
    predicted_s: float
    measured: tuple[Step, ...]

    @property
    def measured_s(self) -> float:
        """Median of the measurements."""
        return statistics.median(step.step_s for step in self.measured)

    @property
    def error(self) -> float:
        """Prediction relative to the median measurement, minus 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def software_band(self) -> float:
        """Slowest measurement relative to the fastest, minus 1."""
        times = [step.step_s for step in self.measured]
        return max(times) / min(times) - 1


@dataclass(frozen=True)
class Accuracy:
    """Errors of a group. Each configuration counts once, however many releases were measured."""

    num_configurations: int
    num_rows: int
    median: float
    """Median of the errors without their signs."""
    worst: float
    """The largest error, with its sign."""
    bias: float
    """Mean of the errors with their signs."""

    @classmethod
    def of(cls, comparisons: Sequence[Comparison]) -> Accuracy:
        """The accuracy of these configurations."""
        errors = [each.error for each in comparisons]
        return cls(
            len(errors),
            sum(len(each.measured) for each in comparisons),
            statistics.median(map(abs, errors)),
            max(errors, key=abs),
            statistics.fmean(errors),
        )


def compare(predicted: Mapping[str, float]) -> list[Comparison]:
    """Comparisons of the predictions (configuration -> seconds) that have measurements."""
    known = configurations()
    return [
        Comparison(name, known[name].group, predicted[name], tuple(measured))
        for name, measured in steps().items()
        if name in predicted
    ]


def by_group(comparisons: Iterable[Comparison]) -> dict[str, Accuracy]:
    """The accuracy of each group of the table that has comparisons."""
    comparisons = list(comparisons)
    members = {
        title: [each for each in comparisons if each.group in groups] for title, groups in GROUPS.items()
    }
    return {title: Accuracy.of(chosen) for title, chosen in members.items() if chosen}
