"""The Python interface, also used by the command line: load_run, plan, layouts, predict, render and
submit, and for several runs sweep, submit_sweep and compare."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcgen.api.scripts import render, site_directories, template_directories, unset_secrets
    from hpcgen.api.submission import require_submittable, submit
    from hpcgen.api.sweeps import submit_sweep, sweep
    from hpcgen.config.loader import Run, load_run
    from hpcgen.run_plan.layouts.find import find_layouts as layouts
    from hpcgen.run_plan.plan import Plan, plan
    from hpcgen.run_plan.prediction import predict
    from hpcgen.sweeps.comparison import compare

__all__ = [
    "Plan",
    "Run",
    "compare",
    "layouts",
    "load_run",
    "plan",
    "predict",
    "render",
    "require_submittable",
    "site_directories",
    "submit",
    "submit_sweep",
    "sweep",
    "template_directories",
    "unset_secrets",
]

PLACES = {
    "Plan": "hpcgen.run_plan.plan.Plan",
    "Run": "hpcgen.config.loader.Run",
    "compare": "hpcgen.sweeps.comparison.compare",
    "layouts": "hpcgen.run_plan.layouts.find.find_layouts",
    "load_run": "hpcgen.config.loader.load_run",
    "plan": "hpcgen.run_plan.plan.plan",
    "predict": "hpcgen.run_plan.prediction.predict",
    "render": "hpcgen.api.scripts.render",
    "require_submittable": "hpcgen.api.submission.require_submittable",
    "site_directories": "hpcgen.api.scripts.site_directories",
    "submit": "hpcgen.api.submission.submit",
    "submit_sweep": "hpcgen.api.sweeps.submit_sweep",
    "sweep": "hpcgen.api.sweeps.sweep",
    "template_directories": "hpcgen.api.scripts.template_directories",
    "unset_secrets": "hpcgen.api.scripts.unset_secrets",
}
"""Name -> where it is defined, which is imported on first use. So commands can import this package at their top."""


def __dir__() -> list[str]:
    """The names of the interface, for help and completion."""
    return __all__


if not TYPE_CHECKING:  # a type checker would take every name for one of the interface

    def __getattr__(name: str) -> Any:
        """Imports a part of the interface."""
        if name not in PLACES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, _, attribute = PLACES[name].rpartition(".")
        return getattr(importlib.import_module(module), attribute)
