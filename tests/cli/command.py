"""The `hpcgen` command as a shell sees it: its status and its two streams."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpcgen.cli.main import main


@dataclass(frozen=True)
class Ended:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str


def hpcgen(*arguments: object) -> Ended:
    """Runs the command in this process, its streams being pipes."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        pytest.raises(SystemExit) as end,
    ):
        main([str(argument) for argument in arguments])
    assert isinstance(end.value.code, int)
    return Ended(end.value.code, stdout.getvalue(), stderr.getvalue())


def listing(directory: Path) -> dict[str, bytes | None]:
    """Every file below a directory with its content."""
    paths = sorted(directory.rglob("*"))
    return {str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in paths}
