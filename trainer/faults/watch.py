"""Ends a rank that no longer makes progress, and writes reports that help to find the cause.

If one rank does not enter a collective, all others wait in it without an error. So the loop reports its progress
(`Watch.beat`). If it has not done so for too long, a thread writes the stacks of this rank to the run directory, has
the other ranks do the same, names those that did not, and ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import faulthandler
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from trainer.contract.config import TrainingConfig
from trainer.contract.errors import Exit
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.hang_report import HangReport, describe_hang, read_reports
from trainer.distributed.groups import set_group_timeouts
from trainer.distributed.peers import Peers, call_with_timeout
from trainer.distributed.rendezvous import Ranks
from trainer.faults import flight_records, hang
from trainer.faults.stopping import leave

REPORT_S = 10.0
"""Timeout for writing or reading reports (seconds)."""

OTHERS_S = 3.0
"""Time for the other ranks to write their reports (seconds)."""

END_S = 30.0
"""Timeout for the reports and the exit together, since a pipe or a driver may block any step (seconds)."""

SHORT_TIMEOUT_S = 60.0
"""Minimum timeout while all ranks save and leave (seconds)."""

SLOWEST_STEPS = 3
"""Minimum timeout while all ranks save and leave, as a multiple of the longest step so far."""


class Phase(enum.Enum):
    """Phase of an attempt. The values appear in the heartbeat and in hang reports."""

    START = "start"
    """Looking for a checkpoint."""
    BUILD = "build"
    """Building the model and its optimizer."""
    LOAD = "load"
    DATA = "data"
    """Opening the datasets."""
    TRAIN = "train"
    EVALUATE = "evaluate"
    SAVE = "save"
    END = "end"
    """Everything is saved; only cleanup is left."""


@dataclass(frozen=True)
class Beat:
    """A report of progress from the loop."""

    phase: Phase
    iteration: int
    """Number of completed steps."""
    time: float
    """Unix time (seconds)."""
    clock: float
    """Monotonic clock at `time` (seconds)."""


class Watch:
    """Tracks the progress of this rank. As a context manager, ends the process after a timeout without progress."""

    def __init__(self, run: RunDirectory, ranks: Ranks, peers: Peers, training: TrainingConfig) -> None:
        """The timeout is distributed_timeout_minutes, and distributed_timeout_seconds_after_init after one step."""
        self._run, self._ranks, self._peers = run, ranks, peers
        self._timeout_s = 60.0 * training.distributed_timeout_minutes
        self._later_timeout_s = float(training.distributed_timeout_seconds_after_init)
        self.has_stepped = False
        """True if this attempt has completed a step."""
        self._slowest_s = 0.0
        self._has_short_timeout = False
        self._is_alarmed = self._is_asking = False
        self.last = Beat(Phase.START, 0, time.time(), time.monotonic())
        self._spent_s = dict.fromkeys(Phase, 0.0)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._monitor, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, phase: Phase, iteration: int | None = None) -> None:
        """Report progress in a phase. Costs nothing."""
        iteration = self.last.iteration if iteration is None else iteration
        previous, self.last = self.last, Beat(phase, iteration, time.time(), time.monotonic())
        self._spent_s[previous.phase] += self.last.clock - previous.clock

    def spent_s(self, phase: Phase) -> float:
        """Seconds spent in a phase until now."""
        since = time.monotonic() - self.last.clock if phase is self.last.phase else 0.0
        return self._spent_s[phase] + since

    def stepped(self, iteration: int) -> None:
        """Report a completed step. From the first step on, the shorter timeout applies, also to process groups."""
        if self.has_stepped and self.last.phase is Phase.TRAIN:
            self._slowest_s = max(self._slowest_s, time.monotonic() - self.last.clock)
        self.beat(Phase.TRAIN, iteration)
        if not self.has_stepped:
            self.has_stepped = True
            self._timeout_s = self._later_timeout_s
            set_group_timeouts(self._later_timeout_s)

    def shorten_timeout(self) -> None:
        """Use a shorter timeout, since all ranks were told to save and leave and one may die meanwhile.

        A rank that reaches this timeout leaves with the status of SIGTERM.
        """
        self._has_short_timeout = True

    def __str__(self) -> str:
        return f"after iteration {self.last.iteration} ({self.last.phase.value})"

    def _monitor(self) -> None:
        while True:
            timeout_s, quiet_s = self._timeout_s, time.monotonic() - self.last.clock
            if self._has_short_timeout and self.last.phase is not Phase.END:  # at END everything is saved
                timeout_s = min(timeout_s, max(SHORT_TIMEOUT_S, SLOWEST_STEPS * self._slowest_s))
            # A fallback for C code that never releases the GIL and so blocks this thread: faulthandler needs no GIL.
            faulthandler.dump_traceback_later(timeout_s + REPORT_S + OTHERS_S, exit=True, file=2)
            if quiet_s > timeout_s or (self._is_alarmed and quiet_s > timeout_s / 2):
                self._end(quiet_s)
            if quiet_s > timeout_s / 2 and not self._is_asking:
                self._is_asking = True
                threading.Thread(target=self._ask_for_alarm, daemon=True).start()
            if self._closed.wait(min(1.0, timeout_s / 10)):
                return

    def _ask_for_alarm(self) -> None:
        """Ask the store whether another rank has reached its timeout. Then half the timeout is enough for this rank.

        Runs in a separate thread, since rank 0 may take long to answer.
        """
        self._is_alarmed = self._peers.is_alarmed()
        self._is_asking = False

    def _end(self, quiet_s: float) -> None:
        faulthandler.dump_traceback_later(END_S, exit=True, file=2)
        # In parallel with the report, since the store of rank 0 may not answer.
        hosts: dict[int, str] = {}
        threading.Thread(target=self._alarm_and_fetch_hosts, args=(hosts,), daemon=True).start()
        report = hang.report_of_this_rank(
            self._ranks, self.last.iteration, self.last.phase.value, self.last.time, quiet_s
        )
        with contextlib.suppress(TimeoutError):
            call_with_timeout(REPORT_S, lambda: self._write(report))
        time.sleep(OTHERS_S)
        leave(Exit.TERMINATED if self._has_short_timeout else Exit.HUNG, self._verdict(report, hosts))

    def _write(self, report: HangReport) -> None:
        hang.write(self._run, report)
        flight_records.write(self._run, report.rank)

    def _alarm_and_fetch_hosts(self, hosts: dict[int, str]) -> None:
        """Alert the other ranks, and add their hosts to `hosts`."""
        self._peers.raise_alarm()
        hosts |= self._peers.hosts()

    def _verdict(self, own: HangReport, hosts: Mapping[int, str]) -> str | None:
        """On the lowest rank that reported, the line for the log. None on other ranks."""
        try:
            reports = call_with_timeout(REPORT_S, lambda: read_reports(self._run.stacks))
        except TimeoutError:
            reports = {}
        reports.setdefault(
            own.rank, dataclasses.replace(own, at=f"{own.at} ({self._run.stacks} cannot be written)")
        )
        if own.rank != min(reports):
            return None
        where = describe_hang(reports, self._ranks.world_size, dict(hosts))
        return f"hung: {where}. Stacks and flight records are in {self._run.stacks}"
