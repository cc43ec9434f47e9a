"""Types of the values, with their ranges."""

from __future__ import annotations

from typing import Annotated

from trainer.contract.problem import Problem
from trainer.contract.record import record


@record
class Range:
    """Range of valid numbers. `at_least` and `at_most` are inclusive bounds; `above` and `below` are exclusive."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def problem(self, path: str, value: float) -> Problem | None:
        """The problem of a `value` at `path` that is out of range; None if it is in range."""
        if self.at_least is not None and not value >= self.at_least:
            return Problem(path, f"must be at least {self.at_least:g}")
        if self.at_most is not None and not value <= self.at_most:
            return Problem(path, f"must be at most {self.at_most:g}")
        if self.above is not None and not value > self.above:
            return Problem(path, f"must be greater than {self.above:g}")
        if self.below is not None and not value < self.below:
            return Problem(path, f"must be less than {self.below:g}")
        return None


Count = Annotated[int, Range(at_least=1, at_most=2**53)]
Seed = Annotated[int, Range(at_least=0, at_most=2**32 - 1)]  # as numpy accepts
LayerCount = Annotated[int, Range(at_least=1, at_most=10_000)]
"""Layers are planned one by one, so a number with too many zeros would take all memory."""
NonNegative = Annotated[int, Range(at_least=0, at_most=2**53)]
PositiveFloat = Annotated[float, Range(above=0, at_most=1e300)]
NonNegativeFloat = Annotated[float, Range(at_least=0, at_most=1e300)]
OpenFraction = Annotated[float, Range(above=0, below=1)]
Fraction = Annotated[float, Range(at_least=0, below=1)]
