"""Values that no view of a run may show."""

from __future__ import annotations

import os
from pathlib import Path

from hpcgen.redaction import secret_values
from hpcgen.runs.submissions import secret_names


def secrets_of(run_dir: Path) -> tuple[str, ...]:
    """Values of this shell's variables that are secrets by their names, or by `secrets` of the run as its jobs recorded
    it.
    """
    return secret_values(os.environ, secret_names(run_dir))
