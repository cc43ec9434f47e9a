"""Loss spikes: a batch whose loss stands out from the steps before it."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

WINDOW = 100
"""Steps whose median a loss is compared with."""

FEWEST = 20
"""Steps that must be known before one can stand out."""


class SpikeWatch:
    """Remembers the losses of the last steps, and how many batches were left out; a checkpoint keeps both."""

    def __init__(self, factor: float | None, allowance: int) -> None:
        """A loss above `factor` times the median is a spike; at most `allowance` batches are left out in the run."""
        self._factor, self._allowance = factor, allowance
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self.skipped = 0

    def height(self, loss: float) -> float | None:
        """How many times the median `loss` is, when that makes it a spike."""
        if self._factor is None or len(self._losses) < FEWEST:
            return None
        median = statistics.median(self._losses)
        return loss / median if loss > self._factor * median else None

    def remember(self, loss: float) -> None:
        """Counts the loss of a batch that was trained on; of spikes too, for the loss may stay where it went."""
        self._losses.append(loss)

    def skip(self) -> bool:
        """Whether one more batch may be left out, and counts it."""
        if self.skipped >= self._allowance:
            return False
        self.skipped += 1
        return True

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to judge as the undisturbed one would."""
        return {"losses": list(self._losses), "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self._losses = deque(state["losses"], maxlen=WINDOW)
        self.skipped = state["skipped"]
