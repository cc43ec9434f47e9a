"""Rendering: the batch script of a stage, and the directories of its templates."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hpcgen.config.directories import configuration_directories, readable, with_templates_of
from hpcgen.config.loader import Run
from hpcgen.errors import HpcgenError
from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.corpus import check_pairs
from hpcgen.slurm.rendering.script import Script, render_stage


def render(plan: Plan, stage: str, templates: Sequence[str | Path] = ()) -> str:
    """Returns the batch script of one stage of `plan`. Writes nothing.

    `templates` are directories of site templates. They are searched before HPCGEN_TEMPLATES, the user's and the
    site's configuration directory, and the shipped templates.

    Raises:
        HpcgenError: the stage is not in the plan; a template is missing, unreadable, writable by other users, or
            invalid; or the corpus's pairs were made with settings or from files that differ from the run's.
    """
    if stage not in plan.stages:
        raise HpcgenError(f"stage {stage!r} is not in the plan", f"planned stages: {', '.join(plan.stages)}")
    check_pairs(plan)
    return checked_script(plan, stage, template_directories(plan.run, templates)).text


def checked_script(plan: Plan, stage: str, site_directories: Sequence[Path]) -> Script:
    """The batch script of one stage, checked by bash if a site's template contributed to it."""
    script = render_stage(plan, stage, site_directories)
    for each in (script, script.queued):
        # the shipped templates are tested, and the check takes 50 ms
        if each is not None and each.uses_site_templates:
            from hpcgen.check.shell_programs import require_syntax

            require_syntax(each)
    return script


def site_directories(templates: Sequence[str | Path] = ()) -> list[Path]:
    """Site template directories: `templates`, HPCGEN_TEMPLATES (separated by ':'), and configuration directories."""
    named = [Path(part) for part in os.environ.get("HPCGEN_TEMPLATES", "").split(os.pathsep) if part]
    configured = [path for path in configuration_directories("templates") if path.is_dir()]
    given = [Path(directory) for directory in templates]
    readable(directory / "slurm" for directory in (*given, *named, *configured))
    for directory in given:
        if directory.is_dir() and not any(directory.glob("slurm/*.sbatch.j2")):
            raise HpcgenError(
                "contains no templates",
                "they must be in slurm/, such as slurm/train.sbatch.j2",
                where=directory,
            )
    return [*given, *named, *configured]


def template_directories(run: Run, templates: Sequence[str | Path] = ()) -> list[Path]:
    """The site template directories of a run, whose profile may be named by its path."""
    return with_templates_of(run.sites, site_directories(templates))


def unset_secrets(plan: Plan) -> list[str]:
    """Names of the planned stages' secrets that are not set in this environment."""
    names = dict.fromkeys(name for stage in plan.stages.values() for name in stage.secrets)
    return [name for name in names if not os.environ.get(name)]
