"""Slurm batch scripts and a Megatron-Core trainer for GPT-class models.

    from hpcgen import layouts, load_run, plan, predict, render, submit

    run = load_run("run.yaml", overrides=["slurm.train.nodes=4"])
    print(layouts(run).chosen.first.name)
    print(predict(plan(run)).likely.gpu_hours)
    print(render(plan(run), "train"))
    submit(plan(run, ["prepare", "train"]), launcher="slurm")

The command line uses the same functions. `sweep`, `submit_sweep` and `compare` do so for several variants of a run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hpcgen.version import __version__

if TYPE_CHECKING:
    from hpcgen.api import (
        compare,
        layouts,
        load_run,
        plan,
        predict,
        render,
        submit,
        submit_sweep,
        sweep,
    )
    from hpcgen.errors import ConfigErrors, HpcgenError

__all__ = [
    "ConfigErrors",
    "HpcgenError",
    "__version__",
    "compare",
    "layouts",
    "load_run",
    "plan",
    "predict",
    "render",
    "submit",
    "submit_sweep",
    "sweep",
]


if not TYPE_CHECKING:  # a type checker would take every name for one of the interface

    def __getattr__(name: str) -> Any:
        """Imports the interface on first use, because `hpcgen data` and jobs on nodes do not need it."""
        if name in ("ConfigErrors", "HpcgenError"):
            from hpcgen import errors

            return getattr(errors, name)
        if name in __all__:
            from hpcgen import api

            return getattr(api, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
