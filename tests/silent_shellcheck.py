"""A shellcheck without findings, since the real one takes most of the time of `hpcgen templates check`."""

from __future__ import annotations

from pathlib import Path

PROGRAM = """\
#!/bin/sh
cat >/dev/null
echo '{"comments": []}'
"""


def write_silent_shellcheck(directory: Path) -> None:
    """Writes the program."""
    directory.mkdir()
    program = directory / "shellcheck"
    program.write_text(PROGRAM)
    program.chmod(0o755)
