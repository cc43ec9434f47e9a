"""Slurm's environment variables: what sbatch sets in a job for the options of its script, and what sbatch itself reads.

From sbatch(1), srun(1) and src/common/env.c of Slurm 20.11 to 26.05. hpcgen/config/sbatch_options.tsv has the variables
of options.
"""

from __future__ import annotations

from collections.abc import Iterable

from hpcgen.config.sbatch_options import OPTIONS

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
"""Variables of the Hugging Face Hub, and others that change no job."""


def kept_variables(directives: Iterable[str]) -> tuple[str, ...]:
    """Variables that a job with these directives keeps, although they match a pattern in its setting `leaks`.

    Slurm or submitit sets them, or they are defaults of the user, or they change no job.
    """
    options = {directive.removeprefix("--").partition("=")[0] for directive in directives}
    kept = {name for option in options if option in OPTIONS for name in OPTIONS[option].sets}
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
