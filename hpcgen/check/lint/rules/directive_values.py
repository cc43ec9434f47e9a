"""Values of #SBATCH options that sbatch refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.sbatch import duration_as_time
from hpcgen.check.lint.template import ANGLES, BRACES
from hpcgen.config.sbatch_values import CHECKED, other_reading, refused_value
from hpcgen.config.slurm import PASSED_ON


@rule(
    "directive-value",
    "error",
    "sbatch refuses a value",
    source="Slurm 22.05, sbatch --test-only; src/common/slurm_opt.c",
)
def directive_value(job: Job) -> Iterator[Hit]:
    """sbatch refuses a time, a number or a word that it does not know, such as --mail-type=FAILED, and submits no job.

    Times are minutes, HH:MM:SS or D-HH:MM:SS. sbatch does not know units such as 24h or 5days.
    """
    for directive in job.script.directives:
        value = directive.value or ""
        if not directive.effective or _is_filled_in_later(value):
            continue
        if mistake := refused_value(directive.name, value):
            why, fix = mistake
            if directive.name.startswith("time") and (time := duration_as_time(value)):
                fix = f"--{directive.name}={time}"
            yield Hit.at(directive.line, f"--{directive.name}={value} {why}", fix)


@rule(
    "time-reading",
    "warning",
    "a time in minutes that looks like hours",
    source="Slurm, man sbatch, --time: minutes:seconds",
)
def time_reading(job: Job) -> Iterator[Hit]:
    """Slurm reads 24:00 as minutes and seconds: the job ends after 24 minutes.

    Reported only for minutes that are unusual: multiples of 12 that are not multiples of 5.
    """
    for directive in job.script.directives:
        is_time = directive.effective and directive.name in ("time", "time-min")
        if is_time and (reading := other_reading(directive.value or "")):
            yield Hit.at(directive.line, f"--{directive.name}={directive.value} {reading[0]}", reading[1])


def _is_filled_in_later(value: str) -> bool:
    return "$" in value or bool(BRACES.search(value) or ANGLES.search(value))


_NAMED_BY_THE_SITE = (*PASSED_ON, "clusters", "nodelist", "licenses")
"""Options whose values are names that a site chooses, whether or not hpcgen has a key for them."""
_YOURS = re.compile(
    r"(?i)(^|[_-])your?[_-]|change_?me|^xxx+$|^todo$|^fixme$|\bplaceholder\b|^(?-i:(PARTITION|ACCOUNT|PROJECT|QOS)(_?NAME)?)$"
)

_IN_BRACKETS = re.compile(r"\[[A-Za-z][\w.-]*\]")
"""A placeholder such as [account]. A list of nodes has a name in front: node[1-4]."""


@rule(
    "directive-placeholder",
    "error",
    "a placeholder is left in a directive",
    source="Slurm, src/slurmctld/job_mgr.c, invalid account or partition",
)
def directive_placeholder(job: Job) -> Iterator[Hit]:
    """Slurm has no account or partition called <project_id>, and refuses the job. Replace the placeholder.

    A warning for names such as YOUR_PARTITION, which a cluster could have.
    """
    for directive in job.script.directives:
        value = directive.value or ""
        is_angled = (ANGLES.fullmatch(value) or _IN_BRACKETS.fullmatch(value)) and directive.name in (
            *_NAMED_BY_THE_SITE,
            *CHECKED,
        )
        is_yours = directive.name in _NAMED_BY_THE_SITE and _YOURS.search(value)
        if directive.effective and (is_angled or is_yours):
            yield Hit.at(
                directive.line,
                f"--{directive.name}={value} is a placeholder",
                "replace it",
                severity=None if is_angled else "warning",
            )
