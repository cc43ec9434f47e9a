"""The suite itself: its signals when it runs in the background, and the marker of tests that start processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_what_a_test_starts_can_be_interrupted() -> None:
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "default_int_handler\n"


def test_an_unmarked_test_that_starts_a_process_fails(tmp_path: Path) -> None:
    examples = tmp_path / "test_examples.py"
    examples.write_text(EXAMPLES)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        "pyproject.toml",
        "-m",
        "",
        str(examples),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    failed = {
        line.partition("::")[2].split(" - ")[0]: line
        for line in done.stdout.splitlines()
        if line.startswith("FAILED")
    }
    assert set(failed) == {"test_program", "test_shell", "test_worker", "test_fixture"}, done.stdout
    assert "4 failed, 3 passed" in done.stdout
    assert "starts a process (/bin/true) without the marker `process`" in done.stdout
    assert "starts a process (multiprocessing)" in done.stdout
    assert "Add @pytest.mark.process" in done.stdout
