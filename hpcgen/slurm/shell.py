"""The environment of the shell that runs hpcgen: variables that must not reach a job."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from hpcgen.planning.slurm_variables import CLIENT, PREFIXES, reach_sbatch

SHELL_SETTINGS = ("SHELLOPTS", "BASHOPTS", "BASH_ENV", "POSIXLY_CORRECT")
"""Variables that change how bash runs a script from its first line on, which in submitit's is without -p."""

EXPORTED_FUNCTION = re.compile(r"BASH_FUNC_(.+)(?:%%|\(\))")
HIDES_A_COMMAND = 'for name; do ! type -- "$name" >/dev/null 2>&1 || echo "$name"; done'

PYXIS = "PYXIS_CONTAINER_"
"""Prefix of variables that pyxis reads as options of sbatch: the batch script itself would run in the container."""

LAUNCHERS = (
    *PREFIXES, "SUBMITIT_", "TORCHELASTIC_", "OMPI_COMM_", "PMI_", "PMIX_", "RANK", "LOCAL_", "NODE_RANK", "GROUP_",
    "ROLE_", "WORLD_SIZE", "MASTER_",
)  # fmt: skip
"""Prefixes of variables from which programs learn their rank."""

SHARE_OF_ALLOCATION = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
"""Variables with the number of CPUs that a stage on this machine may use."""


def reach_job(directives: Iterable[str]) -> tuple[str, ...]:
    """Variables of this process that would change the job of a script with these directives."""
    of_pyxis = (name for name in os.environ if name.startswith(PYXIS))
    return tuple(sorted((*reach_sbatch(os.environ, directives), *of_pyxis)))


def of_outer_launcher() -> tuple[str, ...]:
    """Variables of this process that tell its children that they are ranks of an outer job."""
    kept = (*CLIENT, *SHARE_OF_ALLOCATION)
    return tuple(name for name in os.environ if name.startswith(LAUNCHERS) and name not in kept)


def shell_settings() -> tuple[str, ...]:
    """Variables of this process that change how bash runs submitit's script: settings, and functions with the name of a
    command. Other functions stay for the site's prologue, such as `module`."""
    functions = {found[1]: name for name in os.environ if (found := EXPORTED_FUNCTION.fullmatch(name))}
    if not functions:
        return SHELL_SETTINGS
    command = ["bash", "-p", "-c", HIDES_A_COMMAND, "bash", *functions]
    hiding = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return (*SHELL_SETTINGS, *(functions[name] for name in hiding))


@contextmanager
def without(names: Iterable[str]) -> Iterator[None]:
    """Removes variables from the environment that children of this process inherit."""
    removed = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(removed)
