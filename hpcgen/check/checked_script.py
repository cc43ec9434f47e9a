"""The script of a stage, read by bash first where a site's template had a part in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcgen.planning.plan import Plan
from hpcgen.slurm.rendering.script import Script, render_stage


def checked_script(plan: Plan, stage: str, site_directories: Sequence[Path]) -> Script:
    """The batch script of one stage.

    Raises:
        HpcgenError: a template is missing, unreadable or wrong, or makes shell code that bash cannot read.
    """
    script = render_stage(plan, stage, site_directories)
    if script.is_of_site:  # the shipped templates are tested; the check costs 50 ms
        from hpcgen.check.shell_programs import require_syntax

        require_syntax(script)
    return script
