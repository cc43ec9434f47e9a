"""The Git commit that the user's code comes from, and the code's difference from it.

Git only looks up names and prints committed files. It never looks at the working tree, so nothing that a repository's
configuration names (hooks, filters, a file monitor, external diffs) is executed.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.contract.code.user_code import UserCode

TIMEOUT_S = 20
"""Timeout of each Git command, for a repository on hanging storage."""

_GIT = ("git", "--no-optional-locks", "--no-replace-objects", "--no-pager", "-c", "core.fsmonitor=false")
_NO_FETCHING = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": "none", "GIT_TERMINAL_PROMPT": "0"}


@dataclass(frozen=True)
class CodeDirectory:
    """A directory with code that trains."""

    path: Path
    hashes: dict[str, str]
    """SHA-256 of each file, by its path relative to the directory."""
    sources: dict[str, bytes]
    """Content of the source files."""
    commit: str | None
    """Commit of the repository that contains the directory; None if there is no repository or Git cannot read it."""
    diff: bytes
    """Difference of the source code from this commit; empty if there is none."""


def directories(codes: Iterable[UserCode]) -> Iterator[CodeDirectory]:
    """Yield each directory of the code, with its commit."""
    by_path: dict[Path, list[UserCode]] = {}
    for code in codes:
        by_path.setdefault(code.directory, []).append(code)
    for path, parts in by_path.items():
        hashes = {name: digest for part in parts for name, digest in part.hashes().items()}
        sources = {name: content for part in parts for name, content in part.sources.items()}
        commit, diff = None, b""
        with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
            head = _git(path, "rev-parse", "--verify", "--quiet", "HEAD^{commit}").decode().strip()
            before = _committed(path, head, sorted(sources))
            diff = b"".join(_diff(name, content, sources[name]) for name, content in before.items())
            commit = head
        yield CodeDirectory(path, hashes, sources, commit, diff)


def _git(directory: Path, *arguments: str, stdin: bytes = b"") -> bytes:
    """Output of a Git command.

    Raises:
        OSError: Git is missing.
        SubprocessError: Git fails, or takes too long.
    """
    # Variables that name another repository would redirect Git, and variables with GIT_CONFIG or GIT_TRACE can write
    # files or run programs.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(
        (*_GIT, "-C", str(directory), *arguments),
        input=stdin,
        capture_output=True,
        timeout=TIMEOUT_S,
        check=True,
        env=environment | _NO_FETCHING,
    )
    return done.stdout


def _committed(directory: Path, commit: str, names: list[str]) -> dict[str, bytes | None]:
    """Content of the files in a commit; None for files that the commit does not contain."""
    asked = "".join(f"{commit}:./{name}\n" for name in names)
    answers = _git(directory, "cat-file", "--batch", stdin=os.fsencode(asked))
    found: dict[str, bytes | None] = {}
    for name in names:
        header, _, answers = answers.partition(b"\n")
        words = header.rsplit(b" ", 2)
        if words[-1] == b"missing":
            found[name] = None
            continue
        size = int(words[-1])
        found[name], answers = answers[:size], answers[size + 1 :]
    return found


def _diff(name: str, before: bytes | None, now: bytes) -> bytes:
    if before == now:
        return b""
    old = b"/dev/null" if before is None else b"a/" + os.fsencode(name)
    lines = difflib.diff_bytes(
        difflib.unified_diff,
        (before or b"").splitlines(keepends=True),
        now.splitlines(keepends=True),
        old,
        b"b/" + os.fsencode(name),
    )
    return b"".join(
        line if line.endswith(b"\n") else line + b"\n\\ No newline at end of file\n" for line in lines
    )
