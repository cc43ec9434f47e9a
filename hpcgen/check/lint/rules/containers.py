"""Containers: pyxis's options on srun, and mistakes that it accepts silently."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Step
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.text import few

PYXIS = "pyxis 0.24, args.c and pyxis_slurmstepd.c; measured with enroot 4.1"
PASSED = re.compile(
    r"(NCCL|UCX|SHARP|GLOO|TORCH|NVTE|OMPI_MCA|TORCH_NCCL)_\w+"
    r"|MASTER_(ADDR|PORT)|WORLD_SIZE|OMP_NUM_THREADS|CUDA_DEVICE_\w+|PYTORCH_CUDA_ALLOC_CONF"
)
"""Variables that must reach the tasks with the values of the script."""
SET_BY_IMAGE = ("PATH", "LD_LIBRARY_PATH", "HOME")


def _named(step: Step) -> set[str]:
    return {name for option in step.all("container-env")[-1:] for name in option.text.split(",")}


@rule(
    "container-env-gap",
    "note",
    "the image's value overrides the script's",
    source="pyxis, args.c, help of --container-env; enroot, conf/hooks/extra/50-slurm-pytorch.sh",
)
def container_env_gap(job: Job) -> Iterator[Hit]:
    """A variable that the image sets keeps the image's value, unless --container-env lists it.

    enroot's PyTorch hook, if the site installed it, sets MASTER_ADDR, MASTER_PORT, WORLD_SIZE and OMP_NUM_THREADS.
    Only reported if --container-env lists some variables and omits others.
    """
    exported = {item.name for item in job.script.exports if PASSED.fullmatch(item.name)}
    by_command = {id(launch.step.command): launch for launch in job.launches if launch.step}
    for step in job.work_steps:
        option = step.option("container-env")
        if (
            option is None
            or not step.has_container
            or step.is_open
            or (option.value and not option.value.known)
        ):
            continue
        launch = by_command.get(id(step.command))
        missing = sorted(exported - _named(step) - (launch.environment if launch else frozenset()))
        if missing:
            names = ",".join(sorted(_named(step) | set(missing)))
            yield Hit.at(
                option.word.line,
                f"--container-env omits {few(missing, 4)}: if the image sets it too, the image's value is used",
                f"--container-env={names}",
            )


@rule("container-env-value", "error", "--container-env takes names", source=PYXIS)
def container_env_value(job: Job) -> Iterator[Hit]:
    """--container-env=FOO=bar does not set FOO to bar: the option takes names only.

    A warning if the text of the step's `bash -c` sets the same names itself.
    """
    for step in job.steps:
        own = {
            item.name
            for item in job.script.assignments
            if item.outer is not None and job.script.commands[item.outer] is step.command
        }
        for option in step.all("container-env"):
            given = [
                name for name, equals, _ in (part.partition("=") for part in option.text.split(",")) if equals
            ]
            if given:
                yield Hit.at(
                    option.word.line,
                    f"--container-env takes names, and {given[0]} has a value here",
                    "export the variables, and list only their names",
                    severity="warning" if own.issuperset(given) else None,
                )


@rule("container-env-path", "warning", "paths of the host in the container", source=PYXIS)
def container_env_path(job: Job) -> Iterator[Hit]:
    """PATH, LD_LIBRARY_PATH and HOME name directories of the host, which the container may not have."""
    for step in job.steps:
        for option in step.all("container-env"):
            for name in set(option.text.split(",")) & set(SET_BY_IMAGE):
                yield Hit.at(
                    option.word.line,
                    f"the host's {name} replaces the image's",
                    f"remove {name} from the list",
                )


def is_tested(job: Job, name: str) -> bool:
    """True if the script tests a variable."""
    tests = (line for line in job.script.lines if re.search(r"(^|\W)(\[|test)\s", line))
    return any(re.search(rf"\b{re.escape(name)}\b", line) for line in tests)


@rule(
    "container-writable",
    "error",
    "a container is writable and read-only",
    source="pyxis, args.c, spank_option_container_writable",
)
def container_writable(job: Job) -> Iterator[Hit]:
    """--container-writable and --container-readonly are mutually exclusive: srun refuses the step."""
    for step in job.steps:
        option = step.option("container-writable")
        if option and step.option("container-readonly"):
            yield Hit.at(
                option.word.line,
                "--container-writable and --container-readonly are both given",
                "remove one of them",
            )


_SET_BY_ENVIRONMENT = ("IMAGE", "MOUNTS", "WORKDIR", "NAME", "SAVE", "ENV")


@rule("container-settings-twice", "warning", "pyxis ignores an exported setting", source="pyxis 0.24, args.c")
def container_settings_twice(job: Job) -> Iterator[Hit]:
    """pyxis reads PYXIS_CONTAINER_MOUNTS and similar variables only if srun lacks the option.

    The values are not joined: the mounts of the variable are missing in a step with --container-mounts.
    """
    for suffix in _SET_BY_ENVIRONMENT:
        name, option_name = f"PYXIS_CONTAINER_{suffix}", f"container-{suffix.lower()}"
        setting = job.exported(name)
        for step in job.steps if setting else ():
            option = step.option(option_name)
            if option and setting and name not in (option.value.variables if option.value else ()):
                yield Hit.at(
                    option.word.line,
                    f"--{option_name} overrides {name} on line {setting.line}",
                    f"put all of it into --{option_name}, or remove the option",
                )
