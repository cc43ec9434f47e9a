"""The marker FAILED, in which the trainer says that another attempt would fail in the same way."""

from __future__ import annotations

from pathlib import Path

from hpcgen.redaction import redact
from hpcgen.runs.secrets import secrets_of
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import foreign_link

_MOST_BYTES = 64 << 10


def failed_text(run_dir: Path) -> str | None:
    """The text of FAILED without secrets; None if there is none, or if it is a link that another user placed."""
    path = run_dir / RunDirectory.FAILED
    if foreign_link(path, run_dir) is not None:
        return None
    try:
        with open_regular(path) as file:
            text = file.read(_MOST_BYTES).decode(errors="replace")
    except OSError:
        return None
    return redact(text.strip(), secrets_of(run_dir))
