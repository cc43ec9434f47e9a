"""Values of #SBATCH options that sbatch refuses."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.sbatch import duration_as_time
from hpcgen.check.lint.template import ANGLES, BRACES

_TIME = r"-1|infinite|unlimited|\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}"
_NODES = r"-?\d+[km]?(-\d+[km]?)?(:\d+)?(,\d+[km]?(-\d+[km]?)?(:\d+)?)*"
_POSITIVE = r"0*[1-9]\d*"
_A_NUMBER = (_POSITIVE, "a positive number", "write a number")
VALUES = {
    "time": (_TIME, "a time", "write minutes, HH:MM:SS or D-HH:MM:SS, such as 1-00:00:00"),
    "time-min": (_TIME, "a time", "write minutes, HH:MM:SS or D-HH:MM:SS, such as 1-00:00:00"),
    "nodes": (_NODES, "a number of nodes", "write a number, or MIN-MAX"),
    **dict.fromkeys(("ntasks", "ntasks-per-node", "cpus-per-task"), _A_NUMBER),
}
"""Option -> the pattern of its values, what it must be, and the fix."""


@rule(
    "directive-value",
    "error",
    "sbatch refuses a value",
    source="Slurm 22.05, sbatch --test-only; src/common/slurm_opt.c",
)
def directive_value(job: Job) -> Iterator[Hit]:
    """sbatch refuses a time, a number of nodes or a count that it cannot parse, and submits no job.

    Times are minutes, HH:MM:SS or D-HH:MM:SS. sbatch does not know units such as 24h or 5days.
    """
    for directive in job.script.directives:
        value = directive.value or ""
        if directive.name not in VALUES or not directive.effective or _is_filled_in_later(value):
            continue
        pattern, meaning, fix = VALUES[directive.name]
        if not re.fullmatch(pattern, value, re.ASCII | re.IGNORECASE):
            if meaning == "a time" and (time := duration_as_time(value)):
                fix = f"--{directive.name}={time}"
            yield Hit.at(
                directive.line, f"--{directive.name}={value} is not {meaning}: sbatch refuses it", fix
            )


def _is_filled_in_later(value: str) -> bool:
    return "$" in value or bool(BRACES.search(value) or ANGLES.search(value))


_NAMED_BY_THE_SITE = (
    "account",
    "partition",
    "qos",
    "reservation",
    "constraint",
    "clusters",
    "nodelist",
    "licenses",
)
"""Options whose values are names that a site chooses, whether or not hpcgen has a key for them."""
_YOURS = re.compile(
    r"(?i)(^|[_-])your?[_-]|change_?me|^xxx+$|^todo$|^fixme$|\bplaceholder\b|^(?-i:(PARTITION|ACCOUNT|PROJECT|QOS)(_?NAME)?)$"
)


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
        is_angled = ANGLES.fullmatch(value) and directive.name in (*_NAMED_BY_THE_SITE, *VALUES)
        is_yours = directive.name in _NAMED_BY_THE_SITE and _YOURS.search(value)
        if directive.effective and (is_angled or is_yours):
            yield Hit.at(
                directive.line,
                f"--{directive.name}={value} is a placeholder",
                "replace it",
                severity=None if is_angled else "warning",
            )
