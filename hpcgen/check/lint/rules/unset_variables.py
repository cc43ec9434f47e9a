"""Variables that a script reads and nothing sets."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.check.lint.script import Script, Use
from hpcgen.config.known_variables import unread
from hpcgen.config.sbatch_options import SBATCH_OPTIONS

_SBATCH_INPUTS = frozenset(f"SBATCH_{option.replace('-', '_').upper()}" for option in SBATCH_OPTIONS) | {
    "SBATCH_ARRAY_INX", "SBATCH_CORE_SPEC", "SBATCH_CPUS_PER_GPU", "SBATCH_DEBUG", "SBATCH_NO_REQUEUE",
    "SBATCH_TIMELIMIT",
}  # fmt: skip
"""Variables that set options of sbatch (man sbatch, INPUT ENVIRONMENT VARIABLES)."""
_OTHER_SYSTEMS = re.compile(
    r"PBS_(O_WORKDIR|JOBID|JOBNAME|NODEFILE|NUM_NODES|NUM_PPN|NP|ARRAY_?I(D|NDEX)|TASKNUM|NODENUM|QUEUE)"
    r"|LSB_(JOBID|JOBNAME|JOBINDEX|HOSTS|MCPU_HOSTS|DJOB_\w+|SUB_\w+)|LS_SUBCWD|SGE_(TASK_ID|O_WORKDIR|O_HOST)|PE_HOSTFILE"
    r"|COBALT_(JOBID|NODEFILE|JOBSIZE)|OAR_(JOBID|JOB_ID|NODEFILE|NODE_FILE)"
)
"""Variables that other batch systems set in a job."""
_OUTPUTS = {
    "SBATCH_GPUS_PER_NODE": "SLURM_GPUS_ON_NODE",
    "PBS_O_WORKDIR": "SLURM_SUBMIT_DIR",
    "LS_SUBCWD": "SLURM_SUBMIT_DIR",
    "SGE_O_WORKDIR": "SLURM_SUBMIT_DIR",
    "PBS_JOBID": "SLURM_JOB_ID",
    "LSB_JOBID": "SLURM_JOB_ID",
    "COBALT_JOBID": "SLURM_JOB_ID",
    "PBS_JOBNAME": "SLURM_JOB_NAME",
    "LSB_JOBNAME": "SLURM_JOB_NAME",
    "PBS_NUM_NODES": "SLURM_NNODES",
    "PBS_NP": "SLURM_NTASKS",
    "PBS_ARRAYID": "SLURM_ARRAY_TASK_ID",
    "PBS_ARRAY_INDEX": "SLURM_ARRAY_TASK_ID",
    "SGE_TASK_ID": "SLURM_ARRAY_TASK_ID",
}
"""Variable that Slurm does not set -> the one that it sets."""


@rule(
    "not-set-by-slurm",
    "warning",
    "Slurm does not set this variable in a job",
    source="Slurm, man sbatch, INPUT ENVIRONMENT VARIABLES and OUTPUT ENVIRONMENT VARIABLES",
)
def not_set_by_slurm(job: Job) -> Iterator[Hit]:
    """SBATCH_GPUS_PER_NODE and its like are inputs of sbatch. PBS_O_WORKDIR and its like belong to other systems.

    Unless something else sets such a variable, it is empty. Not reported: uses that handle it (${NAME:-value}).
    """
    if not job.script.is_batch:
        return
    handled = {use.name for use in job.script.uses if use.guarded} | job.script.names_set
    for use in _first_uses(job.script):
        is_input = use.name in _SBATCH_INPUTS
        if use.name in handled or not (is_input or _OTHER_SYSTEMS.fullmatch(use.name)):
            continue
        same = use.name.replace("SBATCH_", "SLURM_")
        yield Hit.at(
            use.line,
            f"Slurm does not set {use.name} in the job"
            + (": it is an input of sbatch" if is_input else ": another batch system does"),
            _OUTPUTS.get(use.name)
            or (f"{same}, if Slurm sets it" if is_input else "a SLURM_ variable (man sbatch)"),
        )


def _first_uses(script: Script) -> Iterator[Use]:
    """The first use of each variable outside of here-documents, in the order of lines."""
    here = {
        line
        for command in script.commands
        if command.here_document
        for line in range(command.here_line, command.here_line + command.here_document.count("\n") + 1)
    }
    seen: set[str] = set()
    for use in sorted(script.uses, key=lambda use: use.line):
        if use.name not in seen and use.line not in here:
            seen.add(use.name)
            yield use


@rule(
    "unset-stops",
    "warning",
    "set -u stops the script before its own check",
    source="man bash, set -u, and Parameter Expansion",
)
def unset_stops(job: Job) -> Iterator[Hit]:
    """Under set -u, `[ -z "$NAME" ]` ends the script with "unbound variable" if NAME is unset: the default is not used.

    ${NAME:-} is empty instead. Not reported: variables that the script, the shell or Slurm has set before.
    """
    script = job.script
    is_enabled = script.enabled("nounset")
    read = script.names_set - script.assignments_by_name.keys()
    first_set = {
        name: min(0 if item.function else item.line for item in items)
        for name, items in script.assignments_by_name.items()
    }
    for use in script.uses:
        if use.guarded or not is_enabled(use.line) or not re.fullmatch(r"[A-Za-z_]\w+", use.name, re.ASCII):
            continue
        # a function may be called after what is assigned below it
        end = len(script.lines) if use.function else use.line
        if (
            use.name in read
            or use.name in _ALWAYS_SET
            or use.name.startswith("SLURM")
            or first_set.get(use.name, end) < end
        ):
            continue
        line = script.lines[use.line - 1]
        is_set = re.search(rf"\b{use.name}=[^=].*\${{?{use.name}\b", line) is not None
        if not is_set and _is_checked(line, use.name):
            yield Hit.at(
                use.line,
                f"under set -u, the script ends here if {use.name} is unset",
                f"${{{use.name}:-}}",
                cause=use.name,
            )


_ALWAYS_SET = frozenset((
    "HOME", "HOSTNAME", "IFS", "LINENO", "LOGNAME", "OPTIND", "OSTYPE", "PATH", "PPID", "PWD", "RANDOM", "SECONDS",
    "SHELL", "SHLVL", "TMPDIR", "UID", "EUID", "USER", "BASH", "BASHPID", "BASH_SOURCE", "BASH_VERSION", "FUNCNAME",
    "GROUPS", "CUDA_VISIBLE_DEVICES", "PIPESTATUS", "BASH_REMATCH", "COLUMNS", "LINES", "MACHTYPE", "HOSTTYPE",
    "DIRSTACK",
))  # fmt: skip
"""Variables that bash or Slurm sets, or that sites usually set in a job."""


def _is_checked(line: str, name: str) -> bool:
    """True if a line tests whether a variable is empty."""
    value = rf"\"?\$(?:{name}\b|\{{{name}\}})\"?"
    return bool(
        re.search(rf"\s-[zn]\s+{value}", line)
        or re.search(rf"\[\[?\s+(!\s+)?{value}\s+(\]|(=|==|!=)\s+(\"\"|''))", line)
    )


@rule("never-set", "note", "nothing in the script sets a variable", source="man bash, Parameter Expansion")
def never_set(job: Job) -> Iterator[Hit]:
    """If the shell that submits the job does not export the variable, it is empty: "$run_dir/hosts" becomes /hosts.

    Reported are names in lower case, and names in upper case that begin a path. Not reported: scripts that source
    others, variables that a comment names or that the script tests, and directories that sites usually provide.
    """
    script = job.script
    if not script.is_batch or any(command.name in ("source", ".", "eval") for command in script.commands):
        return
    comments = "\n".join(line for line in script.lines if line.lstrip().startswith("#"))
    handled = {use.name for use in script.uses if use.guarded} | script.names_set | script.arithmetic_names
    for use in _first_uses(script):
        name, line = use.name, script.lines[use.line - 1]
        if not re.fullmatch(r"[A-Za-z]\w+", name, re.ASCII) or name in handled:
            continue
        is_path = re.search(rf"(^|[\s\"'=:>(,])\$(\{{{name}\}}|{name})/", line)
        is_named = re.search(rf"\b{name}\b", comments) or _is_checked(line, name)
        is_local = name.islower() and not name.endswith("_proxy")
        # no site sets a variable of NCCL that NCCL does not have
        is_rare = unread(name) is not None or (len(name) > 3 and not _OF_SITES.search(name))
        is_own = is_local or (is_path and is_rare)
        if is_own and not is_named and not _is_similar(script, name):
            yield Hit.at(
                use.line,
                f"nothing in the script sets {name}: it is empty unless the shell that submits the job exports it",
                f'set it, or stop without it: : "${{{name}:?}}"',
            )


_OF_SITES = re.compile(
    r"SLURM|PBS|HOME|ROOT|WORK|SCRATCH|STORE|PROJ|DATA|TMP|DSDIR|USER|XDG|CONDA|VIRTUAL|CUDA|NCCL_(HOME|ROOT)|MPI|PREFIX|CACHE"
    r"|EB|PWD|^CFS|^PSCRATCH|^BASH|SPACK|LUSTRE|FAST|PERM|ARCHIVE|LOCAL|JOB|GROUP|SITE|DIR$|PATH$"
)
"""Directories that sites and environments usually set."""


def _is_similar(script: Script, name: str) -> bool:
    """True if similar-name reports the variable."""
    return name.replace("_", "") in {other.replace("_", "") for other in script.names_set}
