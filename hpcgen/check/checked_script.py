"""The script of a stage, checked by bash if a site's template contributed to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcgen.run_plan.plan import Plan
from hpcgen.slurm.rendering.script import Script, render_stage


def checked_script(plan: Plan, stage: str, site_directories: Sequence[Path]) -> Script:
    """The batch script of one stage.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid, or renders shell code with a syntax error.
    """
    script = render_stage(plan, stage, site_directories)
    for each in (script, script.queued):
        if (
            each is not None and each.uses_site_templates
        ):  # the shipped templates are tested; the check costs 50 ms
            from hpcgen.check.shell_programs import require_syntax

            require_syntax(each)
    return script
