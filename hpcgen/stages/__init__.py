"""The stages: jobs that hpcgen knows how to write, one module for each.

Every module here that defines STAGES is found by itself. To add a stage, add its module, its template
(templates/slurm/NAME.sbatch.j2) and its row in docs/stages.md; CONTRIBUTING.md shows how.

Commands import these modules to know their choices, and hpcgen.config to make the section `slurm` of the run file. A
stage therefore imports what its methods need inside them.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping

from hpcgen.stages.stage import Stage

__all__ = ["FRAMES", "STAGES", "Stage"]


def _find() -> dict[str, Stage]:
    modules = (
        importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)
    )
    found = [stage for module in modules for stage in getattr(module, "STAGES", ())]
    return {stage.name: stage for stage in sorted(found, key=lambda stage: stage.order)}


STAGES: Mapping[str, Stage] = _find()
"""Every stage by its name, in the order in which stages are listed and run."""

FRAMES = tuple(dict.fromkeys(stage.frame for stage in STAGES.values()))
"""Templates that those of the stages extend: base and data."""
