"""Contents of `hpcgen bundle`: the small text files of a run that show why it failed, without secrets."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from hpcgen.redaction import redact, redact_json
from hpcgen.runs.attempts import JobAttempt, read_attempts
from hpcgen.runs.failures import root_failure
from hpcgen.runs.log_files import attempts_without_events, failure_parts, log_files
from hpcgen.runs.look import look
from hpcgen.slurm.job_files import EVENTS, NODE_REPORTS, RUNNING
from hpcgen.version import __version__
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link
from trainer.contract.record import record

FILE_BYTES = 1 << 20
"""Largest part of a file: its end."""
LOG_BYTES = 4 << 20
"""Largest part of the logs of an attempt."""
TOTAL_BYTES = 64 << 20
"""Largest size of all files together."""
MOST_ATTEMPTS = 5
"""Newest attempts whose logs are packed."""
MOST_FILES = 256
"""Files of a directory, such as the stacks of the ranks."""
_MARKERS = (
    RunDirectory.FAILED,
    RunDirectory.DONE,
    RunDirectory.STOPPED,
    RUNNING,
    RunDirectory.HEARTBEAT,
    RunDirectory.METRICS,
    RunDirectory.TRAINED_WITH,
)
_TEXT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,200}")
"""Names of files in a bundle. The run and its jobs write no others."""
_BINARY = re.compile(rf"{RunDirectory.FLIGHT_RECORD}|\.(pt|pkl|pickle|bin|idx|gz|zst|so|sqsh)(\.|$)")


@record(kw_only=True)
class Member:
    """A file of a bundle."""

    name: str
    """Path in the bundle."""
    source: str
    """Path that it was read from. Empty for what the command made."""
    content: bytes
    cut: str = ""
    """The part of the source that it is, if not all of it."""

    def listed(self) -> dict[str, Any]:
        """Its entry in the list of contents."""
        digest = hashlib.sha256(self.content).hexdigest()
        entry = {"name": self.name, "bytes": len(self.content), "sha256": digest, "source": self.source}
        return {**entry, **({"part": self.cut} if self.cut else {})}


@record(kw_only=True)
class Bundle:
    """The files of a bundle, and what it leaves out."""

    members: tuple[Member, ...]
    left_out: tuple[tuple[str, str], ...]
    """Paths below the run directory, each with the reason."""

    def contents(self) -> bytes:
        """The list of contents, contents.json."""
        listed = {
            "hpcgen": __version__,
            "files": [member.listed() for member in self.members],
            "left_out": [{"name": name, "reason": reason} for name, reason in self.left_out],
        }
        return f"{json.dumps(listed, indent=1)}\n".encode()

    def write(self, file: BinaryIO, folder: str) -> None:
        """Writes the bundle as a .tar.gz, with all files in a folder. Nothing in it names a user of this machine."""
        with tarfile.open(fileobj=file, mode="w:gz") as archive:
            for name, content in (
                ("contents.json", self.contents()),
                *((m.name, m.content) for m in self.members),
            ):
                entry = tarfile.TarInfo(f"{folder}/{name}")
                entry.size, entry.mode = len(content), 0o600
                archive.addfile(entry, io.BytesIO(content))


def collect(run_dir: Path, run_file: Path | None, secrets: Sequence[str], now: float) -> Bundle:
    """Reads the files of a bundle. `secrets`: values that it may not contain.

    Raises:
        OSError: the run directory cannot be read.
    """
    return _Collector(run_dir, secrets).collect(run_file, now)


class _Collector:
    def __init__(self, run_dir: Path, secrets: Sequence[str]) -> None:
        self._run_dir, self._secrets = run_dir, tuple(secrets)
        self._members: list[Member] = []
        self._left_out: dict[str, str] = {}
        self._left = TOTAL_BYTES

    def collect(self, run_file: Path | None, now: float) -> Bundle:
        recorded = read_attempts(self._run_dir)
        others = attempts_without_events(self._run_dir, {attempt.job for attempt in recorded})
        attempts = sorted((*recorded, *others), key=lambda attempt: attempt.began)[-MOST_ATTEMPTS:]
        self._add_json("summary.json", self._summary(attempts, now))
        if run_file is not None:
            self._add_file(run_file, "run.yaml", run_file.parent)
        for name in _MARKERS:
            if os.path.lexists(self._run_dir / name):
                self._add_file(self._run_dir / name, name, self._run_dir)
        for attempt in reversed(attempts):  # the newest first, in case the space is not enough
            self._add_logs(attempt, is_last=attempt == attempts[-1])
        for job in dict.fromkeys(attempt.job for attempt in reversed(attempts)):
            self._add_directory(f"jobs/{job}")
        for directory in sorted(self._run_dir.glob("stacks*")):
            self._add_directory(directory.name)
        self._note_others()
        return Bundle(members=tuple(self._members), left_out=tuple(sorted(self._left_out.items())))

    def _summary(self, attempts: Sequence[JobAttempt], now: float) -> dict[str, Any]:
        """State and failures, as hpcgen status and logs show them."""
        failures = {
            f"{each.stage} {each.job} restart {each.restart}": None
            if failure is None
            else dataclasses.asdict(failure)
            for each in attempts
            for failure in [root_failure(self._run_dir, each)]
        }
        [status] = look([self._run_dir], now)
        return {
            "time": now,
            "hpcgen": __version__,
            "python": sys.version.split()[0],
            "failures": failures,
            "status": dataclasses.asdict(status),
        }

    def _add_logs(self, attempt: JobAttempt, *, is_last: bool) -> None:
        left = LOG_BYTES
        for file in log_files(self._run_dir, attempt):
            if left <= 0:
                self._left_out[file.name] = (
                    f"the logs of restart {attempt.restart} have more than {LOG_BYTES >> 20} MiB"
                )
                continue
            try:
                parts = failure_parts(file, attempt, is_last=is_last, budget=min(left, LOG_BYTES // 4))
            except OSError as error:
                self._left_out[file.name] = error.strerror or type(error).__name__
                continue
            for number, part in enumerate(parts):
                name = f"logs/{file.path.stem}-restart-{attempt.restart}-{number}.log"
                cut = f"{len(part.data)} bytes from byte {part.start}"
                self._add(name, file.name, _from_line(part.data) if part.is_torn else part.data, cut)
                left -= len(part.data)

    def _add_directory(self, name: str) -> None:
        directory = self._run_dir / name
        if foreign_link(directory, self._run_dir) is not None or not directory.is_dir():
            self._left_out[name] = "not a directory, or a link of another user"
            return
        found = sorted(directory.iterdir(), key=lambda path: (path.name != EVENTS, path.name))
        for path in found[:MOST_FILES]:
            below = str(path.relative_to(self._run_dir))
            if path.is_dir():
                if path.name.startswith(NODE_REPORTS):
                    self._add_directory(below)
                else:
                    self._left_out[below] = "a directory that is not needed"
            else:
                self._add_file(path, below, self._run_dir)
        if len(found) > MOST_FILES:
            self._left_out[f"{name}/*"] = f"{len(found) - MOST_FILES} more files"

    def _add_file(self, path: Path, name: str, root: Path) -> None:
        """Adds the end of a text file."""
        if not all(map(_TEXT.fullmatch, name.split("/"))) or _BINARY.search(path.name):
            self._left_out[name] = "not a text file of a run"
            return
        if foreign_link(path, root) is not None:
            self._left_out[name] = "a link of another user"
            return
        try:
            with open_regular(path) as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - FILE_BYTES - 1)
                file.seek(start)
                data = file.read(FILE_BYTES + 1)
        except OSError as error:
            self._left_out[name] = error.strerror or type(error).__name__
            return
        if b"\0" in data:
            self._left_out[name] = "not a text file"
            return
        data = _from_line(data) if start else data
        self._add(name, str(path), data, f"the last {len(data)} of {size} bytes" if start else "")

    def _add(self, name: str, source: str, data: bytes, cut: str = "") -> None:
        text = redact(data.decode(errors="replace"), self._secrets).encode()
        if len(text) > self._left:
            self._left_out[name] = f"the bundle would have more than {TOTAL_BYTES >> 20} MiB"
            return
        self._left -= len(text)
        source = redact(source, self._secrets)
        self._members.append(Member(name=name, source=source, content=text, cut=cut))

    def _add_json(self, name: str, value: Any) -> None:
        text = json.dumps(redact_json(value, self._secrets), indent=1, default=str)
        self._add(name, "", f"{text}\n".encode())

    def _note_others(self) -> None:
        """Names what lies in the run directory and is not packed at all."""
        packed = {name.partition("/")[0] for name in (*(m.name for m in self._members), *self._left_out)}
        logs = {Path(member.source).name for member in self._members}
        for path in self._run_dir.iterdir():
            if path.name in packed or path.name in logs:
                continue
            kind = (
                "data, checkpoints and other directories are never packed" if path.is_dir() else "not needed"
            )
            self._left_out[path.name] = kind


def _from_line(data: bytes) -> bytes:
    """The text from its first complete line on. A secret may be torn, and then nothing shows what it is."""
    return data.partition(b"\n")[2]
