"""Records a run: `metrics.jsonl`, TensorBoard, Weights & Biases and the log.

Only rank 0 writes. Each line of metrics.jsonl is a JSON object with `event`, `iteration` and `time` (Unix seconds);
docs/metrics.md describes the events, and `columns` and `experts` next to this file compute the values of steps.
Units: losses in nats per token, times in seconds, memory in GiB. Nothing here waits for the GPU: the loss and the norm
of a step were already read before its update, and times come from CUDA events that have completed.
"""

from __future__ import annotations

import dataclasses
import resource
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from trainer.contract.config import TrainerConfig, TrainingConfig
from trainer.contract.files.metrics_times import PAUSES
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.model.flops import FORMULA, flops_per_sample
from trainer.contract.model.layout import model_parallel_size
from trainer.contract.resuming.data_stages import stage_at
from trainer.distributed import slurm_job
from trainer.faults.stragglers import RankLocation, Straggler
from trainer.metrics import experts
from trainer.metrics.columns import Column, Progress, Throughput
from trainer.metrics.console import Log
from trainer.metrics.json_lines import JsonLines, drop_after
from trainer.metrics.prometheus import open_prometheus
from trainer.metrics.tensorboard import open_tensorboard
from trainer.metrics.timers import Timers, Times
from trainer.metrics.versions import versions
from trainer.metrics.wandb import open_experiment
from trainer.model.experts import moe_layers
from trainer.step import StepResult

if TYPE_CHECKING:
    from trainer.checkpoint.finding import Source
    from trainer.checkpoint.saving import SaveEvent
    from trainer.loss import Objective

GIB = 2**30


class Board(Protocol):
    """Plots numbers over iterations."""

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Record numbers by name."""

    def close(self) -> None:
        """Write buffered numbers."""


class Metrics:
    """Records the steps after `iteration` on rank 0. Records nothing on other ranks."""

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
        self._lines: JsonLines | None = None
        self._lost: dict[str, Any] | None = None
        self._boards: list[Board] = []
        self._run = run
        if is_rank_0:
            self._lost = drop_after(run.metrics, iteration, run.last_step)
            self._lines = JsonLines(run.metrics, log.line)
        self._window = Window(config)
        self._pauses = dict.fromkeys(PAUSES, 0.0)
        self._iteration, self._has_stepped = iteration, False
        self._stage = stage_at(config.data, iteration + 1)
        self._experts_due = 0
        self._latest_load: tuple[int, experts.ExpertLoad] | None = None
        self._times = timers.totals()
        self._last_time = time.perf_counter()

    def start(
        self,
        iteration: int,
        places: Sequence[RankLocation],
        source: Source | None,
        code: list[dict[str, Any]],
        start_up: dict[str, Any],
        objective: Objective,
    ) -> None:
        """Record configuration, hosts, checkpoint and code of this attempt, and log the basis of its FLOP numbers.

        `start_up` is the time since the process began (`trainer.metrics.start_up`).
        """
        config, layout = self._config, self._config.parallelism
        precision, peak = precision_name(config.training), config.peak_tflops
        self._write(
            "start",
            iteration,
            {
                "name": config.name,
                "job": slurm_job.job_id(),
                "restart": slurm_job.restart_count(),
                "world_size": config.world_size,
                "device": config.device,
                "hosts": list(dict.fromkeys(place.host for place in places)),
                "tp": layout.tensor_model_parallel_size,
                "pp": layout.pipeline_model_parallel_size,
                "cp": layout.context_parallel_size,
                "dp": config.world_size // model_parallel_size(layout),
                **experts.layout(config),
                "vpp": layout.num_chunks,
                "flop_formula": FORMULA,
                "flops_per_sample": flops_per_sample(config),
                "tokens_per_sample": config.model.seq_length,
                "peak_tflops": peak,
                "precision": precision,
                "versions": versions(),
                "train_iters": config.training.train_iters,
                "checkpoint": None if source is None else str(source.path),
                "code": code,
                "changed": [[c.name, c.before, c.after] for c in source.changes] if source else [],
                "passed_over": list(source.passed_over) if source else [],
                "lost": self._lost,
                "losses": list(objective.losses),
                "metrics": list(objective.metrics),
                **start_up,
            },
        )
        against = (
            "no MFU, since peak_tflops is not set"
            if peak is None
            else f"MFU relative to {peak:g} TFLOP/s ({precision})"
        )
        self._log.line(f"TFLOP/s as in Megatron-LM (metrics.jsonl has the formula), {against}")
        if self._lines is not None:
            # Files that prove training are written after this line. If they exist without it, lines were lost.
            self._lines.sync()
            self._open_boards(iteration, objective.names)

    def _open_boards(self, iteration: int, names: Sequence[str]) -> None:
        logging = self._config.logging
        boards = (
            open_tensorboard(self._run.tensorboard, iteration, self._log) if logging.tensorboard else None,
            open_experiment(self._config, self._run, self._log) if logging.wandb_project else None,
            open_prometheus(self._config, self._run, self._log, names) if logging.prometheus else None,
        )
        self._boards = [board for board in boards if board is not None]

    def step(self, iteration: int, result: StepResult) -> None:
        """Add a step. At each log_interval, record the means since the last line."""
        now = time.perf_counter()
        seconds = now - self._last_time
        self._window.add(result, seconds)
        self._last_time, self._iteration = now, iteration
        if not self._has_stepped:
            self._has_stepped = True
            self._write("first_step", iteration, {"step_s": seconds})
        self._timers.totals()  # in each step, so that its CUDA events can be reused
        if result.skipped or result.spike is not None:
            self._record_anomaly(iteration, result)
        ends_stage = self._stage != (following := stage_at(self._config.data, iteration + 1))
        if iteration % self._config.logging.log_interval == 0 or ends_stage:
            self.catch_up(iteration)
        elif self._lines is not None:
            self._lines.note(self._line("step", iteration, self._times_since_line()))
        if ends_stage and following is not None:
            self._stage = following
            self._log.line(f"iteration {iteration}: stage {following.name} of the data begins")

    def catch_up(self, iteration: int) -> None:
        """Record the steps since the last line. Also called before a checkpoint, where another attempt may resume."""
        if not len(self._window):
            return
        times, window = self._timers.totals(), self._window
        values = window.values()
        values |= shares(times - self._times, len(window), values["step_time_s"])
        values["peak_memory_gib"] = peak_memory_gib(self._config.device)
        if self._config.device == "cuda":
            values["peak_reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
        pauses = self._pauses_since_line()
        self._window, self._times = Window(self._config), times
        self._pauses = dict.fromkeys(PAUSES, 0.0)
        stage = {} if self._stage is None else {"stage": self._stage.name}
        self._write("step", iteration, {"steps": len(window), **values, **stage, **pauses})
        if self._config.model.num_moe_experts is not None:
            self._record_experts(iteration, window.experts, values.pop(experts.BY_LAYER))
        self._draw("train", iteration, values)
        self._log.step(iteration, values)

    def evaluation(
        self,
        iteration: int,
        split: str,
        losses: dict[str, float] | None,
        training: TrainingConfig,
        seconds: float,
    ) -> None:
        """Record the mean losses over the batches of a split. None if no token of them counts.

        `training` says how many samples they have.
        """
        if losses is None:
            self._log.line(
                f"iteration {iteration}: no {split} loss, because the loss mask is 0 for every token of the first "
                f"eval_iters = {training.eval_iters} batches. With data.eod_mask_loss, check data.eod_id; or raise "
                "eval_iters"
            )
            return
        samples = training.eval_iters * training.global_batch_size
        values = {"split": split, **losses, "samples": samples, "evaluation_s": seconds}
        self._write("evaluation", iteration, values)
        self._draw(split, iteration, losses)
        shown = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
        self._log.line(f"iteration {iteration}: {split} {shown}")

    def checkpoint(self, iteration: int, event: SaveEvent) -> None:
        """Record a complete checkpoint."""
        values = dataclasses.asdict(event)
        self._write("checkpoint", iteration, values)
        self._draw("checkpoint", iteration, {name: values[name] for name in ("stall_s", "write_s")})

    def stragglers(self, iteration: int, found: Sequence[Straggler]) -> None:
        """Record slow ranks. Ranks that wait for each other share one event."""
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
        """Record why this attempt ends before the last iteration."""
        self._write("stop", iteration, {"reason": reason})

    def paused(self, pause: str) -> float:
        """Count the time since the last step or pause as a pause, not as a part of the next step. Returns the seconds.

        `pause` is one of PAUSES.
        """
        now = time.perf_counter()
        seconds, self._last_time = now - self._last_time, now
        self._pauses[pause] += seconds
        return seconds

    def close(self) -> None:
        """Write buffered lines and numbers, the latest load of the experts, and the time since the last line."""
        self._write_experts()
        self._write("end", self._iteration, self._times_since_line())
        for output in (self._lines, *self._boards):
            if output is not None:
                output.close()

    def _record_experts(self, iteration: int, load: experts.ExpertLoad, by_layer: Sequence[float]) -> None:
        layers = moe_layers(self._config.model)
        self._draw(
            "experts", iteration, {f"max_load/layer_{n}": x for n, x in zip(layers, by_layer, strict=True)}
        )
        self._latest_load = (iteration, load)
        if iteration >= self._experts_due:
            self._write_experts()
            self._experts_due = iteration + experts.EVERY_STEPS

    def _write_experts(self) -> None:
        """Write the load of each expert at the latest line, unless this has been done."""
        if self._latest_load is not None:
            iteration, load = self._latest_load
            values = {"layers": moe_layers(self._config.model), "load": load.by_expert()}
            self._write("experts", iteration, values)
            self._latest_load = None

    def _record_anomaly(self, iteration: int, result: StepResult) -> None:
        batch = result.batch
        first, last = batch.first, batch.first + batch.size - 1
        if result.spike is None:
            self._log.line(
                f"iteration {iteration}: OVERFLOW: no update, since the gradients are not finite at loss scale "
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
            f"iteration {iteration}: LOSS SPIKE: {result.loss:.4f} is {result.spike:.2f} times the median of previous "
            f"steps; samples {first} to {last} were {'excluded from training' if result.skipped else 'trained on'}"
        )

    def _pauses_since_line(self) -> dict[str, float]:
        return {name: seconds for name, seconds in self._pauses.items() if seconds}

    def _times_since_line(self) -> dict[str, Any]:
        """The times that the next line of steps would have (`trainer.contract.files.metrics_times`)."""
        times: dict[str, Any] = self._pauses_since_line()
        if len(self._window):
            times |= {"steps": len(self._window), "step_time_s": self._window.step_time_s}
        return times

    def _write(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        if self._lines is not None:
            self._lines.write(self._line(event, iteration, values))

    def _line(self, event: str, iteration: int, values: dict[str, Any]) -> dict[str, Any]:
        return {"event": event, "iteration": iteration, "time": time.time(), **values}

    def _draw(self, prefix: str, iteration: int, values: dict[str, Any]) -> None:
        numbers = {f"{prefix}/{name}": float(value) for name, value in values.items() if value is not None}
        for board in self._boards:
            board.scalars(iteration, numbers)


class Window:
    """Steps since the last line."""

    def __init__(self, config: TrainerConfig) -> None:
        self.experts = experts.ExpertLoad(config)
        self._columns: tuple[Column, ...] = (Progress(), Throughput(config), self.experts)
        self._steps = 0
        self._seconds = 0.0

    def __len__(self) -> int:
        return self._steps

    def add(self, result: StepResult, seconds: float) -> None:
        """Add a step and its duration."""
        self._steps += 1
        self._seconds += seconds
        for column in self._columns:
            column.add(result, seconds)

    @property
    def step_time_s(self) -> float:
        """Mean duration of these steps (at least one)."""
        return self._seconds / self._steps

    def values(self) -> dict[str, Any]:
        """Values of a line for these steps (at least one)."""
        return {name: value for column in self._columns for name, value in column.values().items()}


def shares(times: Times, steps: int, step_time_s: float) -> dict[str, float]:
    """Breakdown of the mean step time on rank 0. `times` are the totals of `steps` steps."""
    return {
        "compute_s": times.compute_s / steps,
        "communication_s": times.communication_s / steps,
        "update_s": times.update_s / steps,
        "data_wait_s": times.data_wait_s / steps,
        "idle_s": max(0.0, step_time_s - times.accounted_s / steps),
    }


def precision_name(training: TrainingConfig) -> str:
    """Precision of the layers, whose peak is the basis of MFU."""
    return training.precision if training.fp8 is None else f"fp8 {training.fp8} {training.fp8_recipe}"


def peak_memory_gib(device: str) -> float:
    """Peak memory of this rank: torch's allocations on the GPU, or the resident set size of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
