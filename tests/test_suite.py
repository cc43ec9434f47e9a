"""The suite itself: its signals when it runs in the background, and the marker of tests that start processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainer.forked import SHARED

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[1]
PROGRAM = """
import subprocess, sys
import tests.conftest
subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT).__name__)"], check=True)
"""
EXAMPLES = """
import multiprocessing, os, subprocess
import pytest

def test_program():
    subprocess.run(["/bin/true"], check=True)

def test_shell():
    os.system("true")

def test_worker():
    worker = multiprocessing.get_context("spawn").Process(target=print)
    worker.start()
    worker.join()

@pytest.fixture
def started():
    subprocess.run("true", shell=True, check=True)

def test_fixture(started):
    pass

@pytest.mark.process
def test_marked():
    subprocess.run(["/bin/true"], check=True)

@pytest.mark.gpu
def test_on_a_gpu():
    subprocess.run(["/bin/true"], check=True)

def test_none():
    pass
"""

IN_WORKERS = {
    "test_dies.py": """
import os, pathlib

def test_before():
    pass

def test_dies():
    (pathlib.Path(__file__).parent / "died").touch()
    os.kill(os.getpid(), 9)

def test_after():
    pass
""",
    "test_fails.py": """
import os, subprocess, pytest

@pytest.mark.process
def test_fails():
    print("from the test")
    subprocess.run(["echo", "from its program"], check=True)
    subprocess.run(["bash", "-c", "while ((++i < 200000)); do :; done"], check=True)
    assert os.getpid() == -1
""",
    "test_session.py": """
import pathlib, time
import pytest

@pytest.fixture(scope="session")
def cluster():
    yield
    raise RuntimeError("the cluster does not stop")

def test_session(cluster):  # in another fork than the test that dies
    while not (pathlib.Path(__file__).parent / "died").exists():
        time.sleep(0.01)
""",
}


def run_pytest(directory: Path, *options: str) -> str:
    """The output of pytest with the settings of this suite, for the tests in another directory."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", *options]
    environment = {name: value for name, value in os.environ.items() if name != SHARED}
    done = subprocess.run(
        [*command, str(directory)], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout


def test_what_a_test_starts_can_be_interrupted() -> None:
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "default_int_handler\n"


def test_an_unmarked_test_that_starts_a_process_fails(tmp_path: Path) -> None:
    (tmp_path / "test_examples.py").write_text(EXAMPLES)
    output = run_pytest(tmp_path, "-m", "")
    failed = {
        line.partition("::")[2].split(" - ")[0]: line
        for line in output.splitlines()
        if line.startswith("FAILED")
    }
    assert set(failed) == {"test_program", "test_shell", "test_worker", "test_fixture"}, output
    assert "4 failed, 3 passed" in output
    assert "starts a process (/bin/true) without the marker `process`" in output
    assert "starts a process (multiprocessing)" in output
    assert "Add @pytest.mark.process" in output


def test_workers_report_all_that_happens_in_them(tmp_path: Path) -> None:
    for name, text in IN_WORKERS.items():
        (tmp_path / name).write_text(text)
    output = run_pytest(tmp_path, "--workers", "3", "--cpu-times", "files")
    ends = {line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))}
    assert ends == {
        "FAILED test_dies.py::test_dies",
        "FAILED test_dies.py::test_after",
        "FAILED test_fails.py::test_fails",
        "ERROR test_session.py::test_session",
    }, output
    assert "3 failed, 2 passed, 1 error" in output
    assert "from the test\nfrom its program\n" in output
    assert "== -1\nE" in output  # what the assertion compared
    assert "RuntimeError: the cluster does not stop" in output
    assert "-9" in output
    seconds = {Path(file).name: float(used) for used, file in re.findall(r"(?m)^ *(\d+\.\d)  (.*)$", output)}
    assert seconds["test_fails.py"] > seconds["test_session.py"]  # those of its program
    assert seconds["all tests"] >= seconds["test_fails.py"]
