"""The Slurm releases that added options of sbatch."""

from __future__ import annotations

# fmt: off
ADDED = {
    "container": "21.08", "context": "21.08", "prefer": "22.05", "autocomplete": "23.02", "container-id": "23.02",
    "extra": "23.02", "tres-per-task": "23.02", "tres-bind": "23.11", "resv-ports": "24.05", "segment": "24.05",
    "stepmgr": "24.05", "oom-kill-step": "24.11", "external": "25.05", "consolidate-segments": "25.11",
    "resources": "25.11", "spread-segments": "25.11",
}
# fmt: on
"""Options that Slurm 20.11 does not have -> the release that added them (src/common/slurm_opt.c of each release)."""
GRES_FLAGS_ADDED = {"allow-task-sharing": "23.11"}
"""Values of --gres-flags -> the release that added them (CHANGELOG/slurm-23.11.md)."""


def release_with(name: str, value: str) -> str:
    """The Slurm release that added an option of sbatch or its value; "" if every release since 20.11 has it.

    Releases are YY.MM, so strings compare like releases.
    """
    flags = value.split(",") if name == "gres-flags" else []
    return max((ADDED.get(name, ""), *(GRES_FLAGS_ADDED.get(flag, "") for flag in flags)))
