"""The stages: jobs that hpcgen knows how to write, one module for each.

Every module here that defines STAGES is found by itself. To add a stage, add its module, its template
(templates/slurm/NAME.sbatch.j2) and its row in docs/stages.md; CONTRIBUTING.md shows how.

The run file's `slurm` section is made of the stages, so hpcgen.config imports them. A stage therefore imports what it
needs of hpcgen.planning and hpcgen.topology inside its methods; this also keeps commands quick to start.
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
