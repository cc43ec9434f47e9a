"""The stages: the kinds of jobs that hpcgen can render.

Each stage has a row in `hpcgen/config/stages.py`, from which commands know it without importing this package. To add a
stage, see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping

from hpcgen.config.stages import STAGE_ROWS
from hpcgen.planning.kind import Stage

__all__ = ["STAGES", "Stage"]


class _Stages(Mapping[str, Stage]):
    """All stages by name, in the order of their rows. Looking up a stage imports its module."""

    def __getitem__(self, name: str) -> Stage:
        module = importlib.import_module(f"{__name__}.{STAGE_ROWS[name].module}")
        stages: tuple[Stage, ...] = module.STAGES
        return next(stage for stage in stages if stage.name == name)

    def __iter__(self) -> Iterator[str]:
        return iter(STAGE_ROWS)

    def __len__(self) -> int:
        return len(STAGE_ROWS)

    def __contains__(self, name: object) -> bool:
        return name in STAGE_ROWS


STAGES: Mapping[str, Stage] = _Stages()
