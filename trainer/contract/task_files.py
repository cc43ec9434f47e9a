"""Task files of lm-eval: which code they run, and which files decide their results. Uses the standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes, read_text

_FUNCTION = re.compile(r"!function\s+([\w.]+)\.\w+")
_INCLUDE = re.compile(r"""^include:\s*['"]?([^\s'"#]+)""", re.MULTILINE)
_GROUP = re.compile(r"""^group:\s*['"]?([^\s'"#]+)""", re.MULTILINE)


def group_in(file: Path) -> str | None:
    """Name of the group of tasks that a file defines; None if it defines a task.

    Raises:
        OSError: the file cannot be read.
    """
    match = _GROUP.search(read_text(file, errors="replace"))
    return match and match[1]


def task_sources(file: Path) -> list[Path]:
    """The task file, the files that it includes, and the Python files of their `!function` lines.

    lm-eval loads a group together with all task files of its directory, so these files are included.

    Raises:
        OSError: the file cannot be read.
    """
    found: dict[Path, None] = {}
    left = [file]
    if group_in(file) is not None:
        left += sorted(path for path in file.parent.rglob("*.y*ml") if path.is_file())
    while left:
        path = left.pop()
        if path in found or not path.is_file():
            continue
        found[path] = None
        text = read_text(path, errors="replace")
        left += (path.parent / name for name in _INCLUDE.findall(text))
        for module in _FUNCTION.findall(text):
            found.update({path.parent / f"{module}.py": None})
    return [path for path in found if path.is_file()]


def code_of(file: Path) -> list[Path]:
    """The Python files that a task file runs.

    Raises:
        OSError: the file cannot be read.
    """
    return [path for path in task_sources(file) if path.suffix == ".py"]


def hashes(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of all that decides the results of task files, by path.

    Raises:
        OSError: a file cannot be read.
    """
    sources = sorted({path for file in files for path in task_sources(file)})
    return {str(path): sha256(read_bytes(path)) for path in sources}
