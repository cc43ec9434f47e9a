"""Pairs of runs of which a source says which is faster, and what the prediction says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.planner.predictions import predict
from benchmarks.planner.published import configurations, read

SAME = 0.03
"""Largest difference between two times that count as the same."""


@dataclass(frozen=True)
class Ordering:
    """A pair. Ratios are the time of the changed run relative to the other one."""

    says: str
    source: str
    published: float | str
    """The published ratio; without a figure, "faster" or "same"."""
    predicted: float

    @property
    def is_right(self) -> bool:
        """True if the prediction has the published order."""
        if self.published == "same":
            return abs(self.predicted - 1) <= SAME
        published = 0.0 if isinstance(self.published, str) else self.published
        return (self.predicted < 1) == (published < 1)


def orderings() -> list[Ordering]:
    """The pairs of the file, predicted."""
    pairs = read("orderings.yaml")["orderings"]
    return [_ordering(**pair) for pair in pairs]


def _ordering(says: str, source: str, before: str, after: dict[str, Any], **published: Any) -> Ordering:
    base = configurations()[before]
    ratio = predict(base.changed(after)).step_s / predict(base).step_s
    return Ordering(says, source, published.get("ratio", published.get("is")), ratio)
