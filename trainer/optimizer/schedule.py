"""Learning-rate schedule: Megatron-Core's schedules, or a user's function."""

from __future__ import annotations

import math
import traceback
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from trainer.contract.code import code_loading, imports
from trainer.contract.config import OptimizerConfig
from trainer.contract.errors import TrainerError

TRIED_RATES = 1000
"""Number of iterations at which a user's schedule is tried before the first step."""


class Schedule(OptimizerParamScheduler):
    """Sets the learning rate and the weight decay of each parameter group, which only depend on the step count.

    The schedule is a linear warm-up from lr_warmup_init, then lr_decay_style by Core's formulas or lr_schedule. The
    rate of a parameter group is lr_mult times this rate.
    """

    def __init__(self, config: OptimizerConfig, optimizer: MegatronOptimizer, train_iters: int) -> None:
        """`config` is resolved; the run has `train_iters` steps.

        Raises:
            ConfigError: lr_schedule cannot be imported.
            TrainerError: lr_schedule fails or returns an invalid rate at one of TRIED_RATES iterations of the run.
        """
        self._config, self._last = config, train_iters - 1
        self._function: imports.Rate | None = None
        if config.lr_schedule is not None:
            self._function = code_loading.load(config.lr_schedule, "optimizer.lr_schedule")
        super().__init__(
            optimizer,
            init_lr=config.lr_warmup_init,
            max_lr=config.lr,
            min_lr=config.min_lr,
            lr_warmup_steps=config.lr_warmup_iters,
            lr_decay_steps=config.lr_decay_iters,
            lr_decay_style=config.lr_decay_style,
            wsd_decay_steps=config.lr_wsd_decay_iters,
            lr_wsd_decay_style=config.lr_wsd_decay_style,
            start_wd=config.weight_decay,
            end_wd=config.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        if self._function is not None:
            self._try_function()

    def rate(self) -> float:
        """Learning rate of the next step, without lr_mult.

        Raises:
            TrainerError: lr_schedule fails or returns an invalid rate.
        """
        is_warming_up = 0 < self.lr_warmup_steps >= self.num_steps
        if self._function is None or is_warming_up:
            return float(super().get_lr({}))
        # Core also asks after the last step, for a step that the user's function need not support.
        return self._function_rate(min(self.num_steps, self._last))

    def _function_rate(self, iteration: int) -> float:
        assert self._function is not None
        named = f"optimizer.lr_schedule = {self._config.lr_schedule!r}"
        try:
            rate = self._function(iteration, self._config)
        except Exception as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise TrainerError(
                f"{named} raises {type(error).__name__} for iteration {iteration}: {error} "
                f"({at.filename}:{at.lineno})"
            ) from error
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise TrainerError(
                f"{named} returns {rate!r} for iteration {iteration}. It must return a non-negative number"
            )
        return float(rate)

    def _try_function(self) -> None:
        """Call the function for iterations of the entire run, to find errors now and not after hours of training."""
        warmup, last = self._config.lr_warmup_iters or 0, self._last
        first = warmup + 1 if warmup else 0
        for iteration in range(first, last, max(1, (last - first) // TRIED_RATES)):
            self._function_rate(iteration)
        if first <= last:
            self._function_rate(last)

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Learning rate of a parameter group. Core calls this after each step."""
        return self.rate() * float(param_group.get("lr_mult", 1.0))
