"""The best evaluation of a run, and when to stop because none has been better for long."""

from __future__ import annotations

import math
from typing import Any

from trainer.contract.config import EarlyStopping, TrainingConfig
from trainer.contract.wording import STOPPED_EARLY


class BestWatch:
    """The best value of a number of evaluations. Checkpoints contain it, so that a resumed run decides as one that was
    not interrupted."""

    def __init__(self, training: TrainingConfig) -> None:
        """Without training.early_stopping, the lowest validation loss is watched, and nothing stops."""
        self._rule = training.early_stopping or EarlyStopping()
        self._patience = None if training.early_stopping is None else self._rule.patience
        self.split, _, self.column = self._rule.monitor.rpartition("/")
        self._best: float | None = None
        self._reference: float | None = None
        """The last value that was better than its predecessor by more than min_delta. Patience counts from it."""
        self._iteration = self._last = self._waited = 0

    @property
    def iteration(self) -> int:
        """Iteration of the best evaluation; 0 before the first."""
        return self._iteration

    def observe(self, iteration: int, value: float | None) -> bool:
        """Take the value of an evaluation. Returns whether it is the best one so far.

        An evaluation that is repeated after a resume counts once. A value that is not finite is no improvement.
        min_delta decides only when the run ends. A smaller improvement is the best value too, as in transformers.
        """
        if iteration <= self._last:
            return iteration == self._iteration
        self._last = iteration
        self._waited += 1
        if value is None or not math.isfinite(value):
            return False
        if self._exceeds(self._reference, value, self._rule.min_delta):
            self._reference, self._waited = value, 0
        if not self._exceeds(self._best, value, 0.0):
            return False
        self._best, self._iteration = value, iteration
        return True

    def _exceeds(self, earlier: float | None, value: float, by: float) -> bool:
        if earlier is None:
            return True
        gain = earlier - value if self._rule.mode == "min" else value - earlier
        return gain > by

    def reason_to_stop(self) -> str | None:
        """Why the run ends now; None if it goes on."""
        if self._patience is None or self._waited < self._patience:
            return None
        best = "no evaluation had a finite value" if self._best is None else f"the best is {self._best:.6g}"
        at = "" if self._best is None else f" at iteration {self._iteration}"
        by = f" by more than {self._rule.min_delta:g}" if self._rule.min_delta else ""
        return (
            f"{STOPPED_EARLY} at iteration {self._last}: {self._rule.monitor} has not improved{by} for "
            f"{self._waited} evaluations; {best}{at}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State with which a resumed run decides as an uninterrupted one would."""
        return {
            "monitor": self._rule.monitor,
            "mode": self._rule.mode,
            "best": self._best,
            "reference": self._reference,
            "iteration": self._iteration,
            "last": self._last,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, unless another number is watched now."""
        if (state["monitor"], state["mode"]) == (self._rule.monitor, self._rule.mode):
            self._best, self._iteration = state["best"], state["iteration"]
            self._reference = state["reference"]
            self._last, self._waited = state["last"], state["waited"]
