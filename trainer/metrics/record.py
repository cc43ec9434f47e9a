"""The run's record: `metrics.jsonl`, TensorBoard, Weights & Biases, and lines for the person who watches.

Written by rank 0. Each line of metrics.jsonl is one JSON object with `event`, `iteration` and `time` (Unix seconds);
docs/metrics.md says what each event holds. Units: losses in nats per token, times in seconds, memory in GiB.
Nothing here waits for the GPU: a step's numbers were read when its update was decided, its times are those of events
that the GPU has passed.
"""

from __future__ import annotations

import dataclasses
import resource
import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer.contract.config import TrainerConfig, TrainingConfig
from trainer.contract.flops import FORMULA, flops_per_sample
from trainer.contract.run_directory import RunDirectory
from trainer.faults.stragglers import Place, Straggler
from trainer.metrics.console import Log
from trainer.metrics.json_lines import JsonLines, drop_after
from trainer.metrics.tensorboard import open_tensorboard
from trainer.metrics.timers import Timers, Times
from trainer.metrics.versions import versions
from trainer.metrics.wandb import open_experiment
from trainer.step import StepResult

if TYPE_CHECKING:
    from trainer.checkpoint.loading import Source
    from trainer.checkpoint.saving import SaveEvent

GIB = 2**30


class Board(Protocol):
    """Draws numbers over iterations."""

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Records numbers under their names."""

    def close(self) -> None:
        """Writes what is left."""


class Metrics:
    """Records what happens after `iteration`, on rank 0; on the others it keeps nothing."""

    def __init__(
        self,
        config: TrainerConfig,
        run: RunDirectory,
        log: Log,
        timers: Timers,
        iteration: int,
        is_rank_0: bool,
    ) -> None:
        self._config, self._log, self._timers = config, log, timers
        self._flops = flops_per_sample(config)
        self._lines: JsonLines | None = None
        self._lost: dict[str, Any] | None = None
        self._boards: list[Board] = []
        if is_rank_0:
            self._open(run, iteration)
        self._window = Window()
        self._times = timers.totals()
        self._last_time = time.perf_counter()

    def _open(self, run: RunDirectory, iteration: int) -> None:
        self._lost = drop_after(run.metrics, iteration)
        self._lines = JsonLines(run.metrics, self._log.line)
        logging = self._config.logging
        boards = (
            open_tensorboard(run.tensorboard, iteration, self._log) if logging.tensorboard else None,
            open_experiment(self._config, run, self._log) if logging.wandb_project else None,
        )
        self._boards = [board for board in boards if board is not None]

    def start(self, iteration: int, places: Sequence[Place], source: Source | None) -> None:
        """Records what this life is, where it runs and what it goes on from; says what its numbers are measured by."""
        config, layout = self._config, self._config.parallelism
        precision, peak = precision_name(config.training), config.peak_tflops
        model_ranks = (
            layout.tensor_model_parallel_size
            * layout.pipeline_model_parallel_size
            * layout.context_parallel_size
        )
        self._write(
            "start",
            iteration,
            {
                "name": config.name,
                "world_size": config.world_size,
                "device": config.device,
                "hosts": list(dict.fromkeys(place.host for place in places)),
                "tp": layout.tensor_model_parallel_size,
                "pp": layout.pipeline_model_parallel_size,
                "cp": layout.context_parallel_size,
                "dp": config.world_size // model_ranks,
                "vpp": layout.virtual_pipeline_model_parallel_size or 1,
                "flop_formula": FORMULA,
                "flops_per_sample": self._flops,
                "tokens_per_sample": config.model.seq_length,
                "peak_tflops": peak,
                "precision": precision,
                "versions": versions(),
                "train_iters": config.training.train_iters,
                "checkpoint": None if source is None else str(source.path),
                "changed": [[c.name, c.before, c.after] for c in source.changes] if source else [],
                "passed_over": list(source.passed_over) if source else [],
                "lost": self._lost and {name: self._lost.get(name) for name in ("iteration", "time")},
            },
        )
        against = (
            "no MFU: peak_tflops is not set" if peak is None else f"MFU of {peak:g} TFLOP/s ({precision})"
        )
        self._log.line(f"model FLOPs as {FORMULA}; {against}")

    def step(self, iteration: int, result: StepResult) -> None:
        """Takes in a step; records the means since the last recorded one at each log_interval."""
        now = time.perf_counter()
        self._window.add(result, now - self._last_time)
        self._last_time = now
        self._timers.totals()  # each step, so that its events can be used again
        if result.skipped or result.spike is not None:
            self._stands_out(iteration, result)
        if iteration % self._config.logging.log_interval == 0:
            self.catch_up(iteration)

    def catch_up(self, iteration: int) -> None:
        """Records the steps since the last line: before a checkpoint too, for a life that goes on from it has none."""
        if not len(self._window):
            return
        times = self._timers.totals()
        values = self._window.values(self._config, self._flops)
        values |= shares(times - self._times, len(self._window), values["step_time_s"])
        values["peak_memory_gib"] = peak_memory_gib(self._config.device)
        steps = len(self._window)
        self._window, self._times = Window(), times
        self._write("step", iteration, {"steps": steps, **values})
        self._draw("train", iteration, values)
        self._log.step(iteration, values)

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Records the mean loss over the evaluation batches of a split."""
        self._write("evaluation", iteration, {"split": split, "loss": loss})
        self._draw(split, iteration, {"loss": loss})
        self._log.line(f"iteration {iteration}: {split} loss {loss:.4f}")

    def checkpoint(self, iteration: int, event: SaveEvent) -> None:
        """Records a checkpoint that is complete."""
        values = dataclasses.asdict(event)
        self._write("checkpoint", iteration, values)
        self._draw("checkpoint", iteration, {name: values[name] for name in ("stall_s", "write_s")})

    def stragglers(self, iteration: int, found: Sequence[Straggler]) -> None:
        """Records ranks that compute more slowly than their like; those that wait for each other in one event."""
        for straggler in found:
            self._write(
                "straggler",
                iteration,
                {
                    "rank": straggler.ranks[0],
                    "ranks": straggler.ranks,
                    "host": ", ".join(straggler.hosts),
                    "local_rank": straggler.places[0].local_rank,
                    "slowdown": straggler.slowdown,
                },
            )
            self._log.line(f"iteration {iteration}: SLOW: {straggler}")

    def stop(self, iteration: int, reason: str) -> None:
        """Records why this life ends before the last iteration."""
        self._write("stop", iteration, {"reason": reason})

    def skip_time(self) -> None:
        """Leaves the time since the last step (an evaluation, a save) out of the next step's."""
        self._last_time = time.perf_counter()

    def close(self) -> None:
        """Writes what is left."""
        for output in (self._lines, *self._boards):
            if output is not None:
                output.close()

    def _stands_out(self, iteration: int, result: StepResult) -> None:
        batch = result.batch
        first, last = batch.first, batch.first + batch.size - 1
        if result.spike is None:
            self._log.line(
                f"iteration {iteration}: OVERFLOW: no update, the gradients are not finite at loss scale "
                f"{result.loss_scale:g} (samples {first} to {last})"
            )
            return
        self._write(
            "spike",
            iteration,
            {
                "loss": result.loss,
                "height": result.spike,
                "first_sample": first,
                "last_sample": last,
                "skipped": result.skipped,
            },
        )
        self._log.line(
            f"iteration {iteration}: LOSS SPIKE: {result.loss:.4f} is {result.spike:.2f} times the median of the steps "
            f"before; samples {first} to {last} were {'left out of training' if result.skipped else 'trained on'}"
        )

    def _write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write({"event": event, "iteration": iteration, "time": time.time(), **values})

    def _draw(self, prefix: str, iteration: int, values: dict[str, Any]) -> None:
        numbers = {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}
        for board in self._boards:
            board.scalars(iteration, numbers)


class Window:
    """The steps since the last line."""

    def __init__(self) -> None:
        self._seconds: list[float] = []
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._samples = 0
        self._has_skipped = False
        self._last: StepResult | None = None

    def __len__(self) -> int:
        return len(self._seconds)

    def add(self, result: StepResult, seconds: float) -> None:
        """Takes in a step that took so long."""
        self._seconds.append(seconds)
        self._losses.append(result.loss)
        if result.grad_norm is not None:
            self._norms.append(result.grad_norm)
        self._samples += result.batch.size
        self._has_skipped |= result.skipped
        self._last = result

    def values(self, config: TrainerConfig, flops: float) -> dict[str, Any]:
        """What a line says of the steps, one at least; a sample takes `flops`."""
        last = self._last
        assert last is not None
        seconds = sum(self._seconds)
        tflops = flops * self._samples / seconds / config.world_size / 1e12
        values = {
            "loss": statistics.fmean(self._losses),
            "grad_norm": statistics.fmean(self._norms) if self._norms else None,
            "lr": last.lr,
            "loss_scale": last.loss_scale,
            "batch_size": last.batch.size,
            "consumed_samples": last.batch.first + last.batch.size,
            "step_time_s": seconds / len(self._seconds),
            "tokens_per_s": self._samples * config.model.seq_length / seconds,
            "model_tflops_per_device": tflops,
            "skipped": self._has_skipped,
        }
        if config.peak_tflops is not None:
            values["mfu"] = tflops / config.peak_tflops
        return values


def shares(times: Times, steps: int, step_time_s: float) -> dict[str, float]:
    """Where the mean step's time went on rank 0, from the `times` of so many steps."""
    return {
        "compute_s": times.compute_s / steps,
        "communication_s": times.communication_s / steps,
        "update_s": times.update_s / steps,
        "data_wait_s": times.data_wait_s / steps,
        "idle_s": max(0.0, step_time_s - times.accounted_s / steps),
    }


def precision_name(training: TrainingConfig) -> str:
    """What the layers compute in, and so whose peak MFU is measured against."""
    return training.precision if training.fp8 is None else f"fp8 {training.fp8} {training.fp8_recipe}"


def peak_memory_gib(device: str) -> float:
    """Peak memory of this rank: what torch allocated on the GPU, or the resident set of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
