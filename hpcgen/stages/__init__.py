"""The stages: the kinds of jobs that hpcgen can render, one module for each.

Every module here that defines STAGES is registered automatically. To add a stage, add its module, its template
(templates/slurm/NAME.sbatch.j2) and its row in docs/stages.md; see CONTRIBUTING.md.

Commands import these modules to list their choices, and hpcgen.config imports them to define the section `slurm` of
the run file. A stage therefore imports the modules that its methods need inside the methods.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hpcgen.stages.stage import Stage

__all__ = ["FRAMES", "STAGES", "Stage", "stage_called"]


def _find() -> dict[str, Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    )
    found = [stage for module in modules for stage in getattr(module, "STAGES", ())]
    return {stage.name: stage for stage in sorted(found, key=lambda stage: stage.order)}


STAGES: Mapping[str, Stage] = _find()
"""All stages by name, in the order in which they are listed and run."""

FRAMES = tuple(dict.fromkeys(stage.frame for stage in STAGES.values()))
"""Templates that the stages' templates extend: base and data."""


def stage_called(word: str) -> Stage | None:
    """The stage with this name, here or in other programs."""
    plain = word.lower().replace("_", "-")
    return next((stage for stage in STAGES.values() if plain in (stage.name, *stage.other_names)), None)
