"""Broken run directories: `hpcgen doctor` names the cause, shows where, and says what to do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hpcgen.doctor.cause import Cause
from hpcgen.doctor.diagnosis import diagnose
from hpcgen.doctor.run_files import read_run_files
from tests.cli.command import hpcgen, listing
from tests.doctor.runs import JOB, configuration, finished_marker, write_events, write_run
from tests.recorded_run import START
from trainer.contract.files.checkpoint_files import COMPLETE, STARTED, TRACKER

NOW = START + 3600
NEWEST, OLDER = "checkpoints/iter_0000300", "checkpoints/iter_0000200"


def found(run: Path) -> tuple[Cause, ...]:
    return diagnose(read_run_files(run, NOW))


@dataclass(frozen=True)
class Broken:
    """One kind of damage, and what must be said about it."""

    damage: Callable[[Path], object]
    causes: tuple[str, ...]
    """Names of all causes, the most likely one first."""
    evidence: str
    """Part of the evidence of the first cause."""
    fix: str


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text(text)


def both(*damages: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda run: [damage(run) for damage in damages]


def remove(*names: str) -> Callable[[Path], object]:
    return lambda run: [(run / name).unlink() for name in names]


def replace(name: str, make: Callable[[Path], object]) -> Callable[[Path], object]:
    """Moves something out of the run and makes another thing in its place."""

    def damage(run: Path) -> None:
        (run / name).rename(run.parent / "moved")
        make(run / name)

    return damage


def job_killed(run: Path) -> None:
    (run / "STOPPED").unlink()
    write_events(run, ("start", {"nodes": "ndv5-[001-002]"}))


def newer_job(run: Path) -> None:
    os.utime(run / "trained-with.json", (START, START))


def full_disk(run: Path) -> None:
    """The next checkpoint is larger than any disk. The older ones are gone, and were never recorded."""
    for name in ("metrics.jsonl", "STOPPED", "heartbeat", "trained-with.json"):
        (run / name).unlink()
    (run / "checkpoints").rename(run.parent / "moved")
    huge = {"num_layers": 1000, "hidden_size": 1 << 22}
    (run / "jobs" / JOB / "trainer.json").write_text(json.dumps(configuration(model=huge)))


def stale_lock(run: Path) -> None:
    owner = {"token": "x", "host": "ndv5-001", "pid": 7, "pid_namespace": "n", "job": JOB, "restart": "0"}
    (run / ".lock.owner").write_text(json.dumps({**owner, "beat": 3}))
    os.utime(run / ".lock.owner", (START, START))


def hung(run: Path) -> None:
    (run / "STOPPED").unlink()
    (run / "stacks").mkdir()
    seen: dict[str, Any] = {
        "host": "ndv5-001",
        "pid": 7,
        "iteration": 300,
        "phase": "train",
        "quiet_s": 600.0,
    }
    for rank in range(15):
        at = {"rank": rank, "at": "step.py:140 _agree", "since": "2026-07-01T12:00:00+0000"}
        (run / f"stacks/rank-{rank:05d}.txt").write_text(json.dumps({**seen, **at}) + "\n")


CASES = {
    "healthy and in the queue again": None,
    "metrics.jsonl with zeros after a crash of the node": Broken(
        lambda run: (run / "metrics.jsonl").write_bytes(
            (run / "metrics.jsonl").read_bytes() + b"\0" * 99 + b"\n"
        ),
        ("damaged-metrics",),
        "metrics.jsonl:304: the first of 1 damaged line",
        "Nothing",
    ),
    "metrics.jsonl lost": Broken(remove("metrics.jsonl"), ("no-metrics",), "no such file", "Put it back"),
    "metrics.jsonl is a directory": Broken(
        replace("metrics.jsonl", Path.mkdir),
        ("wrong-kind",),
        "a directory, not a regular file",
        "Move it away",
    ),
    "a pipe in place of FAILED": Broken(
        lambda run: os.mkfifo(run / "FAILED"), ("wrong-kind",), "it is a FIFO", "Move it away"
    ),
    "a directory in place of FAILED": Broken(
        lambda run: (run / "FAILED").mkdir(), ("wrong-kind",), "it is a directory", "Move it away"
    ),
    "jobs is a file": Broken(
        replace("jobs", Path.touch),
        ("wrong-kind", "stopped"),
        "it is a file, not a directory",
        "Move it away",
    ),
    "configuration of the job cut off": Broken(
        write(f"jobs/{JOB}/trainer.json", '{"model": {'),
        ("damaged-json",),
        "trainer.json:1: it is not JSON",
        "rm ",
    ),
    "empty trained-with.json": Broken(
        write("trained-with.json", ""), ("damaged-json",), "trained-with.json:1: it is empty", "rm "
    ),
    "half-written newest checkpoint": Broken(
        remove(f"{NEWEST}/{COMPLETE}", f"{NEWEST}/metadata.json", f"checkpoints/{TRACKER}"),
        ("interrupted-save",),
        "iter_0000300: COMPLETE is missing",
        "resumes from iter_0000200",
    ),
    "truncated file in the newest checkpoint": Broken(
        write(f"{NEWEST}/__0_0.distcp", "wei"),
        ("damaged-checkpoint",),
        "__0_0.distcp has 3 bytes, not 7",
        "100 steps are repeated",
    ),
    "record of the newest checkpoint edited": Broken(
        lambda run: (run / NEWEST / COMPLETE).write_text(
            (run / NEWEST / COMPLETE).read_text().replace("bf16", "fp32")
        ),
        ("damaged-checkpoint",),
        "its checksum differs",
        "Restore the files",
    ),
    "every checkpoint damaged": Broken(
        both(write(f"{NEWEST}/__0_0.distcp", ""), write(f"{OLDER}/__0_0.distcp", "")),
        ("no-valid-checkpoint",),
        "iter_0000300: __0_0.distcp has 0 bytes, not 7",
        "restore a checkpoint",
    ),
    "checkpoints on a file system that is not mounted": Broken(
        replace("checkpoints", lambda path: path.symlink_to("/not/mounted")),
        ("dangling-link", "no-valid-checkpoint"),
        "checkpoints -> /not/mounted",
        "Mount the file system",
    ),
    "a checkpoint that the trainer set aside": Broken(
        lambda run: (run / OLDER).rename(run / f"{OLDER}.broken"),
        ("checkpoint-set-aside",),
        "iter_0000200.broken",
        "prune --broken",
    ),
    "damaged tracker": Broken(
        write(f"checkpoints/{TRACKER}", "30\0"),
        ("wrong-tracker",),
        f"{TRACKER}:1: is damaged",
        "only Megatron-LM",
    ),
    "DONE of a shorter run": Broken(
        both(remove("STOPPED"), write("DONE", finished_marker(300, training={"train_iters": 300}))),
        ("done-other-configuration",),
        "DONE:1: finished at iteration 300",
        "continues from iteration 300 to 1000",
    ),
    "DONE of other hyperparameters": Broken(
        both(
            remove("STOPPED"),
            write("DONE", finished_marker(1000, optimizer={"lr": 0.5})),
            write("trained-with.json", json.dumps(configuration(optimizer={"lr": 0.5}))),
            newer_job,
        ),
        ("done-other-configuration",),
        "DONE:1: finished at iteration 1000",
        "use another paths.run_dir",
    ),
    "FAILED next to DONE": Broken(
        both(
            write("DONE", finished_marker(1000)),
            write("FAILED", "the run in /runs/a is finished, and optimizer.lr = 0.5 differs\n"),
        ),
        ("failed-next-to-done",),
        "DONE:1: finished at iteration 1000",
        "use another paths.run_dir",
    ),
    "DONE cut off": Broken(
        both(remove("STOPPED"), write("DONE", "")), ("damaged-done",), "it is empty", "Remove it"
    ),
    "FAILED": Broken(
        both(remove("STOPPED"), write("FAILED", "model.num_layers = 3 differs from 2\n")),
        ("refused",),
        "model.num_layers = 3 differs from 2",
        "submit again",
    ),
    "FAILED of a run without events": Broken(
        both(
            remove("STOPPED", f"jobs/{JOB}/events.jsonl"),
            write("FAILED", "the loss is nan at iteration 301 (samples 300 to 303; on rank 12)\n"),
        ),
        ("not-finite",),
        "FAILED:1: the loss is nan at iteration 301",
        "Submit once more",
    ),
    "FAILED without a reason": Broken(
        both(remove("STOPPED"), write("FAILED", "")), ("failed-without-reason",), "it is empty", "Free space"
    ),
    "RUNNING of a dead job": Broken(
        job_killed, ("job-killed",), "with no end", "the next job replaces RUNNING"
    ),
    "stopped, and no job continues it": Broken(
        lambda run: write_events(run, ("start", {}), ("end", {"verdict": "terminated", "reason": "SIGTERM"})),
        ("stopped",),
        "STOPPED:1: 300",
        "Submit again",
    ),
    "hung": Broken(hung, ("hang",), "Look first at rank 15, which did not report", "node-health"),
    "stale lock": Broken(stale_lock, ("stale-lock",), "process 7 on ndv5-001", "waits 90 s"),
    "full disk": Broken(full_disk, ("disk-full",), "free, and a checkpoint takes", "Free space"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_cause_comes_first_with_its_place_and_fix(tmp_path: Path, case: str) -> None:
    run, broken = write_run(tmp_path / "run"), CASES[case]
    if broken is None:
        assert found(run) == ()
        return
    broken.damage(run)
    causes = found(run)
    assert tuple(cause.name for cause in causes) == broken.causes
    assert any(broken.evidence in line for line in causes[0].evidence), causes[0].evidence
    assert broken.fix in causes[0].fix
    assert all(cause.evidence for cause in causes)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
@pytest.mark.parametrize("name", ["metrics.jsonl", "FAILED", "checkpoints", "jobs"])
def test_links_of_another_user_are_named_and_not_followed(tmp_path: Path, name: str) -> None:
    run, private = write_run(tmp_path / "run"), tmp_path / "private"
    if (run / name).exists():
        (run / name).rename(private)
    else:
        private.write_text("my password")
    (run / name).symlink_to(private)
    os.lchown(run / name, 65534, 65534)
    first, *others = found(run)
    assert (first.name, first.evidence[0].startswith(f"{run / name} -> {private}")) == ("foreign-link", True)
    assert f"rm {run / name}" in first.fix
    assert "my password" not in str(others)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_what_a_guest_cannot_read_does_not_block_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("metrics.jsonl")
    assert {each.name: each.effect for each in found(run)}["metrics-unreadable"] == "blocks"
    os.chown(run, 65534, 65534)
    assert {each.name: each.effect for each in found(run)}["metrics-unreadable"] == "harmless"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_directory_without_write_access_is_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "checkpoints").chmod(0o500)
    assert [cause.name for cause in found(run)] == ["not-writable"]
    (run / "checkpoints").chmod(0o700)


@pytest.mark.parametrize(
    "value", [None, "\ud800", {}, -1, 10**400, float("nan"), "9" * 5000], ids=lambda value: repr(value)[:20]
)
def test_odd_content_in_any_file_is_no_traceback(tmp_path: Path, value: Any) -> None:
    run = write_run(tmp_path / "run")
    text = json.dumps(value)
    sections = json.dumps(dict.fromkeys(("model", "training", "pid", "host", "job"), value)).encode()
    for content in (text.encode() + b"\xff", sections):
        for name in ("RUNNING", "DONE", "STOPPED", "FAILED", "heartbeat", "trained-with.json", ".lock.owner"):
            (run / name).write_bytes(content)
        found(run)
    (run / "DONE").unlink()
    found(run)
    (run / "jobs" / JOB / "trainer.json").write_text(
        json.dumps(
            {
                key: dict.fromkeys(section, value) if isinstance(section, dict) else value
                for key, section in configuration().items()
            }
        )
    )
    found(run)
    (run / NEWEST / COMPLETE).write_text(text)
    (run / NEWEST / STARTED).write_text(text)
    (run / "checkpoints" / TRACKER).write_text(text)
    found(run)


@pytest.mark.process
def test_the_command_shows_the_cause_and_changes_nothing(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "STOPPED").unlink()
    (run / "FAILED").write_text("model.num_layers = 3 differs from \x1b[31m2, HF_TOKEN=hf_0123456789\n")
    before = listing(run)
    ended = hpcgen("doctor", run)
    assert (ended.status, ended.stderr) == (1, "")
    assert "1. The trainer refused the run (ended the last attempt)\n" in ended.stdout
    assert "see: docs/faults.md#the-run-is-refused\n" in ended.stdout
    assert "\x1b" not in ended.stdout
    assert "hf_0123456789" not in ended.stdout
    assert listing(run) == before
    printed = hpcgen("doctor", run, "--json").stdout
    assert "hf_0123456789" not in printed
    [cause] = json.loads(printed)["causes"]
    assert (cause["name"], cause["effect"]) == ("refused", "ended")


@pytest.mark.process
def test_a_healthy_run_exits_with_0_and_a_wrong_path_with_2(tmp_path: Path) -> None:
    ended = hpcgen("doctor", write_run(tmp_path / "run"))
    assert (ended.status, ended.stdout.splitlines()[-1]) == (
        0,
        "nothing found in its markers, events, logs, checkpoints and metrics",
    )
    missing = hpcgen("doctor", tmp_path / "absent")
    assert (missing.status, "no such directory" in missing.stderr) == (2, True)
    (tmp_path / "empty").mkdir()
    assert "No job has begun in this directory" in hpcgen("doctor", tmp_path / "empty").stdout
