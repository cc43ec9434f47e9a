"""CPU seconds of files or tests, with those of the processes that they start: `pytest --cpu-times files`.

Durations say little when several workers share the cores. Daemons that outlive their test, such as Slurm's, do not
count.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tests.trainer.forked import SHARED

TEST = "CPU_TIMES_TEST"
"""Variable with the node ID of the current test, which the programs that it starts inherit."""

SHOWN = 40
"""Maximum number of rows in the report."""


def enable() -> None:
    """Lets all processes of this run of the tests report their CPU times."""
    _file().touch()


@contextlib.contextmanager
def counted(test: str) -> Iterator[None]:
    """Adds the CPU seconds of the block to those of a test, which is named by its node ID, if this run counts them."""
    os.environ[TEST] = test
    before = _cpu_s()
    yield
    if _file().exists():
        with _file().open("a") as file:
            file.write(f"{_cpu_s() - before:.3f}\t{test}\n")


def report(by: Literal["files", "tests"]) -> str:
    """The sum, and the files or tests with most CPU seconds."""
    seconds = defaultdict[str, float](float)
    for line in _file().read_text().splitlines():
        used, _, test = line.partition("\t")
        seconds[test if by == "tests" else test.partition("::")[0]] += float(used)
    most = sorted(seconds.items(), key=lambda row: -row[1])[:SHOWN]
    rows = (("all tests", sum(seconds.values())), *most)
    return "\n".join(f"{used:7.1f}  {name}" for name, used in rows)


def _cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _file() -> Path:
    return Path(os.environ[SHARED], "cpu-times")
