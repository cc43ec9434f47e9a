"""Events of jobs on this machine, as templates/lib/events.sh records those of Slurm's jobs."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from hpcgen.errors import JobFailed, JobStopped
from hpcgen.redaction import redact
from hpcgen.slurm.job_files import EVENTS
from trainer.contract.files.run_directory import open_nofollow


@contextlib.contextmanager
def recorded(directory: Path, job: str, stage: str, asks: str = "yes") -> Iterator[None]:
    """Records the start of a job in its directory, and its end when the block ends.

    `asks` is empty if the job cannot be asked to save and stop.

    An event that cannot be written is left out: the job matters more.
    """
    host = socket.gethostname()
    _record(
        directory, job, stage, "start", nodes=host, cluster="", host=host, pid=str(os.getpid()), asks=asks
    )
    verdict, status, reason, cause = "failed", 1, "", {}
    try:
        yield
        verdict, status = "done", 0
    except JobStopped as stop:
        verdict, status, reason = "stopped", 143, str(stop) or "interrupted; it saved and stopped"
        raise
    except JobFailed as error:
        reason = str(error).splitlines()[-1]
        raise
    except (KeyboardInterrupt, SystemExit):
        verdict, status, reason = "terminated", 130, "interrupted"
        cause = {"cause": "canceled"}
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        end = {"verdict": verdict, "status": str(status), "reason": redact(reason), **cause}
        _record(directory, job, stage, "end", **end)


def record_launch(directory: Path, job: str, stage: str, log: Path, run_dir: Path) -> None:
    """Records the log of a job's first task. submitit names it after a process, not after the job."""
    _record(directory, job, stage, "launch", nodes=socket.gethostname(), log=os.path.relpath(log, run_dir))


def record_stop(directory: Path, job: str, stage: str) -> None:
    """Records that a job has taken the request of hpcgen stop."""
    _record(directory, job, stage, "stop", asks="yes")


def _record(directory: Path, job: str, stage: str, event: str, **values: str) -> None:
    line = {"event": event, "time": time.time(), "job": job, "restart": 0, "stage": stage, **values}
    with contextlib.suppress(OSError), open(directory / EVENTS, "a", opener=open_nofollow) as file:
        file.write(json.dumps(line) + "\n")
