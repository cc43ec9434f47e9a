"""What a stage runs, apart from how Slurm and the container are asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a stage runs, and the host paths that it touches."""

    arguments: tuple[str, ...] = ()
    """What follows `python`; a stage whose template writes its command itself has none."""
    inputs: tuple[str, ...] = ()
    """Host files that must be there, which the login node can look for."""
    datasets: tuple[str, ...] = ()
    """Those of `inputs` that are files of datasets."""
    reads: tuple[str, ...] = ()
    """Directories and files besides `inputs`."""
    writes: tuple[str, ...] = ()
    """Directories that the job makes."""
    large: tuple[str, ...] = ()
    """Directories for large files, which the job makes too and stripes over Lustre's storage targets."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name -> text of files that the script writes into the job's directory."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Settings of the stage's script besides those of every stage; templates/README.md documents each."""
