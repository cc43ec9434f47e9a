"""The user's program as a job file: the shell code of one task."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcgen.config import program as programs
from hpcgen.config.fields import seconds
from hpcgen.config.loader import Run
from hpcgen.config.program import DeepSpeedConfig, ProgramConfig
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.deepspeed.file import task_lines
from hpcgen.planning.kind import Stage
from hpcgen.planning.request import make_allocation, place_of, stage_settings
from hpcgen.planning.software import runtime
from hpcgen.text import duration

if TYPE_CHECKING:
    from hpcgen.planning.deepspeed.section import Section

SIGNAL_LEAD_S = 300
"""Default time that a program has to save and stop."""

IN_THE_JOB = {
    "RANK": "$SLURM_PROCID",
    "LOCAL_RANK": "$SLURM_LOCALID",
    "NODE_RANK": "$SLURM_NODEID",
    "MASTER_ADDR": "$MASTER_ADDR",
    "MASTER_PORT": "$MASTER_PORT",
    "SCRATCH": "$TMPDIR",
    "JOB_ID": "$SLURM_JOB_ID",
    "RESTART": "${SLURM_RESTART_COUNT:-0}",
    "DEEPSPEED_CONFIG": "$DEEPSPEED_CONFIG",
}
"""Variable -> shell expansion in a task. The others are known when the script is rendered."""

_NAME_WITHOUT_STEP = re.compile(
    r"((?:last|latest|newest|current|final|best)[-_.]?)[*?\[][^/]*", re.IGNORECASE
)
"""The last component of a pattern for names such as last.ckpt and last-v1.ckpt."""
_COPY = re.compile(r".*-v([0-9]+)(?:\.[A-Za-z]\w*)?")
"""Name of a checkpoint whose own name was taken, as PyTorch Lightning and others call it."""
RANKS = 'export RANK="$SLURM_PROCID" LOCAL_RANK="$SLURM_LOCALID"'
TORCHRUN = ("-m", "torch.distributed.run")


def known_values(run: Run, config: RunConfig, allocation: Allocation) -> dict[str, str]:
    """The variables whose values do not depend on the job."""
    return {
        "NNODES": str(allocation.nodes),
        "WORLD_SIZE": str(allocation.nodes * allocation.ranks_per_node),
        "RANKS_PER_NODE": str(allocation.ranks_per_node),
        "GPUS_PER_NODE": str(run.node_type.gpus_per_node),
        "RUN_DIR": config.paths.run_dir,
    }


def command(run: Run, program: ProgramConfig) -> tuple[str, ...]:
    """The command of a task, with variables in braces. torchrun is called through the cluster's Python."""
    if program.launcher == "srun":
        return program.command
    # The default rendezvous, static, needs the number of the node; c10d would number the ranks in any order.
    return (
        run.cluster.python,
        *TORCHRUN,
        "--nnodes={NNODES}",
        "--nproc-per-node={RANKS_PER_NODE}",
        "--node-rank={NODE_RANK}",
        "--master-addr={MASTER_ADDR}",
        "--master-port={MASTER_PORT}",
        *program.command,
    )


def expanded(argument: str, values: Mapping[str, str]) -> str:
    """The argument with all its variables replaced by `values`."""
    return "".join(values[part] if is_name else part for part, is_name in programs.parts(argument))


def task_file(run: Run, config: RunConfig, program: ProgramConfig, allocation: Allocation) -> str:
    """The shell code of a task. It needs only a POSIX shell in the image."""
    values = known_values(run, config, allocation)
    words = [_shell_word(argument, values) for argument in command(run, program)]
    unfit = shlex.quote(f"{config.paths.run_dir}/jobs/") + '"$SLURM_JOB_ID/unfit-${SLURMD_NODENAME:-local}"'
    where = (
        "on ${SLURMD_NODENAME:-this machine}" if runtime(config, run.cluster) == "none" else "in the image"
    )
    deepspeed = ds_config(run, config, program, allocation)
    lines = (
        "# One task of the program. Variables of the job are expanded; everything else is quoted.",
        f"cd {shlex.quote(program.directory)} || exit",
        *((RANKS,) if program.launcher == "srun" else ()),
        *(task_lines(deepspeed, IN_THE_JOB, config.paths.run_dir) if deepspeed else ()),
        f"command -v {words[0]} >/dev/null || {{",
        f'    missing="the command "{words[0]}" does not exist {where}"',
        '    echo "$missing" >&2',
        f'    (set -C; echo "$missing" >{unfit}) 2>/dev/null # follows no link, and another task may have written it',
        "    sleep 5 # Slurm ends all tasks after the first failure: let the other nodes report first",
        "    exit 127",
        "}",
        " ".join(("exec", *words)),
    )
    return "\n".join(lines) + "\n"


def ds_config(
    run: Run, config: RunConfig, program: ProgramConfig, allocation: Allocation
) -> dict[str, Any] | None:
    """DeepSpeed's complete configuration; None for a program without the section `deepspeed`."""
    if program.deepspeed is None:
        return None
    values = known_values(run, config, allocation)
    return deepspeed_section(program.deepspeed, allocation).complete_config(values)


def deepspeed_section(settings: DeepSpeedConfig, allocation: Allocation) -> Section:
    """The section program.deepspeed, whose code is imported only for runs that have it."""
    from hpcgen.planning.deepspeed.section import Section

    return Section(settings, allocation)


def _shell_word(argument: str, values: Mapping[str, str]) -> str:
    """The argument as one word of shell code. A variable of the job is expanded within double quotes."""
    word = ""
    literal = ""
    for part, is_name in programs.parts(argument):
        if is_name and part in IN_THE_JOB:
            word += (shlex.quote(literal) if literal else "") + f'"{IN_THE_JOB[part]}"'
            literal = ""
        else:
            literal += values.get(part, "") if is_name else part
    return word + shlex.quote(literal) if literal or not word else word


def program_problems(stage: Stage, run: Run, program: ProgramConfig) -> Iterator[Problem]:
    """Yields mistakes in the section `program`, and a time limit that leaves no time before the program must stop.

    The paths of `program` are absolute.
    """
    assert run.config.program is not None
    yield from programs.problems(run.config.program)  # in absolute paths, {RUN_DIR} is replaced
    if program.deepspeed is not None:
        allocation = make_allocation(stage, run.config, run.cluster, run.node_type)
        yield from deepspeed_section(program.deepspeed, allocation).problems(run)
    directory = Path(program.directory)
    is_seen = Path(*directory.parts[:2]).exists()  # otherwise, this machine does not have the file system
    if is_seen and not directory.is_dir():
        yield Problem("program.directory", f"is not a directory ({directory})", "correct the path")
    settings = stage_settings(stage, run.config, run.cluster)
    lead_s = settings.signal_lead_s or SIGNAL_LEAD_S
    if program.stop is not None and settings.time and 0 < seconds(settings.time) <= lead_s:
        reason = (
            f"leaves no time to run, because the program is asked to stop {duration(lead_s)} before the limit"
        )
        hint = f"use a longer limit, or set slurm.{stage.section}.signal_lead_s"
        yield place_of(stage, "time", run.config, run.cluster).problem(reason, hint)


def progress_warnings(program: ProgramConfig) -> Iterator[Problem]:
    """Yields a warning if the numbers in the names of checkpoints count copies of a file, in place of steps.

    The paths of `program` are absolute.
    """
    pattern = program.progress.checkpoints if program.progress else None
    if pattern is None:
        return
    name = _NAME_WITHOUT_STEP.fullmatch(pattern.rpartition("/")[2])
    copies = (path for path in Path("/").glob(pattern[1:]) if _COPY.fullmatch(path.name))
    if name is not None:
        reason = (
            f"may count copies: a tool that saves {name[1]}, then {name[1]}-v1, starts again from {name[1]}"
        )
    elif copy := next(copies, None):
        number = _COPY.sub(r"\1", copy.name)
        reason = f"takes {number} for the progress of {copy}, which is the number of a copy"
    else:
        return
    hint = "have the program save under names that end in the step, such as checkpoints/step_*"
    yield Problem("program.progress.checkpoints", reason, hint)


def memory_warnings(stage: Stage, run: Run, program: ProgramConfig) -> Iterator[Problem]:
    """Yields a warning if DeepSpeed needs more memory than a GPU or a node has, according to the estimate. Unless
    memory_check says so, this is an error.
    """
    if program.deepspeed is not None and run.config.memory_check == "warning":
        allocation = make_allocation(stage, run.config, run.cluster, run.node_type)
        yield from deepspeed_section(program.deepspeed, allocation).memory_problems(run)
