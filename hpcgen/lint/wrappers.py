"""Programs that run another program in a container or an environment: apptainer, shifter, enroot, uv and the like."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hpcgen.lint.words import Word


@dataclass(frozen=True)
class Wrapper:
    """How the command line of a wrapper is read."""

    subcommands: tuple[str, ...] = ()
    """Subcommands that run a program; none where the program follows the options."""
    with_value: frozenset[str] = frozenset()
    """Options that take the next word."""
    takes_image: bool = False
    """Whether an image or a container is named before the program."""


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
    "--env-file",
))  # fmt: skip

CONTAINERS = {
    "apptainer": _APPTAINER,
    "singularity": _APPTAINER,
    "shifter": Wrapper(with_value=_SHIFTER),
    "enroot": Wrapper(
        ("start",), frozenset(("-m", "--mount", "-e", "--env", "-c", "--conf", "--rc")), takes_image=True
    ),
}
"""Programs that start a container -> how they are read.

Sources: `singularity exec --help`, `apptainer exec --help`, `enroot start --help`, shifter's manual.
"""

WRAPPERS = CONTAINERS | dict.fromkeys(("uv", "conda", "poetry"), Wrapper(("run",), _ENVIRONMENT))
"""CONTAINERS, and programs that start an environment. Sources: `uv run --help`, `conda run --help`, `poetry run`."""

_LIKELY_PROGRAM = re.compile(r"(^|/)(python[\d.]*|torchrun|accelerate|deepspeed|bash|sh)$|\.(sh|py)$")


def wrapped(words: tuple[Word, ...]) -> tuple[Word, ...]:
    """The program that the words run, as `apptainer exec [options] IMAGE program` does; else the words themselves."""
    wrapper = WRAPPERS.get(words[0].text.rpartition("/")[2]) if words else None
    if wrapper is None:
        return words
    rest = words[1:]
    if wrapper.subcommands:
        while rest and rest[0].text.startswith("-"):
            rest = rest[1:]  # apptainer --quiet exec
        if not rest or rest[0].text not in wrapper.subcommands:
            return words
        rest = rest[1:]
    while rest and rest[0].text.startswith("-"):
        rest = rest[2 if rest[0].text in wrapper.with_value else 1 :]
    if not wrapper.takes_image:
        return rest
    # A variable before the image may hold several options: the program is the first word that looks like one.
    starts = (index for index, word in enumerate(rest) if index and _LIKELY_PROGRAM.search(word.text))
    return rest[next(starts, 1) :]
