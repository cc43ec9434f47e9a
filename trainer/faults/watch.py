"""Ends a rank where nothing moves any more, and leaves what tells why.

A collective that one rank does not enter keeps all the others waiting, without an error. So the loop says where it is
(`Watch.beat`), and when it has not for too long, a thread writes the stacks of this rank into the run directory, lets
the other ranks do the same, names those that did not, and ends the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from trainer.contract.config import TrainingConfig
from trainer.contract.errors import Exit
from trainer.contract.run_directory import RunDirectory
from trainer.distributed.groups import limit_waits
from trainer.distributed.peers import Peers, within
from trainer.distributed.rendezvous import Ranks
from trainer.faults import hang
from trainer.faults.stopping import leave

REPORT_S = 10.0
"""A file system that takes longer for a report does not get one."""

OTHERS_S = 3.0
"""How long the other ranks have for theirs."""

END_S = 30.0
"""How long all of that may take: a pipe or a driver may hold up anything."""

HURRIED_S = 60.0
"""The timeout, at least, while every rank is to save and leave."""

SLOWEST_STEPS = 3
"""The same in the longest steps so far, for those that take longer."""


@dataclass(frozen=True)
class Beat:
    """A sign of life of the loop."""

    phase: str
    """start, data, load, train, evaluate, save or end."""
    iteration: int
    """Steps done."""
    time: float
    """Unix seconds."""
    clock: float
    """The same by the clock that nobody sets."""


class Watch:
    """Knows where this rank is. As a context, ends the process when it has been there for too long."""

    def __init__(self, run: RunDirectory, ranks: Ranks, peers: Peers, training: TrainingConfig) -> None:
        """The timeout is distributed_timeout_minutes, and distributed_timeout_seconds_after_init from a step on."""
        self._run, self._ranks, self._peers = run, ranks, peers
        self._timeout_s = 60.0 * training.distributed_timeout_minutes
        self._later_timeout_s = float(training.distributed_timeout_seconds_after_init)
        self.has_stepped = False
        """Whether this life has done a step."""
        self._slowest_s = 0.0
        self._is_hurried = False
        self._is_alarmed = self._asks = False
        self.last = Beat("start", 0, time.time(), time.monotonic())
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def beat(self, phase: str, iteration: int | None = None) -> None:
        """The rank is in this phase now, and moves; costs nothing."""
        iteration = self.last.iteration if iteration is None else iteration
        self.last = Beat(phase, iteration, time.time(), time.monotonic())

    def stepped(self, iteration: int) -> None:
        """A step is done; after the first, the shorter timeout holds for the process groups too."""
        if self.has_stepped and self.last.phase == "train":
            self._slowest_s = max(self._slowest_s, time.monotonic() - self.last.clock)
        self.beat("train", iteration)
        if not self.has_stepped:
            self.has_stepped = True
            self._timeout_s = self._later_timeout_s
            limit_waits(self._later_timeout_s)

    def hurry(self) -> None:
        """Every rank was told to save and leave: one that dies on the way is not waited for as long as usual.

        A rank whose time is up then leaves with the status of SIGTERM.
        """
        self._is_hurried = True

    def __str__(self) -> str:
        return f"after iteration {self.last.iteration} ({self.last.phase})"

    def _look(self) -> None:
        while True:
            timeout_s, quiet_s = self._timeout_s, time.monotonic() - self.last.clock
            if self._is_hurried and self.last.phase != "end":  # it is saved
                timeout_s = min(timeout_s, max(HURRIED_S, SLOWEST_STEPS * self._slowest_s))
            # Beyond this thread: C code that never gives the interpreter back stops it, and faulthandler needs none.
            faulthandler.dump_traceback_later(timeout_s + REPORT_S + OTHERS_S, exit=True, file=2)
            if quiet_s > timeout_s or (self._is_alarmed and quiet_s > timeout_s / 2):
                self._end(quiet_s)
            if quiet_s > timeout_s / 2 and not self._asks:
                self._asks = True
                threading.Thread(target=self._ask_for_alarm, daemon=True).start()
            if self._closed.wait(min(1.0, timeout_s / 10)):
                return

    def _ask_for_alarm(self) -> None:
        """Asks whether another rank has waited for all of its timeout, for which half of this one's is reason enough.

        In a thread of its own: where rank 0 does not answer, a question takes longer than between two looks.
        """
        self._is_alarmed = self._peers.is_alarmed()
        self._asks = False

    def _end(self, quiet_s: float) -> None:
        faulthandler.dump_traceback_later(END_S, exit=True, file=2)
        # Beside the report: the store of rank 0 may not answer.
        hosts: dict[int, str] = {}
        threading.Thread(target=self._tell_and_ask, args=(hosts,), daemon=True).start()
        report = hang.Report.of_this_rank(
            self._ranks, self.last.iteration, self.last.phase, self.last.time, quiet_s
        )
        with contextlib.suppress(TimeoutError):
            within(REPORT_S, lambda: hang.write(self._run, report))
        time.sleep(OTHERS_S)
        leave(Exit.TERMINATED if self._is_hurried else Exit.HUNG, self._verdict(report, hosts))

    def _tell_and_ask(self, hosts: dict[int, str]) -> None:
        """Tells the other ranks, and puts into `hosts` where they run."""
        self._peers.raise_alarm()
        hosts |= self._peers.hosts()

    def _verdict(self, own: hang.Report, hosts: Mapping[int, str]) -> str | None:
        """The line for the log, from the first rank that reported; None from the others."""
        try:
            reports = within(REPORT_S, lambda: hang.read(self._run))
        except TimeoutError:
            reports = {}
        reports.setdefault(
            own.rank, dataclasses.replace(own, at=f"{own.at} ({self._run.stacks} cannot be written)")
        )
        if own.rank != min(reports):
            return None
        return hang.verdict(reports, self._ranks.world_size, dict(hosts), self._run.stacks)
