"""Hostile strings, the fields they can stand in, and programs that only write down how they were called."""

from __future__ import annotations

import copy
import dataclasses
import os
import random
import stat
import subprocess
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from tests.rendering.scripts import CANARY, HOSTILE_WORDS, UNPRINTABLE

KEY = "a key"
"""In a place: the hostile string is a key of the mapping there."""
Place = tuple[str | int, ...]

FRAGMENTS = (
    *(
        "$(>canary)",
        "`>canary`",
        "'; >canary; '",
        '"; >canary; "',
        "; >canary;",
        "\n>canary\n",
        "\n#SBATCH --wrap=x\n",
    ),
    *(
        " ",
        "'",
        '"',
        "\\",
        "$",
        "`",
        ";",
        "&",
        "|",
        "<",
        ">",
        "(",
        ")",
        "{",
        "}",
        "*",
        "?",
        "[",
        "]",
        "~",
        "!",
        "#",
    ),
    *(
        "%",
        "^",
        "=",
        ",",
        ":",
        "@",
        "+",
        "-",
        "--",
        "..",
        "../",
        "/",
        "//",
        "a",
        "B",
        "0",
        "END_OF_TEXT",
        "{{ 7 }}",
    ),
    *(
        "\t",
        "\r",
        "\0",
        "\x1b[2J",
        "\x7f",
        "\u2028",
        "\u202e",
        "\ud800",
        "\ufeff",
        "é",
        "日",
        "🚀",
        "a" * 300,
    ),
    *(
        "{% raw %}",
        "${HOME}",
        "$((1+1))",
        "a[$(>canary)]",
        "<(>canary)",
        "EOF",
        "%j",
        "%x",
        "sha256",
        ".sqsh",
        ".yaml",
    ),
)
STARTS = ("", "", "a", "/", "/data/", "-", "--a=", "gpu:", "./", "nvcr.io#a/", "A")


def hostile_strings(rng: random.Random) -> Iterator[str]:
    """Without end: known tricks, and what comes of joining them behind harmless beginnings."""
    while True:
        start = rng.choice(STARTS)
        if rng.random() < 0.4:
            yield start + rng.choice((*HOSTILE_WORDS, *UNPRINTABLE))
        elif rng.random() < 0.02:
            yield start + rng.choice(FRAGMENTS) * 2000
        else:
            yield start + "".join(rng.choices(FRAGMENTS, k=rng.randint(1, 6)))


def text_places(hint: Any, place: Place = ()) -> Iterator[Place]:
    """Every place of a configuration class where a text can be written, found from the class alone."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from text_places(arguments[0], place)
    elif origin in (Union, types.UnionType):
        for argument in arguments:
            yield from text_places(argument, place)
    elif origin is tuple:
        yield from text_places(arguments[0], (*place, 0))
    elif origin is dict:
        yield from text_places(arguments[0], (*place, KEY))
        yield from text_places(arguments[1], (*place, "A"))
    elif origin is Literal or hint is str:
        yield place
    elif dataclasses.is_dataclass(hint):
        for name, inner in typing.get_type_hints(hint, include_extras=True).items():
            if typing.get_origin(inner) is not typing.ClassVar:
                yield from text_places(inner, (*place, name))


def placed(values: dict[str, Any], place: Place, text: str) -> dict[str, Any]:
    """A copy of the values with the text at the place; what is missing on the way is made."""
    root = copy.deepcopy(values)
    section: Any = root
    *way, last = place
    for step, following in zip(way, place[1:], strict=True):
        empty: Any = [] if isinstance(following, int) else {}
        if isinstance(step, int):
            section.extend([empty] * (step + 1 - len(section)))
        elif section.get(step) is None:
            section[step] = empty
        section = section[step]
    if last == KEY:
        section[text] = section.pop("A", {} if place[0] == "partitions" else "x")
    elif isinstance(last, int):
        section[last:] = [text]
    else:
        section[last] = text
    return root


STAND_IN = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >>"$CALLS"
case "${0##*/} $*" in
"srun "*" -m "*) env -0 >"$CALLS.environment" ;;
"srun "*" prepare_node "*) while [ "$1" != bash ]; do shift; done; "$@" >/dev/null 2>&1 ;;
"timeout "*) shift; exec "$@" ;;
"scontrol show hostnames"*) echo node-1 ;;
"scontrol show node"*) echo "NodeName=node-1 NodeAddr=10.0.0.1 NodeHostName=node-1 Port=1" ;;
esac
exit 0
"""
REPLACED = ("srun", "scontrol", "chmod", "mkdir", "mv", "rm", "timeout")


@dataclass(frozen=True)
class Recording:
    """What a script did: each call with its arguments, and the environment of its last task."""

    calls: tuple[tuple[str, ...], ...]
    environment: dict[str, str]
    output: str

    def step(self, *words: str) -> tuple[str, ...]:
        """The one srun call that has these words in this order, side by side."""
        size = len(words)
        [found] = [
            call
            for call in self.calls
            if call[0] == "srun" and any(call[i : i + size] == words for i in range(len(call)))
        ]
        return found


def run_script(script: str, directory: Path, run_dir: str, secrets: Sequence[str] = ()) -> Recording:
    """Runs a batch script with stand-ins for what would change this machine or needs a cluster.

    Its run directory is not made by the script, since `mkdir` is a stand-in: where it lies in `directory`, it
    is there beforehand, so that the trainer's configuration can be written.
    """
    programs = directory / "bin"
    programs.mkdir(exist_ok=True)
    for name in REPLACED:
        (programs / name).write_text(STAND_IN)
        (programs / name).chmod(stat.S_IRWXU)
    if Path(run_dir).is_relative_to(directory):
        Path(run_dir, "jobs", "77").mkdir(parents=True, exist_ok=True)
    (directory / "calls").unlink(missing_ok=True)
    (directory / "job.sh").write_text(script, encoding="utf-8")
    environment = {
        **{"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(directory / "calls"), "HOME": str(directory)},
        **{"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-1", "LC_ALL": "C.UTF-8", "NCCL_X": "leak"},
        **dict.fromkeys(secrets, "hunter2"),
    }
    found = subprocess.run(
        ["bash", "job.sh"], cwd=directory, env=environment, capture_output=True, timeout=60, check=False
    )
    output = (found.stdout + found.stderr).decode(errors="replace")
    assert not list(directory.rglob(f"*{CANARY}*")), f"a planted command ran\n{output}"
    calls = (
        (directory / "calls").read_bytes().decode().split("\0")[:-1] if (directory / "calls").exists() else []
    )
    return Recording(tuple(_split(calls)), _environment(directory / "calls.environment"), output)


def _split(words: list[str]) -> Iterator[tuple[str, ...]]:
    call: list[str] = []
    for word in words:
        if word == "\n":
            yield tuple(call)
            call = []
        else:
            call.append(word)


def _environment(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(path.read_bytes()).split("\0") if entry)
    return {name: value for name, _, value in pairs}
