"""Columns of metrics.jsonl that are computed from the results of steps.

To add a metric, add a class with the two methods of `Column`, and list it in `Window` (`trainer.metrics.record`).
docs/metrics.md describes every column.
"""

from __future__ import annotations

import statistics
from typing import Any, Protocol

from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config import TrainerConfig
from trainer.contract.model.flops import flops
from trainer.step import StepResult


class Column(Protocol):
    """Collects the steps of one line, and computes some of its columns."""

    def add(self, result: StepResult, seconds: float) -> None:
        """Add a step and its duration."""

    def values(self) -> dict[str, Any]:
        """The columns by name. Needs at least one step."""


class Progress:
    """Losses, metrics, norms and progress of the run."""

    def __init__(self) -> None:
        self._losses: list[dict[str, float]] = []
        self._norms: list[float] = []
        self._has_skipped = False
        self._last: StepResult | None = None

    def add(self, result: StepResult, seconds: float) -> None:
        """Add a step."""
        self._losses.append({"loss": result.loss, **result.terms})
        if result.grad_norm is not None:
            self._norms.append(result.grad_norm)
        self._has_skipped |= result.skipped
        self._last = result

    def values(self) -> dict[str, Any]:
        """Means over the steps that have each number, and the state after the last one."""
        last = self._last
        assert last is not None
        losses: dict[str, list[float]] = {}
        for step in self._losses:
            for name, value in step.items():
                losses.setdefault(name, []).append(value)
        return {
            **{name: statistics.fmean(values) for name, values in losses.items()},
            "grad_norm": statistics.fmean(self._norms) if self._norms else None,
            "lr": last.lr,
            "loss_scale": last.loss_scale,
            "batch_size": last.batch.size,
            "consumed_samples": last.batch.first + last.batch.size,
            "consumed_tokens": last.consumed_tokens,
            "skipped": self._has_skipped,
        }


class Throughput:
    """Time, tokens and FLOPs per second. Padding counts as neither."""

    def __init__(self, config: TrainerConfig) -> None:
        self._config = config
        self._one_document = visible_pairs(config.model, [config.model.seq_length])
        self._steps = self._samples = self._padding = 0
        self._seconds = self._pairs = 0.0

    def add(self, result: StepResult, seconds: float) -> None:
        """Add a step and its duration."""
        self._steps += 1
        self._seconds += seconds
        self._samples += result.batch.size
        self._padding += result.padding
        self._pairs += (
            result.batch.size * self._one_document if result.visible_pairs is None else result.visible_pairs
        )

    def values(self) -> dict[str, Any]:
        """Rates over the total time of the steps."""
        config, seconds = self._config, self._seconds
        capacity = self._samples * config.model.seq_length
        tokens = capacity - self._padding
        tflops = (
            flops(config.model, tokens, self._pairs, config.training.freeze, config.lora)
            / seconds
            / config.world_size
            / 1e12
        )
        mfu = {} if config.peak_tflops is None else {"mfu": tflops / config.peak_tflops}
        return {
            "step_time_s": seconds / self._steps,
            "tokens_per_s": tokens / seconds,
            "model_tflops_per_device": tflops,
            **mfu,
            **({"packing_efficiency": tokens / capacity} if config.data.sft else {}),
        }
