"""From `hpcgen init --program` to a program that ran on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcgen.runs.attempts import read_attempts
from tests.patience import PATIENCE_S, wait_until

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("forks")]

TRAIN = """\
import os, sys
import sibling
assert "PYTHONSAFEPATH" not in os.environ
print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} with {sys.argv[1:]}")
if "fail" in sys.argv:
    sys.exit(3)
"""


def hpcgen(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "XDG_CONFIG_HOME": str(directory)}
    command = [sys.executable, "-m", "hpcgen", *arguments]
    return subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with a program of two files, and its run file as `init` writes it."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "sibling.py").write_text("")
    done = hpcgen(tmp_path, "init", "mine.yaml", "--program", "--cluster", "local")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "mine.yaml").read_text()
    assert "\nmodel:" not in text
    assert "# model" not in text
    (tmp_path / "mine.yaml").write_text(text.replace("[python,", f'["{sys.executable}",'))
    return tmp_path


def test_a_new_run_file_is_valid_and_its_program_runs_on_every_rank(project: Path) -> None:
    checked = hpcgen(project, "validate", "-c", "mine.yaml")
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "run              1 node x 1 task" in checked.stdout
    assert "progress         not set: any three failed attempts in a row end the job\n" in checked.stdout
    two = "slurm.run.ntasks_per_node=2"
    done = hpcgen(project, "submit", "run", "-c", "mine.yaml", "--launcher", "local", "--set", two)
    assert done.returncode == 0, done.stderr
    logs = [path.read_text() for path in (project / "runs/mine/submitit").glob("*_log.out")]
    assert all(any(f"rank {rank} of 2 with []" in log for log in logs) for rank in (0, 1))


def test_a_program_that_fails_on_this_machine_shows_its_output(project: Path) -> None:
    command = f"program.command=[{sys.executable}, train.py, fail]"
    done = hpcgen(project, "submit", "run", "-c", "mine.yaml", "--launcher=local", "--set", command)
    assert done.returncode == 1
    assert "rank 0 of 1 with ['fail']" in done.stderr
    assert "stage run failed (task 0)" in done.stderr


def test_a_program_that_fails_without_output_shows_its_status(project: Path) -> None:
    run = (
        "submit",
        "run",
        "-c",
        "mine.yaml",
        "--launcher=local",
        "--set",
        "program.command=[sh, -c, exit 3]",
    )
    lines = hpcgen(project, *run).stderr.splitlines()
    assert lines[-2] == "RuntimeError: the program ended with status 3"
    assert lines[-1].startswith("stage run failed (task 0); its log is ")
    assert not any("Traceback" in line for line in lines)


def test_init_refuses_a_program_with_a_model(tmp_path: Path) -> None:
    done = hpcgen(tmp_path, "init", "--program", "--preset", "125m")
    assert done.returncode == 2
    assert "--program excludes --preset" in done.stderr
    assert list(tmp_path.iterdir()) == []


STOPS = """\
import os, signal, sys, time
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
open("ready", "w").close()
while not asked and not os.path.exists("please"):
    time.sleep(0.05)
"""


@pytest.mark.parametrize("how", ["signal=USR1", "file=please"])
def test_a_program_on_this_machine_is_asked_to_stop(project: Path, how: str) -> None:
    """From another terminal, twice. A shell starts what runs in its background without SIGINT."""
    (project / "train.py").write_text(STOPS)
    (project / "please").touch()  # of an earlier attempt
    submit = ("submit", "run", "-c", "mine.yaml", "--launcher=local", "--set", f"program.stop.{how}")
    environment = {**os.environ, "XDG_CONFIG_HOME": str(project)}
    command = [sys.executable, "-m", "hpcgen", *submit]
    if how.startswith("signal"):
        (project / "please").unlink()
    with subprocess.Popen(
        command,
        cwd=project,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    ) as launcher:
        try:
            wait_until(lambda: launcher.poll() is not None or (project / "ready").exists())
            assert hpcgen(project, "stop", "runs/mine", "--no-wait").returncode == 0
            stopped = hpcgen(project, "stop", "runs/mine")
            said = launcher.communicate(timeout=PATIENCE_S)[1]
        finally:
            launcher.terminate()
    assert (launcher.returncode, stopped.returncode) == (130, 0), (said, stopped)
    [attempt] = read_attempts(project / "runs/mine")
    assert attempt.verdict == "stopped", attempt
    assert "because hpcgen stop asked" in attempt.reason
