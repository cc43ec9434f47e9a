"""A shellcheck without findings, since the real one takes most of the time of `hpcgen templates check`."""

from __future__ import annotations

from pathlib import Path


def write_silent_shellcheck(directory: Path) -> None:
    """Writes the program. tests/check and `test_check_of_a_good_site` run the real one."""
    directory.mkdir()
    program = directory / "shellcheck"
    program.write_text("#!/bin/sh\ncat >/dev/null\necho '{\"comments\": []}'\n")
    program.chmod(0o755)
