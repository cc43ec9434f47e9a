"""New directories that appear complete or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.contract.errors import NotSavedError, TrainerError
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.system_calls import sync_path

Report = Callable[[str], None]
"""Shows a line about the progress or the result."""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A private directory that is renamed to `path` at the end of the block, or removed if the block raises.

    The block must sync the files that it writes.

    Raises:
        TrainerError: `path` exists, or its parent directory does not.
        NotSavedError: the directory or a file in it cannot be written.
    """
    if path.exists() or path.is_symlink():
        raise TrainerError(f"{path} exists already. Name another directory, or remove this one")
    if not path.absolute().parent.is_dir():
        raise TrainerError(f"there is no directory {path.absolute().parent}. Create it first", where=path)
    try:
        private = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.absolute().parent))
    except OSError as error:
        raise NotSavedError(f"{path} cannot be created ({error.strerror})") from error
    try:
        yield private
        sync_path(private)
        private.chmod(0o777 & ~umask())
        private.rename(path)
        sync_path(path.absolute().parent)
    except OSError as error:
        reason = f"{path} cannot be written ({error.strerror or error})"
        raise NotSavedError(f"{reason}; what was written of it is removed") from error
    finally:
        shutil.rmtree(private, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write and sync a new file."""
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_json(path: Path, document: Any) -> None:
    """Write and sync a new JSON file as transformers formats it."""
    write_text(path, json.dumps(document, indent=2) + "\n")


def copy_file(source: Path, target: Path) -> None:
    """Copy and sync a file."""
    shutil.copyfile(source, target)
    sync_file(target)


def sync_file(path: Path) -> None:
    """Make a file's content durable."""
    with open_regular(path) as file:
        os.fsync(file.fileno())


def umask() -> int:
    """The permissions that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
