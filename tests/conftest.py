"""Options of the suite, signals, and the check that each test that starts a process has the marker `process`."""

from __future__ import annotations

import difflib
import gc
import multiprocessing.spawn
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests import cpu_times, workers
from tests.trainer.forked import SHARED

TESTS = Path(__file__).parent

NOT_QUICK = ("process", "slow", "gpu")
"""Markers of the tests that `make quick` leaves out."""

PROCESS_FOLDERS = tuple(f"{TESTS}/{name}/" for name in ("check", "enroot", "install", "lint", "slurm"))
"""Folders in which every test is marked `process`. Reading a script starts shfmt."""

WITH_TRANSFORMERS = (
    "tests/cli/test_conversion.py",
    "tests/examples/test_trl.py",
    "tests/trainer/evaluate/",
    "tests/trainer/huggingface/",
    "tests/trainer/inference/",
    "tests/trainer/test_exchange.py",
)
"""Files and folders of tests that compare with transformers. They run in one worker, since importing it takes long."""

STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))
"""Audit events of the calls that start a process."""

MEMORY = Path("/dev/shm")
ENOUGH_BYTES = 4 * 2**30
"""Free memory for three times the files of all tests."""

# A shell starts `make test &` with SIGINT ignored, and each process that a test starts would inherit that. A signal
# that has a handler here has its default action there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Several workers share the cores, and OpenMP threads that wait for each other spin. torch reads this at its import.
os.environ.setdefault("OMP_NUM_THREADS", "1")

gc.disable()  # until collection ends: collecting among imported modules takes a third of its time

# A slow example on a busy machine is not a failure.
hypothesis.settings.register_profile(
    "suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("suite")

_started: list[str] = []


def _record_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        _started.append(os.fsdecode(arguments[0]) if event == "subprocess.Popen" else event)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Overwrite the golden files with what they would contain now.",
    )
    parser.addoption("--workers", type=int, default=1, help="Number of processes that run tests. Default: 1.")
    parser.addoption("--cpu-times", choices=("files", "tests"), help="Print those with most CPU seconds.")


def _has_room_in_memory() -> bool:
    if not MEMORY.is_dir():
        return False
    found = os.statvfs(MEMORY)  # containers may run no programs from there
    return not found.f_flag & os.ST_NOEXEC and found.f_bavail * found.f_frsize > ENOUGH_BYTES


def pytest_configure(config: pytest.Config) -> None:
    if SHARED not in os.environ:  # the tests of the suite itself inherit it
        os.environ[SHARED] = tempfile.mkdtemp(prefix="python-")  # a socket's path has at most 107 bytes
        Path(os.environ[SHARED], "pid").write_text(str(os.getpid()))
        config.add_cleanup(lambda: shutil.rmtree(os.environ.pop(SHARED)))
        if config.getoption("--cpu-times"):
            cpu_times.enable()
    if _has_room_in_memory():  # where a sync costs nothing; runs and stages sync every file
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
    sys.addaudithook(_record_start)
    start = BaseProcess.start

    def recorded_start(process: BaseProcess) -> None:  # no audit event tells of it
        _started.append("multiprocessing")
        start(process)

    BaseProcess.start = recorded_start


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if str(item.path).startswith(PROCESS_FOLDERS):
            item.add_marker("process")
    # Files without processes are short. At the end, no worker is left with a long file while the others have finished.
    long = {_group(item.nodeid) for item in items if item.get_closest_marker("process")}
    # By size, files of tests/slurm, which mostly wait, alternate with files that mostly compute.
    sizes = Counter[str]()
    for path, group in {item.path: _group(item.nodeid) for item in items}.items():
        sizes[group] += path.stat().st_size
    items.sort(key=lambda item: ((group := _group(item.nodeid)) not in long, -sizes[group], group))


def _group(nodeid: str) -> str:
    """Tests of one worker: a file, or all that compare with transformers."""
    file = nodeid.partition("::")[0]
    return "transformers" if file.startswith(WITH_TRANSFORMERS) else file


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    number = session.config.getoption("--workers")
    if number < 2 or session.config.option.collectonly or not session.items or session.testsfailed:
        return None
    workers.run(session, number, lambda item: _group(item.nodeid))
    return True


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    try:
        return (yield)
    finally:
        gc.freeze()  # what is imported stays, and no later collection needs to visit it
        gc.enable()


@pytest.fixture
def compare_golden(request: pytest.FixtureRequest) -> Callable[[Path, str], None]:
    """Fails with the difference if a golden file is not the text of now. With --update-golden, overwrites it first."""

    def compare(path: Path, now: str) -> None:
        if request.config.getoption("--update-golden"):
            path.write_text(now, encoding="utf-8")
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        if now != before:
            lines = difflib.unified_diff(before.splitlines(), now.splitlines(), str(path), "now", lineterm="")
            pytest.fail("\n".join([*lines, "", "If the change is meant, run: make golden"]), pytrace=False)

    return compare


@pytest.fixture(scope="session")
def stand_in() -> str:
    """A program for `python` in job scripts, which needs no time to import the trainer."""
    from tests.trainer import prepared_python

    return str(prepared_python.start() / "python")


@pytest.fixture
def forks(stand_in: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes forks of the Python programs and the worker processes that the test starts."""
    monkeypatch.setattr(sys, "executable", stand_in)
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(stand_in)
    yield
    multiprocessing.set_executable(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with cpu_times.counted(item.nodeid):
        return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if by := config.getoption("--cpu-times"):
        terminalreporter.section("CPU seconds")
        terminalreporter.write_line(cpu_times.report(by))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup() -> Generator[None]:
    _started.clear()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    result = yield
    if _started and not any(item.get_closest_marker(name) for name in NOT_QUICK):
        programs = ", ".join(sorted(set(_started)))
        pytest.fail(
            f"{item.nodeid} starts a process ({programs}) without the marker `process`. "
            "Add @pytest.mark.process; `make quick` then leaves the test out.",
            pytrace=False,
        )
    return result
