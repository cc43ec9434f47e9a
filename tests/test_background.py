"""The suite as a background job of a shell, which starts it with SIGINT ignored."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys
import tests.conftest
subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT).__name__)"], check=True)
"""


def test_what_a_test_starts_can_be_interrupted() -> None:
    command = ["bash", "-c", 'trap "" INT; exec "$0" -c "$1"', sys.executable, PROGRAM]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    assert done.stdout == "default_int_handler\n"
