"""Training on this machine as it ends early: what the command says, and whose progress it shows."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcgen.runs.attempts import read_attempts
from tests.patience import PATIENCE_S, wait_until
from tests.runs import SHAPE, minimal_run, write_yaml

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed"),
]

SUBMIT = [sys.executable, "-m", "hpcgen", "submit", "train", "--launcher", "local", "-c"]


@pytest.fixture
def run_file(workplace: Path, stand_in: str) -> Path:
    """More steps than a test waits for."""
    training = {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 20_000, "precision": "fp32"}
    values = minimal_run(
        paths={"run_dir": "run"},
        model={**SHAPE, "vocab_size": 1000},
        training=training,
        data={"mock": True, "num_workers": 0},
        cluster="./cluster.yaml",
    )
    (workplace / "cluster.yaml").write_text(f"extends: local\npython: {stand_in}\n")
    return write_yaml(workplace / "run.yaml", values)


@contextlib.contextmanager
def training(run_file: Path) -> Iterator[subprocess.Popen[str]]:
    """`hpcgen submit train --launcher local`, at its first step or later."""
    with subprocess.Popen(
        [*SUBMIT, run_file], stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            metrics = run_file.parent / "run/metrics.jsonl"
            wait_until(
                lambda: process.poll() is not None or (metrics.exists() and b'"step"' in metrics.read_bytes())
            )
            assert process.poll() is None, process.communicate()
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


def stopped_line(run_file: Path) -> str:
    iteration = (run_file.parent / "run/STOPPED").read_text().strip()
    return f"saved and stopped at iteration {iteration}; the same command resumes from there"


@pytest.mark.slow  # the other shows the line; 20 s for a second command
def test_sigterm_says_where_it_stopped_and_another_command_shows_no_progress_of_it(run_file: Path) -> None:
    with training(run_file) as process:
        second = subprocess.run(
            [*SUBMIT, run_file], capture_output=True, text=True, check=False, timeout=PATIENCE_S
        )
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert (process.returncode, said.splitlines()[-1]) == (143, stopped_line(run_file))
    assert said.count("stopped at iteration") == 1
    assert second.returncode == 1
    assert "another process is training in" in second.stderr
    assert "step" not in second.stderr.split("another process")[0]


def attempt_of(run_file: Path) -> tuple[str, str, str | None, str]:
    """Job, stage, verdict and reason of the only attempt."""
    [attempt] = read_attempts(run_file.parent / "run")
    return attempt.job.partition("-")[0], attempt.stage, attempt.verdict, attempt.reason


def test_ctrl_c_says_so_in_the_same_line_and_no_other(run_file: Path) -> None:
    with training(run_file) as process:
        assert attempt_of(run_file) == ("local", "train", None, "")
        os.killpg(process.pid, signal.SIGINT)  # a terminal's goes to all
        said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 130
    assert said.splitlines()[-2:] == [
        "requested a checkpoint; interrupt again to end at once",
        stopped_line(run_file),
    ]
    assert attempt_of(run_file) == ("local", "train", "stopped", "interrupted; it saved and stopped")


def test_it_says_how_to_evaluate_the_checkpoints(run_file: Path, stand_in: str) -> None:
    """Without Slurm, there is no queue for evaluation.every."""
    sets = ("training.train_iters=2", "checkpoint.save_interval=2", "evaluation={every: 2, tasks: [piqa]}")
    options = [option for each in sets for option in ("--set", each)]
    done = subprocess.run(
        [stand_in, *SUBMIT[1:], run_file, *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    assert attempt_of(run_file) == ("local", "train", "done", "")
    again = shlex.join(["-c", str(run_file), *options])
    assert done.stderr.splitlines()[-1] == (
        f"no evaluate job was queued; run hpcgen submit evaluate --launcher local {again}"
    )
