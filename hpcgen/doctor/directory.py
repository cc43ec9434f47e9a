"""Files and directories of a run that cannot be used: links, wrong kinds, access, damage, space and locks."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.stages import MACHINE_FILE, TRAINER_FILE
from hpcgen.doctor.cause import Cause, Effect
from hpcgen.doctor.run_files import MARKERS, RunFiles, read_start
from hpcgen.planning.checkpointing import checkpoint_bytes
from hpcgen.slurm.job_files import EXCLUDED, JOBS, RUNNING
from hpcgen.text import counted, duration, size_text
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.metrics_line import decode
from trainer.contract.files.regular_file import IrregularFileError, open_regular, require_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link, user

FILES = (*MARKERS, RunDirectory.METRICS, RunDirectory.TRAINED_WITH, RunDirectory.HEARTBEAT, EXCLUDED)
REPLACED = (RunDirectory.STOPPED, RunDirectory.FAILED, RUNNING)
"""Files that the next job removes or writes, whatever they are; it cannot remove a directory."""
DIRECTORIES = (JOBS, *(str(path) for path in RunDirectory.at(Path()).directories))
LOCK_DEAD_S = 90.0
"""Age of an owner's file after which a start considers the owner dead (trainer/faults/lock.py)."""
PAGE = "faults.md#a-broken-run-directory"
DISK_PAGE = "faults.md#the-disk-is-full"


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what is wrong with the directory itself."""
    yield from _links(files.directory)
    yield from _wrong_kinds(files.directory)
    yield from _access(files)
    yield from _space(files)
    yield from _damaged_json(files)
    yield from _metrics(files)
    yield from _locks(files)
    yield from _not_started(files)


def _links(directory: Path) -> Iterator[Cause]:
    """Yields links of other users, which the run refuses, and links whose targets are missing."""
    for name in (*FILES, *DIRECTORIES):
        path = directory / name
        if (link := foreign_link(path, directory)) is not None:
            owner = user(link.lstat().st_uid)
            yield Cause(
                name="foreign-link",
                effect="blocks",
                what=f"{name} is a symbolic link of another user, and the run refuses to follow it",
                evidence=(f"{link} -> {os.readlink(link)}, placed by {owner}",),  # noqa: PTH115
                fix=f"Ask {owner} why, and remove it: rm {shlex.quote(str(link))}.",
                page=PAGE,
            )
        elif path.is_symlink() and not path.exists():
            yield Cause(
                name="dangling-link",
                effect="blocks",
                what=f"{name} is a link to a path that does not exist",
                evidence=(f"{path} -> {os.readlink(path)}",),  # noqa: PTH115
                fix="Mount the file system of its target, or correct the link.",
                page=PAGE,
            )


def _wrong_kinds(directory: Path) -> Iterator[Cause]:
    """Yields a directory or device in place of a file, and a file in place of a directory."""
    for name in FILES:
        path = directory / name
        if foreign_link(path, directory) is not None:
            continue
        try:
            require_regular(path)
        except IrregularFileError as error:
            is_replaced = name in REPLACED and not path.is_dir()  # the next job removes it
            yield _wrong_kind(path, str(error.strerror), "harmless" if is_replaced else "blocks")
        except OSError:
            continue
    for name in DIRECTORIES:
        if (path := directory / name).is_file() and foreign_link(path, directory) is None:
            yield _wrong_kind(path, "it is a file, not a directory", "blocks")


def _wrong_kind(path: Path, reason: str, effect: Effect) -> Cause:
    return Cause(
        name="wrong-kind",
        effect=effect,
        what=f"{path.name} is not what the run needs there",
        evidence=(f"{path}: {reason}",),
        fix=f"Move it away: mv {shlex.quote(str(path))} {shlex.quote(f'{path}.old')}. The run makes it again.",
        page=PAGE,
    )


def _access(files: RunFiles) -> Iterator[Cause]:
    """Yields directories that the owner of the run cannot write to. Others may only read it, which is no fault."""
    if not files.is_own:
        return
    for path in (files.directory, files.directory / JOBS, files.checkpoints):
        if not path.is_dir() or os.access(path, os.W_OK | os.X_OK):
            continue
        mode = path.stat().st_mode & 0o7777
        read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
        shown = "its file system is mounted read-only" if read_only else f"mode {mode:o}"
        fix = (
            "Remount it writable, or move the run." if read_only else f"chmod u+rwx {shlex.quote(str(path))}"
        )
        yield Cause(
            name="not-writable",
            effect="blocks",
            what=f"{path.name} is not writable",
            evidence=(f"{path}: {shown}",),
            fix=fix,
            page=PAGE,
        )


def _space(files: RunFiles) -> Iterator[Cause]:
    """Yields a file system without room for the next checkpoint, or for any file. Quotas are not seen here."""
    needed, of = _checkpoint_size(files)
    if files.state == "done":
        needed = 0
    of_saves = files.checkpoints
    if not of_saves.is_dir() and of_saves.is_relative_to(files.directory):
        of_saves = files.directory
    for path, size in ((of_saves, needed), (files.directory, 1)):
        if path.is_dir() and (shown := _full(path, size, of)):
            yield Cause(
                name="disk-full",
                effect="blocks",
                what="The disk has no room for the next checkpoint",
                evidence=(f"{path}: {shown}",),
                fix="Free space (hpcgen checkpoint prune --dry-run shows what it would remove), then submit again. Set "
                "checkpoint.keep_last to keep the disk from filling up again.",
                page=DISK_PAGE,
            )
            return


def _full(path: Path, needed: int, of: str) -> str:
    """Why a file of this size cannot be written there; "" if it can."""
    state = os.statvfs(path)
    free = state.f_bavail * state.f_frsize
    if state.f_files and not state.f_favail:
        return "no free inodes, so no file can be made"
    return f"{size_text(free)} free, and {of} {size_text(needed)}" if free < max(needed, 1) else ""


def _checkpoint_size(files: RunFiles) -> tuple[int, str]:
    """The size of the next checkpoint in bytes, and where it is from; 0 if it is unknown."""
    try:
        newest = checkpoint_files.newest_complete(files.checkpoints)
        if newest is not None and newest.record is not None:
            size = sum(file["bytes"] for file in newest.record["files"].values())
            return size, f"{newest.path.name} takes"
        if files.trainer is not None:
            return checkpoint_bytes(files.trainer), "a checkpoint takes"
    except (OSError, TrainerError, ArithmeticError, TypeError, AssertionError):
        pass
    return 0, "the next file takes"


def _damaged_json(files: RunFiles) -> Iterator[Cause]:
    """Yields JSON files of the newest job and of the run that are no JSON."""
    newest = max(files.directory.glob(f"{JOBS}/*/{TRAINER_FILE}"), key=_modified, default=None)
    paths = [files.directory / RunDirectory.TRAINED_WITH, files.directory / RunDirectory.HEARTBEAT]
    if newest is not None:
        paths += [newest, newest.with_name(MACHINE_FILE)]
    for path in paths:
        if foreign_link(path, files.directory) is not None:
            continue
        try:
            json.loads(read_start(path))
        except json.JSONDecodeError as error:
            shown = "it is empty" if not error.doc.strip() else f"it is not JSON ({error.msg})"
            yield Cause(
                name="damaged-json",
                effect="harmless",
                what=f"{path.name} is damaged",
                evidence=(f"{path}:{error.lineno}: {shown}",),
                fix=f"Remove it: rm {shlex.quote(str(path))}. The next attempt writes it again; until then, status and "
                "report know less about the run.",
                page=PAGE,
            )
        except (OSError, ValueError, RecursionError):
            continue


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _metrics(files: RunFiles) -> Iterator[Cause]:
    """Yields a metrics.jsonl with damaged lines, and one that is missing although the run has saved."""
    path = files.directory / RunDirectory.METRICS
    if foreign_link(path, files.directory) is not None:
        return
    if files.run is not None and files.run.history.unreadable_lines == 0:
        return  # a long file is read once
    try:
        first, count = _damaged_lines(path)
    except FileNotFoundError:
        yield from _no_metrics(files, path)
        return
    except IrregularFileError:  # a cause of its own
        return
    except OSError as error:
        yield Cause(
            name="metrics-unreadable",
            effect="blocks" if files.is_own else "harmless",
            what="metrics.jsonl cannot be read",
            evidence=(f"{path}: {error.strerror}",),
            fix="Give this user access to it.",
            page=PAGE,
        )
        return
    if count:
        yield Cause(
            name="damaged-metrics",
            effect="harmless",
            what="metrics.jsonl has damaged lines",
            evidence=(f"{path}:{first}: the first of {counted(count, 'damaged line')}",),
            fix="Nothing: the run, status and report ignore these lines. Damage of this kind comes from a node or a "
            "storage that failed while it wrote.",
            page=PAGE,
        )


def _damaged_lines(path: Path) -> tuple[int, int]:
    """The number of the first line that the trainer did not write, and how many there are. A last line without its end
    was cut off by a kill, or is being written."""
    first = count = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, 1):
            if line.endswith(b"\n") and not line.isspace() and decode(line) is None:
                first, count = first or number, count + 1
    return first, count


def _no_metrics(files: RunFiles, path: Path) -> Iterator[Cause]:
    try:
        newest = checkpoint_files.newest_complete(files.checkpoints)
    except OSError:
        return
    if newest is not None:
        yield Cause(
            name="no-metrics",
            effect="harmless",
            what="metrics.jsonl is missing, although the run has saved",
            evidence=(f"{path}: no such file, but {newest.path} is complete",),
            fix="Put it back if you have a copy. Otherwise submit again: the run resumes, and only the figures "
            "before are lost.",
            page=PAGE,
        )


def _locks(files: RunFiles) -> Iterator[Cause]:
    """Yields the owner file of a file system without locks whose owner no longer renews it."""
    for directory in dict.fromkeys((files.directory, files.checkpoints)):
        for path in (directory / ".lock.owner", directory / ".saving.lock.owner"):
            try:
                age = files.now - path.lstat().st_mtime
                owner = json.loads(read_start(path))
                named = f"process {owner['pid']} on {owner['host']}, job {owner['job'] or 'none'}"
            except (OSError, ValueError, TypeError, KeyError, RecursionError):
                continue
            if age > LOCK_DEAD_S:
                yield Cause(
                    name="stale-lock",
                    effect="harmless",
                    what="A process was killed while it owned the directory",
                    evidence=(f"{path}: {named}, last renewed {duration(age)} ago",),
                    fix=f"Nothing: the next start waits {LOCK_DEAD_S:g} s for the owner and then begins. If the "
                    "process still runs on that host, end it first.",
                    page="faults.md#it-does-not-start-again",
                )


def _not_started(files: RunFiles) -> Iterator[Cause]:
    """Yields a directory in which no run has begun."""
    if files.attempts or files.job_config or files.run or files.markers:
        return
    metrics = files.directory / RunDirectory.METRICS
    if metrics.exists() or files.checkpoints.exists():
        return
    names = sorted(path.name for path in files.directory.iterdir())[:5]
    yield Cause(
        name="not-started",
        effect="harmless",
        what="No job has begun in this directory",
        evidence=(
            f"{files.directory}: neither jobs nor metrics.jsonl; it has {', '.join(names) or 'no files'}",
        ),
        fix="Submit the run (hpcgen submit train -c run.yaml), look for its job (squeue --me), or give the directory "
        "that paths.run_dir names.",
        page="faults.md#it-does-not-start-again",
    )
