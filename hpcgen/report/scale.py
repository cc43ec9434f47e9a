"""Axes: map values to positions between 0 and 1, and choose round tick values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hpcgen.report.words import short
from hpcgen.runs.history import Column


@dataclass(frozen=True, kw_only=True)
class Scale:
    """An axis from `low` to `high`, which must differ. On a logarithmic axis, both must be positive."""

    low: float
    high: float
    is_log: bool = False

    def places(self, values: Column) -> Column:
        """Positions of values: 0 at `low`, 1 at `high`. NaN for NaN, and for values without a logarithm."""
        if not self.is_log:
            return (values - self.low) / (self.high - self.low)
        with np.errstate(divide="ignore", invalid="ignore"):
            places = (np.log(values) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return np.where(np.isfinite(places), places, np.nan)

    def place(self, value: float) -> float:
        """Position of one value."""
        return float(self.places(np.array([value]))[0])

    def ticks(self, most: int = 6) -> list[float]:
        """Round values between `low` and `high`: about `most` or fewer."""
        if self.is_log:
            for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 2, 5), (1, 3), (1,)):
                found = self._log_ticks(digits)
                if 2 <= len(found) <= most:
                    return found
            if len(found) > most:
                return found[:: -(-len(found) // most)]
        return _linear_ticks(self.low, self.high, most)

    def _log_ticks(self, digits: tuple[float, ...]) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        values = (digit * 10.0**decade for decade in decades for digit in digits)
        return [value for value in values if self.low * (1 - 1e-9) <= value <= self.high * (1 + 1e-9)]


def scale_for(low: float, high: float, *, from_zero: bool = False, log_from: float = math.inf) -> Scale:
    """Axis for values from `low` to `high`, with margins; logarithmic if high / low is at least `log_from`."""
    if low > 0 and (ratio := math.log(high) - math.log(low)) >= math.log(log_from):
        air = math.exp(0.05 * ratio)
        return Scale(low=low / air or low, high=high * air, is_log=True)
    if from_zero and low >= 0:
        return Scale(low=0.0, high=high * 1.08 or 1.0)
    air = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return Scale(low=low - air, high=high + air)


def tick_texts(values: Sequence[float]) -> list[str]:
    """Short labels of ticks, with enough digits to distinguish them."""
    for digits in range(4, 12):
        texts = [short(value, digits) for value in values]
        if len(set(texts)) == len(texts):
            break
    return texts


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * digit for digit in (1, 2, 2.5, 5, 10) if power * digit >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
