"""Measures the start of this process until its first `start` line: imports, rendezvous, checkpoint, model, data."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from trainer.faults.watch import Phase, Watch


class StartUp:
    """The phases before the first step. Created when the imports are done."""

    def __init__(self) -> None:
        self._imported = time.time()
        self._age_s = _age_s()
        self._met = self._imported

    def met(self) -> None:
        """The ranks have met, and the watch begins."""
        self._met = time.time()

    def record(self, watch: Watch) -> dict[str, Any]:
        """Values of the `start` line: when the process began, and the seconds of each phase since then."""
        phases = {"imports": self._age_s, "rendezvous": self._met - self._imported}
        phases |= {
            phase.value: watch.spent_s(phase) for phase in (Phase.START, Phase.LOAD, Phase.BUILD, Phase.DATA)
        }
        return {
            "process_began": self._imported - self._age_s,
            "phases_s": {name: round(seconds, 6) for name, seconds in phases.items()},
        }


def _age_s() -> float:
    """Seconds since this process began; 0 if the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        began_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc_pid_stat(5), since the boot
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began_s)
    except (OSError, ValueError, IndexError):
        return 0.0
