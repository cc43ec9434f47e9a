"""The stages: the kinds of jobs that hpcgen can render, one module for each.

Every module here that defines STAGES is registered automatically. Each stage has a row in `hpcgen/config/stages.py`,
from which commands know it without importing this package. To add a stage, see CONTRIBUTING.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hpcgen.config.stages import STAGE_ROWS
from hpcgen.planning.kind import Stage

__all__ = ["STAGES", "Stage"]


def _find() -> dict[str, Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    )
    found = {stage.name: stage for module in modules for stage in getattr(module, "STAGES", ())}
    return {name: found[name] for name in STAGE_ROWS}


STAGES: Mapping[str, Stage] = _find()
"""All stages by name, in the order in which they are listed and run."""
