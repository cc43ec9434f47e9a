"""Traces of selected steps and ranks by torch's profiler, and snapshots of GPU memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

from trainer.contract.config import LoggingConfig, TrainerConfig
from trainer.contract.files.run_directory import RunDirectory

DEFAULT_STEPS = 2

MAX_ALLOCATIONS = 1_000_000
"""Maximum number of allocations and frees in the memory history, each with its stack. Older ones are dropped."""


class Profiler:
    """Records a range of iterations on this rank. Costs nothing outside the range."""

    def __init__(self, config: TrainerConfig, run: RunDirectory, rank: int) -> None:
        """Raises ConfigError if the range is empty, or if a memory history is requested without a range."""
        logging = config.logging
        self._start, self._end = _range(logging)
        self._is_chosen = self._start < self._end and rank in logging.profile_ranks
        self._records_memory = logging.record_memory_history and config.device == "cuda"
        self._device, self._directory, self._rank = config.device, run.profile, rank
        self._trace: torch.profiler.profile | None = None
        self._first = 0

    def before(self, iteration: int) -> bool:
        """Start or end the recording if it is due before `iteration`. Returns whether that took time."""
        if not self._is_chosen:
            return False
        if self._trace is None and self._start <= iteration < self._end:
            self._first = iteration
            self._begin()
            return True
        if self._trace is not None and iteration >= self._end:
            self.close(iteration)
            return True
        return False

    def close(self, iteration: int) -> None:
        """End a running recording before `iteration`, and write its files."""
        if self._trace is None:
            return
        trace, self._trace = self._trace, None
        trace.stop()
        name = f"iterations-{self._first}-{iteration - 1}-rank-{self._rank}"
        files = []
        try:
            self._directory.mkdir(exist_ok=True)
            files.append(self._export(trace, name))
            if self._records_memory:
                files.append(self._dump_memory(name))
        except (OSError, RuntimeError) as error:  # not fatal, for example a full disk
            print(f"rank {self._rank}: the profile could not be written: {error}", flush=True)
        finally:
            if self._records_memory:
                torch.cuda.memory._record_memory_history(enabled=None)
        for file in files:
            print(f"rank {self._rank}: profile written to {file}", flush=True)

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        # Otherwise CUDA's tracing library stays loaded, and each later kernel launch takes 8 us instead of 6.
        os.environ.setdefault("TEARDOWN_CUPTI", "1")
        if self._records_memory:
            torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS, stacks="python")
        self._trace = torch.profiler.profile(activities=activities)
        self._trace.start()

    def _export(self, trace: torch.profiler.profile, name: str) -> Path:
        """Export compressed Chrome traces, for ui.perfetto.dev."""
        return self._publish(f"{name}.json.gz", trace.export_chrome_trace)  # torch compresses .gz files

    def _dump_memory(self, name: str) -> Path:
        """Dump a memory snapshot for pytorch.org/memory_viz."""
        return self._publish(f"{name}.memory.pickle", torch.cuda.memory._dump_snapshot)

    def _publish(self, name: str, write: Callable[[str], object]) -> Path:
        """Have torch write a file in a private directory, safe from links of other users, and move it into place."""
        with tempfile.TemporaryDirectory(prefix=".", dir=self._directory) as private:
            write(f"{private}/{name}")
            return Path(private, name).replace(self._directory / name)


def _range(logging: LoggingConfig) -> tuple[int, int]:
    """The iterations to record, [start, end)."""
    start, end = logging.profile_step_start, logging.profile_step_end
    if start is None:
        return 0, 0
    return start, start + DEFAULT_STEPS if end is None else end
