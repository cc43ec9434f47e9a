"""Options of the suite, signals, and the check that each test that starts a process has the marker `process`."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Generator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import hypothesis
import pytest

TESTS = Path(__file__).parent

NOT_QUICK = ("process", "slow", "gpu")
"""Markers of the tests that `make quick` leaves out."""

PROCESS_FOLDERS = tuple(f"{TESTS}/{name}/" for name in ("check", "enroot", "install", "lint", "slurm"))
"""Folders in which every test is marked `process`. Reading a script starts shfmt."""

LONG_FILES = (
    "test_docs.py",
    "slurm/test_site.py",
    "check/test_site.py",
    "slurm/test_submit.py",
    "slurm/test_run.py",
    "install/test_code_dir.py",
    "slurm/test_job.py",
    "trainer/test_checkpoints.py",
    "trainer/test_deepseek.py",
    "trainer/test_rank_memory.py",
    "trainer/test_saving.py",
    "slurm/test_faults.py",
    "trainer/test_resuming.py",
    "trainer/test_pythons.py",
    "slurm/test_train.py",
    "data/test_bounds.py",
    "slurm/test_submitting_shell.py",
    "cli/test_irregular_files.py",
    "slurm/test_share.py",
    "trainer/evaluate/test_stop_strings.py",
    "test_hostile.py",
    "cli/test_templates.py",
    "slurm/test_data.py",
    "enroot/test_build_image.py",
    "trainer/health/test_scripts.py",
    "trainer/inference/test_command.py",
    "slurm/test_preflight.py",
    "trainer/evaluate/test_tasks.py",
    "slurm/test_evaluation.py",
    "trainer/huggingface/test_exporting.py",
    "trainer/test_documents.py",
    "trainer/test_layouts.py",
    "trainer/test_experts.py",
    "cli/test_conversion.py",
    "check/test_rules.py",
    "slurm/test_cluster.py",
    "trainer/test_poison.py",
    "trainer/inference/test_imported.py",
    "slurm/test_generation.py",
    "install/test_extras.py",
    "trainer/huggingface/test_round_trip.py",
    "trainer/huggingface/test_importing.py",
    "trainer/test_one_rank.py",
    "rendering/test_golden.py",
    "enroot/test_health_check.py",
    "trainer/test_failing.py",
    "trainer/test_custom.py",
    "trainer/test_fp16.py",
    "trainer/test_long_context.py",
    "trainer/huggingface/test_deepseek.py",
    "trainer/test_alive.py",
    "test_site.py",
    "trainer/test_exchange.py",
    "trainer/inference/test_generation.py",
    "trainer/test_metrics.py",
    "trainer/test_provenance.py",
    "trainer/test_mtp_documents.py",
    "data/test_tokenize.py",
    "data/test_task.py",
    "data/test_kills.py",
    "data/test_identity.py",
    "cli/test_submit_local.py",
    "trainer/evaluate/test_job.py",
    "lint/test_fuzz.py",
    "lint/test_rules.py",
)
"""Files that run first, so that no worker is left with a long one while the others have finished.

Files of tests/slurm, which mostly wait, alternate with files that mostly compute.
"""

STARTS = frozenset(("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system"))
"""Audit events of the calls that start a process."""

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
        help="Overwrite the golden scripts with what is rendered now.",
    )


def pytest_configure() -> None:
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
    places = {TESTS / name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None]:
    try:
        return (yield)
    finally:
        gc.freeze()  # what is imported stays, and no later collection needs to visit it
        gc.enable()


@pytest.fixture(scope="session")
def stand_in() -> Generator[str]:
    """A program for `python` in job scripts, which needs no time to import the trainer."""
    # Imported here, since it makes each fork server import torch.
    from tests.trainer.stand_in_python import stand_in_python

    with stand_in_python() as program:
        yield str(program)


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
