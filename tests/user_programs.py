"""Programs on a user's PATH, faster than the real ones: Python, hpcgen and torchrun as forks, and shellcheck."""

from __future__ import annotations

import stat
from pathlib import Path

SCRIPTS = {
    "hpcgen": 'exec {stand_in} -m hpcgen "$@"',
    "torchrun": 'exec {stand_in} -m torch.distributed.run "$@"',
    # the real one takes most of the time of `hpcgen templates check`
    "shellcheck": "cat >/dev/null\necho '{{\"comments\": []}}'",
}


def write_user_programs(directory: Path, stand_in: str) -> Path:
    """Writes the programs into a new directory. `stand_in` runs Python as forks, as do the programs that they start."""
    directory.mkdir()
    for name in ("python", "python3"):
        (directory / name).symlink_to(stand_in)
    for name, script in SCRIPTS.items():
        program = directory / name
        program.write_text(f"#!/bin/sh\n{script.format(stand_in=stand_in)}\n")
        program.chmod(stat.S_IRWXU)
    return directory
