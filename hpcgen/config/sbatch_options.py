"""Options of sbatch."""

from __future__ import annotations

from hpcgen.text import nearest

# fmt: off
SBATCH_OPTIONS = frozenset((
    "account", "acctg-freq", "array", "batch", "bb", "bbf", "begin", "chdir", "cluster", "cluster-constraint",
    "clusters", "comment", "constraint", "container", "context", "contiguous", "core-spec", "cores-per-socket",
    "cpu-freq", "cpus-per-gpu", "cpus-per-task", "deadline", "delay-boot", "dependency", "distribution", "error",
    "exclude", "exclusive", "export", "extra-node-info", "get-user-env", "gid", "gpu-bind", "gpu-freq", "gpus",
    "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "gres-flags", "help", "hint", "hold",
    "ignore-pbs", "input", "job-name", "kill-on-invalid-dep", "licenses", "mail-type", "mail-user", "mcs-label",
    "mem", "mem-bind", "mem-per-cpu", "mem-per-gpu", "mincpus", "network", "nice", "no-kill", "no-requeue",
    "nodefile", "nodelist", "nodes", "ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node",
    "ntasks-per-socket", "ntasks-per-tres", "open-mode", "output", "overcommit", "oversubscribe", "parsable",
    "partition", "prefer", "priority", "profile", "propagate", "qos", "quiet", "reboot", "requeue",
    "reservation", "signal", "sockets-per-node", "spread-job", "switches", "tasks-per-node", "test-only",
    "thread-spec", "threads-per-core", "time", "time-min", "tmp", "uid", "usage", "use-min-nodes", "verbose",
    "version", "wait", "wait-all-nodes", "wckey", "wrap",
))
"""Long options in all releases from Slurm 22.05 to 25.11 (src/common/slurm_opt.c)."""
SBATCH_OPTIONS_OF_SOME = frozenset((
    "autocomplete", "consolidate-segments", "container-id", "export-file", "external", "extra", "oom-kill-step",
    "power", "resources", "resv-ports", "segment", "spread-segments", "stepmgr", "tres-bind", "tres-per-task",
))
"""Long options in some of these releases."""
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


def matching_options(name: str) -> tuple[str, ...]:
    """Options of sbatch that `name` can mean: itself, or options with this prefix, as in getopt_long."""
    options = SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME
    if name in options:
        return (name,)
    if len(name) == 1:
        return ()
    # options of some releases count only if no other matches, since the cluster may not have them
    return tuple(sorted(option for option in SBATCH_OPTIONS if option.startswith(name))) or tuple(
        sorted(option for option in options if option.startswith(name))[:1]
    )


def misspelled_option(name: str) -> str | None:
    """The option closest to a misspelled one; None if none is close, or `name` is an option or its beginning."""
    if len(name) == 1 or matching_options(name):
        return None
    return nearest(name, SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME)
