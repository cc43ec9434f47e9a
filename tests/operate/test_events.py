"""The local launcher records the start and the end of a job, as batch scripts do."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from hpcgen.errors import JobFailed, JobStopped
from hpcgen.runs.attempts import JobAttempt, read_job
from hpcgen.slurm.events import recorded

SECRET = "hf_" + "a" * 34


def attempt_after(directory: Path, error: BaseException | None) -> JobAttempt:
    """The attempt that is recorded if a job ends with this error, which is not swallowed."""
    is_raised = pytest.raises(type(error)) if error else contextlib.nullcontext()
    with is_raised, recorded(directory, "local-1", "export"):
        [running] = read_job(directory)
        assert running.ended is None
        if error is not None:
            raise error
    [attempt] = read_job(directory)
    return attempt


@pytest.mark.parametrize(
    ("error", "verdict", "status", "reason"),
    [
        (None, "done", 0, ""),
        (
            JobFailed("line of its log\nstage export failed; its log is x.log"),
            "failed",
            1,
            "stage export failed; its log is x.log",
        ),
        (JobStopped(), "stopped", 143, "interrupted; it saved and stopped"),
        (KeyboardInterrupt(), "terminated", 130, "interrupted"),
        (SystemExit(143), "terminated", 130, "interrupted"),
        (ValueError(f"HF_TOKEN={SECRET}"), "failed", 1, "ValueError: HF_TOKEN=[redacted]"),
    ],
)
def test_each_end_is_recorded(
    tmp_path: Path, error: BaseException | None, verdict: str, status: int, reason: str
) -> None:
    attempt = attempt_after(tmp_path, error)
    assert (attempt.job, attempt.stage, attempt.restart) == ("local-1", "export", 0)
    assert (attempt.verdict, attempt.status, attempt.reason) == (verdict, status, reason)
    assert attempt.cause == ("canceled" if verdict == "terminated" else "")
    assert attempt.events[0]["pid"] == str(os.getpid())


def test_a_full_disk_does_not_end_the_job(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to("/dev/full")  # and a link is not followed
    with recorded(tmp_path, "local-1", "export"):
        pass
    assert read_job(tmp_path) == ()
