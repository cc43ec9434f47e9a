"""Hostile strings, the fields that can contain them, and programs that only record how they were called."""

from __future__ import annotations

import copy
import dataclasses
import functools
import os
import random
import shutil
import stat
import subprocess
import types
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union
from unittest import mock

from hpcgen.config import node_types
from hpcgen.slurm.rendering import environment as templates
from tests.patience import PATIENCE_S
from tests.rendering.scripts import CANARY, HOSTILE_WORDS, UNPRINTABLE
from trainer.contract.config import field_hints

KEY = "a key"
"""In a place: the hostile string is a key of the mapping there."""
Place = tuple[str | int, ...]

# fmt: off
FRAGMENTS = (
    "$(>canary)", "`>canary`", "'; >canary; '", '"; >canary; "', "; >canary;", "\n>canary\n", "\n#SBATCH --wrap=x\n",
    " ", "'", '"', "\\", "$", "`", ";", "&", "|", "<", ">", "(", ")", "{", "}", "*", "?", "[", "]", "~", "!", "#",
    "%", "^", "=", ",", ":", "@", "+", "-", "--", "..", "../", "/", "//", "a", "B", "0", "END_OF_TEXT", "{{ 7 }}",
    "\t", "\r", "\0", "\x1b[2J", "\x7f", "\u2028", "\u202e", "\ud800", "\ufeff", "é", "日", "🚀", "a" * 300,
    "{% raw %}", "${HOME}", "$((1+1))", "a[$(>canary)]", "<(>canary)", "EOF", "%j", "%x", "sha256", ".sqsh", ".yaml",
)
# fmt: on
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
        for name, inner in field_hints(hint).items():
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


@contextmanager
def nothing_read_twice() -> Iterator[None]:
    """Node types and templates do not change during a test: read and compiled once, not for each string."""
    ours = templates.make_environment()
    with (
        mock.patch(
            "hpcgen.config.profiles.load_with_files",
            functools.cache(node_types.load_with_files),
        ),
        mock.patch("hpcgen.slurm.rendering.script.make_environment", return_value=ours),
        mock.patch(
            "hpcgen.slurm.rendering.script.template_origins", functools.cache(templates.template_origins)
        ),
    ):
        yield


def text_at(config: Any, place: Place) -> str:
    """The value of a loaded configuration at the place; for a key, the last key of the mapping there."""
    for step in place:
        if step == KEY:
            return list(config)[-1]
        config = config[step] if isinstance(config, dict | tuple) else getattr(config, step)
    return config


STAND_IN = """#!/bin/sh
name= after= # of the script's function that a node runs: bash -c TEXT NAME ARGUMENT...
for word; do
    case $after in text) name=$word; break ;; -c) after=text ;; *) after=$word ;; esac
done
[ "$name" != guard_scratch ] || exit 0 # in the background: its record would land in another one
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n\\0'; } >>"$CALLS"
case "${0##*/} $name" in
"srun make_node_scratch") while [ "$1" != bash ]; do shift; done; "$@" >/dev/null 2>&1; exit 0 ;;
"srun check_host") while [ "$1" != check_host ]; do shift; done; : >"$2/node-1-host.json"; : >"$2/node-1.ok"; exit 0 ;;
esac 2>/dev/null
case "${0##*/} $*" in
"srun --help") echo --container-image ;;
"srun "*" --kill-on-bad-exit=1 "*) env -0 >"$CALLS.environment" ;;
"timeout "*) while case $1 in -*) ;; *) false ;; esac; do shift; done; shift; exec "$@" ;;
"scontrol show hostnames"*) echo node-1 ;;
"scontrol show node"*) echo "NodeName=node-1 NodeAddr=10.0.0.1 NodeHostName=node-1 Port=1" ;;
esac 2>/dev/null
exit 0
"""
MODULE = """module() { { printf '%s\\0' module "$@"; printf '\\n\\0'; } >>"$CALLS"; }
"""
"""File of a module system. What is installed on this machine knows no module of a hostile name."""
REPLACED = ("srun", "scontrol", "squeue", "chmod", "mkdir", "mv", "rm", "timeout")


@dataclass(frozen=True)
class Recording:
    """The calls of a script with their arguments, and the environment of its last task."""

    calls: tuple[tuple[str, ...], ...]
    environment: dict[str, str]
    output: str

    def calls_of(self, program: str, word: str) -> list[tuple[str, ...]]:
        """The calls of a program that have this word among their arguments."""
        return [call for call in self.calls if call[0] == program and word in call]

    def call(self, program: str, word: str) -> tuple[str, ...]:
        """The only such call."""
        [found] = self.calls_of(program, word)
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
    (programs / "init").mkdir(exist_ok=True)
    (programs / "init" / "bash").write_text(MODULE)
    if Path(run_dir).is_relative_to(directory):
        for job in ("77", "77_0"):
            Path(run_dir, "jobs", job, "nodes-0").mkdir(parents=True, exist_ok=True)
    for left in (*directory.glob("calls*"), *directory.rglob("*.77.*"), *directory.rglob("*.77_0.*")):
        left.unlink()
    (directory / "job.sh").write_text(script, encoding="utf-8")
    environment = {
        **{"PATH": f"{programs}:/usr/bin:/bin", "CALLS": str(directory / "calls"), "HOME": str(programs)},
        **{"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node-1", "SLURMD_NODENAME": "node-1"},
        **{"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": "0"},
        **{"LC_ALL": "C.UTF-8", "NCCL_X": "leak", "MODULESHOME": str(programs)},
        **dict.fromkeys(secrets, "hunter2"),
    }
    found = subprocess.run(
        ["bash", "job.sh"],
        cwd=directory,
        env=environment,
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )
    output = (found.stdout + found.stderr).decode(errors="replace")
    require_no_canary(directory, output)
    calls = (
        (directory / "calls").read_bytes().decode().split("\0")[:-1] if (directory / "calls").exists() else []
    )
    return Recording(tuple(_split(calls)), _environment(directory / "calls.environment"), output)


def require_no_canary(directory: Path, output: str = "") -> None:
    """Fails the test when a planted command has written its file."""
    assert not list(directory.rglob(f"*{CANARY}*")), f"a planted command ran\n{output}"


def require_shellcheck(script: str) -> None:
    """shellcheck, where it is installed, has nothing to say about a script that holds hostile values.

    A value may hold a $ or end with a backslash (SC2016, SC1003); the other rules are not about values.
    """
    if shutil.which("shellcheck") is None:
        return
    command = ["shellcheck", "--norc", "--exclude=SC1003,SC2016", "--shell=bash", "-"]
    checked = subprocess.run(command, input=script.encode(), capture_output=True, check=False)
    assert checked.stdout.decode() == ""


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
