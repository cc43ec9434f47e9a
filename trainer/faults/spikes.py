"""Loss spikes: batches whose loss is far above the loss of the previous steps."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

WINDOW = 100
"""Number of previous steps whose median a loss is compared with."""

MIN_LOSSES = 20
"""Minimum number of previous steps for the comparison."""


class SpikeWatch:
    """Losses of the last steps and number of skipped batches. Checkpoints contain both."""

    def __init__(self, factor: float | None, allowance: int) -> None:
        """A loss above `factor` times the median is a spike. At most `allowance` batches are skipped in the run."""
        self._factor, self._allowance = factor, allowance
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0

    def spike_ratio(self, loss: float) -> float | None:
        """Ratio of `loss` to the median if it is a spike, else None."""
        if self._factor is None or len(self._losses) < MIN_LOSSES:
            return None
        median = statistics.median(self._losses)
        return loss / median if loss > self._factor * median else None

    def remember(self, loss: float) -> None:
        """Record the loss of a batch that was trained on, spikes included, since the loss may stay at its new level."""
        self._losses.append(loss)

    def skip(self) -> bool:
        """Count one more skipped batch. Returns False if no more batches may be skipped."""
        if self.skipped >= self._allowance:
            return False
        self.skipped += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run needs to decide as an uninterrupted one would."""
        return {"losses": list(self._losses), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self.skipped = state["skipped"]
