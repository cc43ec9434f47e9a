"""A rank of benchmarks.in_turns: the trainer, which runs blocks of a bare Megatron-Core loop between its steps.

    python -m benchmarks.in_turns_loop CONFIG.json STEPS ROUNDS RESULT.json

Ranks and rendezvous address are in the environment. Rank 0 writes the seconds per step of each block to RESULT.json.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.contract import config as configuration
from trainer.distributed import device

TRAINER, BARE, NEVER_WAITS = "trainer", "bare", "bare_never_waits"


def main() -> None:
    """Run the trainer, with blocks of the bare loop between its steps."""
    file, steps, rounds, result = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4])
    config = configuration.read(file)
    device.prepare(config.device)
    from trainer import loop, train  # they import megatron.core, so they must come after `device.prepare`

    turns = Turns(json.loads(file.read_text()), steps, rounds, result)
    train_step = loop.train_step

    def in_turns(*arguments: Any) -> Any:
        turns.before_step()
        return train_step(*arguments)

    loop.train_step = in_turns
    gc.freeze()
    train.train(config)


class Turns:
    """Counts the steps of the trainer, and runs the other blocks between two of them."""

    def __init__(self, config: dict[str, Any], steps: int, rounds: int, result: Path) -> None:
        self._config, self._steps, self._rounds, self._result = config, steps, rounds, result
        self._left = steps
        self._seconds: dict[str, list[float]] = {TRAINER: [], BARE: [], NEVER_WAITS: []}
        self._bare: Callable[[], None] | None = None
        self._start = 0.0

    def before_step(self) -> None:
        """End the trainer's block if it is complete, and run the others. Ends the process after the last round."""
        if self._bare is None:
            from benchmarks import bare_loop

            self._bare = bare_loop.step_function(self._config)
            self._begin()
        if not self._left:
            self._end(TRAINER)
            self._run_bare(BARE, waits=True)
            self._run_bare(NEVER_WAITS, waits=False)
            if len(self._seconds[TRAINER]) > self._rounds:
                self._leave()
            self._left = self._steps
            self._begin()
        self._left -= 1

    def _run_bare(self, name: str, *, waits: bool) -> None:
        assert self._bare is not None
        gc.disable()
        self._begin()
        for _ in range(self._steps):
            self._bare()
            if waits:
                torch.cuda.synchronize()
        self._end(name)
        gc.enable()

    def _begin(self) -> None:
        torch.cuda.synchronize()
        torch.distributed.barrier()
        torch.cuda.synchronize()
        self._start = time.perf_counter()

    def _end(self, name: str) -> None:
        torch.cuda.synchronize()
        self._seconds[name].append((time.perf_counter() - self._start) / self._steps)

    def _leave(self) -> None:
        """Write the times of all rounds but the first, and end. A normal end would save a checkpoint."""
        if torch.distributed.get_rank() == 0:
            times = {name: seconds[1:] for name, seconds in self._seconds.items()}
            self._result.write_text(json.dumps(times))
        torch.distributed.barrier()
        os._exit(0)


if __name__ == "__main__":
    main()
