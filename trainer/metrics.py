"""The run's record: `metrics.jsonl`, TensorBoard, and lines for the person who watches. Written by rank 0.

Each line of metrics.jsonl is one JSON object with an `event`: "start" (one per life of the run, with the FLOP
formula), "step" and "evaluation". Units: losses in nats per token, times in seconds, memory in GiB.
"""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any, TextIO

import torch

from trainer.config import TrainerConfig
from trainer.flops import FORMULA, flops_per_sample
from trainer.logging import Log
from trainer.run_directory import RunDirectory, publish
from trainer.step import StepResult

GIB = 2**30


class Metrics:
    """Records steps and evaluations from `iteration` on, for rank 0, and nothing for the others."""

    def __init__(
        self, config: TrainerConfig, run: RunDirectory, log: Log, iteration: int, is_rank_0: bool
    ) -> None:
        self._config, self._log = config, log
        self._file: TextIO | None = None
        self._board: Any = None
        self._flops = flops_per_sample(config)
        if is_rank_0:
            self._open(run, iteration)
        self._step_times: list[float] = []
        self._samples = 0
        self._last_time = time.perf_counter()

    def _open(self, run: RunDirectory, iteration: int) -> None:
        config = self._config
        drop_after(run.metrics, iteration)
        self._file = run.metrics.open("a", encoding="utf-8")
        if config.logging.tensorboard:
            self._board = _summary_writer(run.tensorboard, iteration, self._log)
        self._write(
            {
                "event": "start",
                "iteration": iteration,
                "name": config.name,
                "world_size": config.world_size,
                "flop_formula": FORMULA,
                "flops_per_sample": self._flops,
                "tokens_per_sample": config.model.seq_length,
                "peak_tflops": config.peak_tflops,
            }
        )

    def step(self, iteration: int, result: StepResult) -> None:
        """Records a step; step_time_s is the mean since the last recorded one."""
        now = time.perf_counter()
        self._step_times.append(now - self._last_time)
        self._samples += result.batch.size
        self._last_time = now
        if iteration % self._config.logging.log_interval and iteration != self._config.training.train_iters:
            return
        seconds = sum(self._step_times)
        tflops = self._flops * self._samples / seconds / self._config.world_size / 1e12
        values = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "step_time_s": seconds / len(self._step_times),
            "tokens_per_s": self._samples * self._config.model.seq_length / seconds,
            "model_tflops_per_device": tflops,
            "peak_memory_gib": peak_memory_gib(self._config.device),
        }
        if self._config.peak_tflops is not None:
            values["mfu"] = tflops / self._config.peak_tflops
        self._step_times, self._samples = [], 0
        self._record("step", iteration, values)
        self._log.step(iteration, values)

    def evaluation(self, iteration: int, split: str, loss: float) -> None:
        """Records the mean loss over the evaluation batches of a split."""
        self._record("evaluation", iteration, {"split": split, "loss": loss})
        self._log.line(f"iteration {iteration}: {split} loss {loss:.4f}")

    def skip_time(self) -> None:
        """Leaves the time since the last step (an evaluation, a save) out of the next step's."""
        self._last_time = time.perf_counter()

    def close(self) -> None:
        """Flushes what is written."""
        for output in (self._file, self._board):
            if output is not None:
                output.close()

    def _record(self, event: str, iteration: int, values: dict[str, Any]) -> None:
        self._write({"event": event, "iteration": iteration, **values})
        if self._board is not None:
            prefix = "train" if event == "step" else values["split"]
            for name, value in values.items():
                if name != "split":
                    self._board.add_scalar(f"{prefix}/{name}", value, iteration)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def drop_after(path: Path, iteration: int) -> None:
    """Drops what this life computes again, and a torn last line.

    That is every later iteration, and the evaluation of this one.
    """
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            entry = json.loads(line)
            is_again = entry["iteration"] == iteration and entry["event"] == "evaluation"
            is_kept = line.endswith("\n") and entry["iteration"] <= iteration and not is_again
        except ValueError:
            is_kept = False
        if is_kept:
            kept.append(line)
    publish(path, "".join(kept))


def peak_memory_gib(device: str) -> float:
    """Peak memory of this rank: what torch allocated on the GPU, or the resident set of the process."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def _summary_writer(directory: Path, iteration: int, log: Log) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        log.line(f"no TensorBoard files: {error}; install tensorboard, or set logging.tensorboard = false")
        return None
    return SummaryWriter(directory, purge_step=iteration + 1)
