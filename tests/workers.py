"""Runs tests in forks of the process that has collected them: `pytest --workers 4`.

To collect and import takes twenty seconds of a core in a fresh checkout, which the forks share. So there may be more
of them than cores, since many tests wait. Each fork takes one group of tests after another.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import pytest

Groups = Sequence[Sequence[pytest.Item]]


def run(session: pytest.Session, number: int, group_of: Callable[[pytest.Item], str]) -> None:
    """Runs the tests of the session in `number` forks, in the order of their groups.

    A group are consecutive tests that run in one fork. If a fork dies, the tests that it has not finished fail.
    """
    groups = [list(group) for _, group in itertools.groupby(session.items, group_of)]
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # before the forks, which share it
    todo = _queue(len(groups))
    unfinished = {item.nodeid: item for item in session.items}
    forks = list[_Fork]()
    statuses = []
    try:
        for _ in range(min(number, len(groups))):
            forks.append(_fork(session.config, groups, todo, forks))
        while forks and not (session.shouldfail or session.shouldstop):
            wait([file for fork in forks for file in (fork.reports, fork.end)])
            for fork in list(forks):
                has_ended = fork.has_ended
                if (report := fork.receive(session.config)) is not None:
                    session.config.hook.pytest_runtest_logreport(report=report)
                    if report.when == "teardown":
                        unfinished.pop(report.nodeid, None)
                elif has_ended:
                    forks.remove(fork)
                    statuses.append(fork.close())
    finally:
        os.close(todo)
        for fork in forks:
            fork.close()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    for item in unfinished.values():
        report = _failure(item, f"A fork that ran this test or one before it has died. Statuses: {statuses}.")
        session.config.hook.pytest_runtest_logreport(report=report)


class _Fork:
    """A process that runs tests, as the one that collected sees it."""

    def __init__(self, process: BaseProcess, reports: Connection) -> None:
        assert process.pid is not None
        self._process = process
        self.reports = reports
        self.end = os.pidfd_open(process.pid)
        """Readable at the end of the process. What it leaves behind may keep `reports` open."""

    @property
    def has_ended(self) -> bool:
        return bool(wait([self.end], 0))

    def receive(self, config: pytest.Config) -> pytest.TestReport | None:
        """The next report, if there is one."""
        try:
            data = self.reports.recv() if self.reports.poll() else None
        except EOFError:
            data = None
        if data is None:
            return None
        report: pytest.TestReport = config.hook.pytest_report_from_serializable(config=config, data=data)
        return report

    def close(self) -> int | None:
        """Waits for the end of the process, which ends when nobody reads its reports. Returns its status."""
        self.reports.close()
        os.close(self.end)
        self._process.join()
        return self._process.exitcode


def _fork(config: pytest.Config, groups: Groups, todo: int, earlier: Sequence[_Fork]) -> _Fork:
    reports, sender = Pipe(duplex=False)
    others = [reports, *(fork.reports for fork in earlier)]
    process = multiprocessing.get_context("fork").Process(
        target=_work, args=(config, groups, todo, sender, others)
    )
    process.start()
    sender.close()
    return _Fork(process, reports)


def _queue(count: int) -> int:
    """A file descriptor from which each fork reads the next number below `count`, until the file ends."""
    reader, writer = os.pipe()
    os.write(writer, b"".join(number.to_bytes(2, sys.byteorder) for number in range(count)))
    os.close(writer)
    return reader


def _failure(item: pytest.Item, reason: str, when: Literal["call", "teardown"] = "call") -> pytest.TestReport:
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, when)


def _work(
    config: pytest.Config, groups: Groups, todo: int, sender: Connection, others: Sequence[Connection]
) -> None:
    """Runs groups in this process, a fork, until none is left."""
    for other in others:
        other.close()
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(_Sender(config, sender))
    _capture_apart(config)
    item, session = groups[0][0], groups[0][0].session
    try:
        try:
            while number := os.read(todo, 2):
                group = groups[int.from_bytes(number, sys.byteorder)]
                for item, following in zip(group, [*group[1:], session], strict=True):
                    # After the session "follows", only fixtures of the session are left.
                    config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        finally:
            session._setupstate.teardown_exact(None)
    except (BrokenPipeError, KeyboardInterrupt):  # nobody wants to know more
        sys.exit(1)
    except Exception:  # of a fixture of the session, or a fault of pytest's
        report = _failure(item, traceback.format_exc(), "teardown")
        config.hook.pytest_runtest_logreport(report=report)
    finally:
        threading._shutdown()  # type: ignore[attr-defined]  # first executors end, for whose processes a fork waits


class _Sender:
    """Sends reports to the process that collected."""

    def __init__(self, config: pytest.Config, sender: Connection) -> None:
        self._config = config
        self._sender = sender

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        to_serializable = self._config.hook.pytest_report_to_serializable
        self._sender.send(to_serializable(config=self._config, report=report))


def _capture_apart(config: pytest.Config) -> None:
    """Captures output in files of this fork. The forks share the position in those of the process that collected."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    if capture.is_globally_capturing():
        capture.read_global_capture()
        capture.stop_global_capturing()
        capture.start_global_capturing()
        capture.suspend_global_capture()
