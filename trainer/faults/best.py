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
        self._iteration = self._last = self._waited = 0

    @property
    def iteration(self) -> int:
        """Iteration of the best evaluation; 0 before the first."""
        return self._iteration

    def observe(self, iteration: int, value: float | None) -> bool:
        """Take the value of an evaluation. Returns whether it is the best one so far.

        An evaluation that is repeated after a resume counts once. A value that is not finite is no improvement.
        """
        if iteration <= self._last:
            return iteration == self._iteration
        self._last = iteration
        if value is not None and math.isfinite(value) and self._is_better(value):
            self._best, self._iteration, self._waited = value, iteration, 0
            return True
        self._waited += 1
        return False

    def _is_better(self, value: float) -> bool:
        if self._best is None:
            return True
        gain = self._best - value if self._rule.mode == "min" else value - self._best
        return gain > self._rule.min_delta

    def reason_to_stop(self) -> str | None:
        """Why the run ends now; None if it goes on."""
        if self._patience is None or self._waited < self._patience:
            return None
        best = "no evaluation had a finite value" if self._best is None else f"the best is {self._best:.6g}"
        at = "" if self._best is None else f" at iteration {self._iteration}"
        return (
            f"{STOPPED_EARLY} at iteration {self._last}: {self._rule.monitor} has not improved for {self._waited} "
            f"evaluations; {best}{at}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to decide as an uninterrupted one would."""
        return {
            "monitor": self._rule.monitor,
            "mode": self._rule.mode,
            "best": self._best,
            "iteration": self._iteration,
            "last": self._last,
            "waited": self._waited,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from `state_dict`, unless another number is watched now."""
        if (state["monitor"], state["mode"]) == (self._rule.monitor, self._rule.mode):
            self._best, self._iteration = state["best"], state["iteration"]
            self._last, self._waited = state["last"], state["waited"]
