"""Slurm's environment variables: what sbatch sets in a job for the options of its script, and what sbatch itself reads.

From sbatch(1), srun(1) and src/common/env.c of Slurm 20.11 to 26.05.
"""

from __future__ import annotations

from collections.abc import Iterable

PREFIXES = (
    "SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "SALLOC_", "SACCT_", "SCANCEL_", "SCONTROL_", "SINFO_", "SQUEUE_",
)  # fmt: skip
"""Prefixes of variables that Slurm's programs read as options, or that Slurm sets in a job."""

CLIENT = (
    "SLURM_CONF",
    "SLURM_CONF_SERVER",
    "SLURM_JWT",
    "SLURM_SACK_JWKS",
    "SLURM_SACK_KEY",
    "SLURM_SACK_SOCKET",
)
"""Variables that say how to reach Slurm."""

DEFAULTS = {
    "account": ("SBATCH_ACCOUNT",),
    "clusters": ("SBATCH_CLUSTERS", "SLURM_CLUSTERS"),
    "qos": ("SBATCH_QOS",),
    "reservation": ("SBATCH_RESERVATION",),
    "wckey": ("SBATCH_WCKEY",),
}
"""Options of sbatch whose variables a user may export as defaults. They apply to jobs whose script lacks the option."""

_GPUS = ("SLURM_GPUS_ON_NODE", "SLURM_JOB_GPUS")
# fmt: off
_SET_BY_OPTION = {
    "acctg-freq": ("SLURM_ACCTG_FREQ",),
    "array": (
        "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MAX",
        "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_STEP",
    ),
    "cpu-freq": ("SLURM_CPU_FREQ_REQ",),
    "cpus-per-gpu": ("SLURM_CPUS_PER_GPU",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK"),
    "distribution": ("SLURM_DISTRIBUTION", "SLURM_DIST_PLANESIZE"),
    "gpu-bind": ("SLURM_GPU_BIND", "SLURM_TRES_BIND"),
    "gpu-freq": ("SLURM_GPU_FREQ",),
    "gpus": ("SLURM_GPUS", *_GPUS),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", *_GPUS),
    "gpus-per-socket": ("SLURM_GPUS_PER_SOCKET", *_GPUS),
    "gpus-per-task": ("SLURM_GPUS_PER_TASK", "SLURM_TRES_BIND", "SLURM_TRES_PER_TASK", *_GPUS),
    "gres": _GPUS,
    "hint": ("SLURM_HINT", "SLURM_CPU_BIND", "SLURM_THREADS_PER_CORE"),
    "mem-bind": (
        "SLURM_MEM_BIND", "SLURM_MEM_BIND_LIST", "SLURM_MEM_BIND_PREFER", "SLURM_MEM_BIND_SORT",
        "SLURM_MEM_BIND_TYPE", "SLURM_MEM_BIND_VERBOSE",
    ),
    "network": ("SLURM_NETWORK",),
    "ntasks-per-core": ("SLURM_NTASKS_PER_CORE",),
    "ntasks-per-gpu": ("SLURM_NTASKS_PER_GPU",),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks-per-socket": ("SLURM_NTASKS_PER_SOCKET",),
    "open-mode": ("SLURM_OPEN_MODE",),
    "overcommit": ("SLURM_OVERCOMMIT",),
    "profile": ("SLURM_PROFILE",),
    "threads-per-core": ("SLURM_THREADS_PER_CORE",),
    "tres-bind": ("SLURM_TRES_BIND",),
    "tres-per-task": ("SLURM_TRES_PER_TASK",),
}
# fmt: on
"""Option of sbatch -> variables that it sets in the job. --mem and --mem-per-cpu are left out: a value from an outer
job can win over the job's own, and a step gets the job's memory without them."""


# fmt: off
_SET_IN_EVERY_JOB = (
    "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE", "SLURM_GTIDS", "SLURM_JOBID", "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_JOB_DEPENDENCY", "SLURM_JOB_END_TIME", "SLURM_JOB_EXCLUSIVE", "SLURM_JOB_GID",
    "SLURM_JOB_GROUP", "SLURM_JOB_ID", "SLURM_JOB_LICENSES", "SLURM_JOB_NAME", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_OVERSUBSCRIBE", "SLURM_JOB_PARTITION", "SLURM_JOB_QOS", "SLURM_JOB_RESERVATION",
    "SLURM_JOB_SEGMENT_SIZE", "SLURM_JOB_SLUID", "SLURM_JOB_START_TIME", "SLURM_JOB_UID", "SLURM_JOB_USER",
    "SLURM_LOCALID", "SLURM_NNODES", "SLURM_NODEID", "SLURM_NODELIST", "SLURM_NODE_ALIASES", "SLURM_NPROCS",
    "SLURM_NTASKS", "SLURM_OOM_KILL_STEP", "SLURM_PRIO_PROCESS", "SLURM_PROCID", "SLURM_RESTART_COUNT",
    "SLURM_SUBMIT_DIR", "SLURM_SUBMIT_HOST", "SLURM_TASK_PID", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN",
    "SLURM_WORKING_CLUSTER", "SLURMD_NODENAME", "SUBMITIT_EXECUTOR", "HYDRA_BOOTSTRAP", "HYDRA_LAUNCHER_EXTRA_ARGS",
    "I_MPI_HYDRA_BOOTSTRAP", "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS", "OMPI_MCA_plm_slurm_args",
    "PRTE_MCA_plm_slurm_args",
)
# fmt: on
"""Variables that Slurm (20.11 to 26.05) or submitit sets for every job."""

_HARMLESS = ("HF_ENDPOINT", "HF_TOKEN", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
"""Variables that say how to reach the Hugging Face Hub, and what changes no job."""


def kept_variables(directives: Iterable[str]) -> tuple[str, ...]:
    """Variables that a job with these directives keeps, although they match a pattern in its setting `leaks`.

    Slurm or submitit sets them, or they are defaults of the user, or they change no job.
    """
    options = {directive.removeprefix("--").partition("=")[0] for directive in directives}
    kept = {name for option in options for name in _SET_BY_OPTION.get(option, ())}
    for option, names in DEFAULTS.items():
        if option not in options:
            kept.update(name for name in names if name.startswith("SBATCH_"))
    return (*_SET_IN_EVERY_JOB, *CLIENT, *_HARMLESS, *sorted(kept))


def reach_sbatch(names: Iterable[str], directives: Iterable[str]) -> tuple[str, ...]:
    """Variables of a submitting shell that would change how sbatch reads a script with these directives."""
    options = {directive.removeprefix("--").partition("=")[0] for directive in directives}
    allowed = {name for option, defaults in DEFAULTS.items() if option not in options for name in defaults}
    allowed.update(CLIENT)
    return tuple(sorted(name for name in names if name.startswith(PREFIXES) and name not in allowed))
