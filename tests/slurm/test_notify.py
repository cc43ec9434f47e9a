"""The command of the section notify gets the events of a job, and cannot harm it. test_run.py has jobs on Slurm."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.notify import EVENT_NAMES
from hpcgen.runs.attempts import read_attempts
from tests.http_server import http_server
from tests.patience import wait_until

LIBRARIES = Path(__file__).parents[2] / "templates/lib"
TOKEN = "Zq7" * 12
JOB = f"""\
set -uo pipefail
unset -v EPOCHREALTIME EPOCHSECONDS # as in bash 4.4
SLURM_JOB_ID=77 SLURM_JOB_NODELIST=n1 run_name=gpt stage=train share=private secrets=(SITE_TOKEN)
run_dir=$1 checkpoints=$1 directories=() striped_directories=() leaks=XX_ kept_variables='' task_logs=''
notify_timeout_s=$2 notify_disk_low_gb=$3 notify_events=($4) notify_command=("${{@:5}}") notify_stall_s=0
for name in base events redactions bounded notify; do . {LIBRARIES}/$name.sh; done
notify_poll_s=0.1
begin
while [[ ! -e $run_dir/end ]]; do sleep 0.1; done
read -r reason <"$run_dir/end"
case $reason in done*) say "$reason"; exit 0 ;; *) die "$reason" ;; esac
"""
"""A job whose attempt ends as the file end says. Its libraries are those of every script with a section notify."""


def start_job(
    run_dir: Path,
    command: Sequence[str],
    events: Sequence[str] = EVENT_NAMES,
    timeout_s: int = 60,
    disk_low_gb: int = 0,
) -> subprocess.Popen[str]:
    run_dir.mkdir()
    (run_dir / "train-77.log").touch()
    return subprocess.Popen(
        [
            "bash",
            "-c",
            JOB,
            "job",
            str(run_dir),
            str(timeout_s),
            str(disk_low_gb),
            " ".join(events),
            *command,
        ],
        env={**os.environ, "SITE_TOKEN": "own form"},
        cwd=run_dir,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def shell(run_dir: Path, text: str = "") -> list[str]:
    """A command that adds the event to the file RUN_DIR.told, and runs this text."""
    return ["sh", "-c", f'cat >>"$0"; {text}', f"{run_dir}.told"]


def told(run_dir: Path) -> list[dict[str, Any]]:
    file = Path(f"{run_dir}.told")
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def names_told(run_dir: Path) -> list[str]:
    return [event["event"] for event in told(run_dir)]


def test_training_is_followed_to_its_end(tmp_path: Path) -> None:
    """Stalls, spikes and a low disk come from the run's files, and each is told once. No event has a secret."""
    run_dir = tmp_path / 'a "run"'
    job = start_job(run_dir, shell(run_dir), disk_low_gb=10**9)
    wait_until(lambda: sorted(names_told(run_dir)) == ["disk_low", "stall", "start"])
    beat = {"time": 1.0, "iteration": 152, "phase": "step", "host": "n1", "pid": 1}
    (run_dir / "heartbeat").write_text(json.dumps(beat))
    wait_until(lambda: names_told(run_dir).count("stall") == 2)
    spike = {
        "event": "spike",
        "iteration": 153,
        "time": time.time() + 2,
        "loss": 9.8,
        "height": 2.4,
        "skipped": False,
    }
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(spike)}\n" for _ in range(3)))
    wait_until(lambda: "spike" in names_told(run_dir))
    (run_dir / "end.part").write_text(f'loss is not finite: "own form" https://me:{TOKEN}@example.org\n')
    (run_dir / "end.part").rename(run_dir / "end")
    log, _ = job.communicate()
    assert job.returncode == 1, log
    events = {event["event"]: event for event in told(run_dir)}
    assert names_told(run_dir)[3:] == ["stall", "spike", "non_finite"]
    place = {"run": "gpt", "run_dir": str(run_dir), "job": "77", "restart": 0, "stage": "train"}
    assert events["start"].items() >= {"nodes": "n1", **place}.items()
    assert events["spike"]["reason"] == "iteration 153: loss 9.8 is 2.4 times the median of previous steps"
    assert events["spike"].items() >= {"iteration": 152, **place}.items()
    reason = 'loss is not finite: "[redacted]" https://[redacted]@example.org'
    assert (
        events["non_finite"].items() >= {"reason": reason, "status": "1", "iteration": 152, **place}.items()
    )
    assert events["non_finite"]["text"] == f"gpt: non finite (job 77, train): {reason}"
    [attempt] = read_attempts(run_dir)
    assert [event["event"] for event in attempt.events].count("spike") == 1


HARMFUL = {
    "fails": "echo broken; exit 3",
    "hangs": "trap '' TERM; sleep 600",
    "leaves processes": "sleep 600 & sleep 600 & exit 0",
    "floods": "yes",
    "forks": "i=0; while [ $i -lt 200 ]; do sleep 600 & i=$((i + 1)); done; wait",
    "closes its input": "exec <&-; exit 0",
}


def test_a_bad_command_changes_nothing(tmp_path: Path) -> None:
    """All at once, since each is given its time."""
    commands = {name: shell(tmp_path / name, text) for name, text in HARMFUL.items()}
    commands["is missing"] = ["/nowhere/notify"]
    jobs = {name: start_job(tmp_path / name, command, timeout_s=3) for name, command in commands.items()}
    for name in jobs:
        wait_until((tmp_path / name / "jobs/77/notify.log").exists)
        (tmp_path / name / "end").write_text("done: all of it\n")
    for name, job in jobs.items():
        log, _ = job.communicate()
        assert job.returncode == 0, (name, log)
        assert [attempt.verdict for attempt in read_attempts(tmp_path / name)] == ["done"]
        assert ("WARNING: notify.command" in log) == (name not in ("leaves processes", "closes its input"))
        output = tmp_path / name / "jobs/77/notify.log"
        assert output.stat().st_size <= 10 << 20
        assert stat.S_IMODE(output.stat().st_mode) == 0o600
    wait_until(lambda: not processes_in(tmp_path))


def processes_in(directory: Path) -> list[str]:
    """Processes that work in this directory or below."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (path / "cwd").readlink().is_relative_to(directory):
                found.append(path.name)
        except OSError:
            continue
    return found


def test_the_example_with_apprise(tmp_path: Path) -> None:
    pytest.importorskip("apprise")
    config = tmp_path / "apprise.yaml"
    command = [sys.executable, str(LIBRARIES.parents[1] / "examples/notify_apprise.py"), str(config)]
    event = json.dumps({"event": "disk_low", "run": "gpt", "text": "gpt: disk low: 3 GB are left"})
    with http_server() as server:
        server.files["/hook"] = b"ok"
        config.write_text(f"urls:\n  - {server.url.replace('http', 'json')}/hook\n")
        config.chmod(0o644)
        refused = subprocess.run(command, input=event, capture_output=True, text=True, check=False)
        assert (refused.returncode, server.requests) == (2, [])
        config.chmod(0o600)
        subprocess.run(command, input=event, capture_output=True, text=True, check=True)
        [request] = server.asked("/hook")
    assert json.loads(request.body)["message"] == "gpt: disk low: 3 GB are left"


def test_a_webhook_gets_json(tmp_path: Path) -> None:
    """As docs/operate.md shows it: the address is in a file of curl, which the script only names."""
    with http_server() as server:
        server.files[f"/hooks/{TOKEN}"] = b"ok"
        config = tmp_path / "webhook"
        config.write_text(
            f'url = "{server.url}/hooks/{TOKEN}"\nheader = "Content-Type: application/json"\n'
            'data-binary = "@-"\nfail\nsilent\nshow-error\n'
        )
        run_dir = tmp_path / "run"
        job = start_job(run_dir, ["curl", "--config", str(config)], events=["done"])
        (run_dir / "end").write_text("done: all of it\n")
        log, _ = job.communicate()
        [request] = server.asked(f"/hooks/{TOKEN}")
    assert request.method == "POST"
    assert json.loads(request.body)["event"] == "done"
    written = b"".join(path.read_bytes() for path in run_dir.rglob("*") if path.is_file())
    assert TOKEN not in f"{log}{written.decode()}"
