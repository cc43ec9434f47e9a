"""Programs that run another program in a container, in an environment or on other nodes: apptainer, enroot, uv,
mpirun."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hpcgen.check.lint.mpi import MPI_LAUNCHERS, mpi_call
from hpcgen.check.lint.words import Word


@dataclass(frozen=True)
class Wrapper:
    """Syntax of a wrapper's command line."""

    subcommands: tuple[str, ...] = ()
    """Subcommands that run a program; empty if the program follows the options."""
    with_value: frozenset[str] = frozenset()
    """Options that take the next word as their value."""
    takes_image: bool = False
    """True if an image or container precedes the program."""
    runs_python: bool = False
    """True if a Python file or `-m MODULE` can replace the program."""


_APPTAINER = Wrapper(
    ("exec", "run"),
    frozenset((
        "-B", "--bind", "--env", "--env-file", "-H", "--home", "--pwd", "--cwd", "-W", "--workdir", "-S", "--scratch",
        "--mount", "-o", "--overlay", "--app", "--add-caps", "--drop-caps", "--security", "--network", "--network-args",
        "--dns", "--hostname", "--nvccli-args", "--fusemount", "--cpus", "--memory", "--pid-file", "--apply-cgroups",
        "--blkio-weight", "--cpu-shares", "--cpuset-cpus", "--cpuset-mems", "--memory-reservation", "--memory-swap",
        "--pids-limit", "--pem-path",
    )),
    takes_image=True,
)  # fmt: skip
_SHIFTER = frozenset((
    "-i", "--image", "-V", "--volume", "-m", "--module", "-e", "--env", "--env-file", "-w", "--workdir",
))  # fmt: skip
_ENVIRONMENT = frozenset((
    "-n", "--name", "-p", "--prefix", "--python", "--with", "--extra", "--group", "--project", "--directory", "--cwd",
    "--env-file", "-e", "--environment", "--manifest-path", "-r", "--root-prefix", "--package", "--index-url",
))  # fmt: skip
_PODMAN = Wrapper(
    ("run", "shared-run", "exec"),
    frozenset((
        "-v", "--volume", "--mount", "-e", "--env", "--env-file", "-w", "--workdir", "--name", "-h", "--hostname",
        "--network", "--net", "--ipc", "--pid", "--uts", "--userns", "--shm-size", "--ulimit", "--gpus", "--device",
        "--entrypoint", "-u", "--user", "--group-add", "--cap-add", "--cap-drop", "--security-opt", "-m", "--memory",
        "--cpus", "--cpuset-cpus", "--tmpfs", "-l", "--label", "--runtime", "--annotation", "--log-driver", "--pull",
        "--platform", "-p", "--publish", "--add-host", "--dns",
    )),
    takes_image=True,
)  # fmt: skip

CONTAINERS = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "shifter": Wrapper(with_value=_SHIFTER),
    "enroot": Wrapper(
        ("start",), frozenset(("-m", "--mount", "-e", "--env", "-c", "--conf", "--rc")), takes_image=True
    ),
    **dict.fromkeys(("podman-hpc", "podman", "docker"), _PODMAN),
}
"""Programs that start a container -> their syntax.

Sources: `singularity exec --help`, `apptainer exec --help`, `enroot start --help`, `docker run --help`, shifter's and
podman-run's manuals.
"""

WRAPPERS = {
    **CONTAINERS,
    **dict.fromkeys(
        ("conda", "mamba", "micromamba", "poetry", "pixi", "pipenv"), Wrapper(("run",), _ENVIRONMENT)
    ),
    "uv": Wrapper(("run",), _ENVIRONMENT, runs_python=True),
}
"""CONTAINERS, and programs that start an environment. Sources: `uv run --help`, `conda run --help`, `poetry run`."""

_LIKELY_PROGRAM = re.compile(
    r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed|composer|conda|uv|env|numactl|nsys|bash|sh|"
    rf"{'|'.join(map(re.escape, sorted(MPI_LAUNCHERS)))})$|\.(sh|py)$"
)


def wrapped(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """The program that a wrapper such as `apptainer exec [options] IMAGE program` runs, or the words themselves."""
    if call := mpi_call(words):
        return call.program
    wrapper = WRAPPERS.get(words[0].text.rpartition("/")[2]) if words else None
    if wrapper is None:
        return words
    rest = words[1:]
    if wrapper.subcommands:
        rest = _without_options(rest, wrapper)  # apptainer --quiet exec
        if not rest or rest[0].text not in wrapper.subcommands:
            return words
        rest = rest[1:]
    rest = _without_options(rest, wrapper)
    if wrapper.runs_python and rest and re.search(r"^(-m|--module)$|\.py$", rest[0].text):
        return replace(rest[0], text="python"), *rest
    if not wrapper.takes_image:
        return rest
    # A variable before the image can contain several options: the program is the first word that looks like one.
    starts = (index for index, word in enumerate(rest) if index and _LIKELY_PROGRAM.search(word.text))
    return rest[next(starts, 1) :]


def _without_options(words: tuple[Word, ...], wrapper: Wrapper) -> tuple[Word, ...]:
    while words and words[0].text.startswith("-"):
        if wrapper.runs_python and words[0].text in ("-m", "--module"):
            break
        words = words[2 if words[0].text in wrapper.with_value else 1 :]
    return words
