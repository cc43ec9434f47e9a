"""Bash text as a syntax tree. The parser is shfmt's (mvdan/sh), which writes its tree as JSON and runs nothing."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sysconfig
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_BYTES = 256 * 1024
"""Of a script. Slurm itself refuses scripts of more than 4 MiB."""
MAX_TREE_BYTES = 64 * 1024 * 1024
"""Of the tree in JSON. It grows with the square of the nesting: ten thousand brackets make 300 MB."""
TIME_LIMIT_S = 20.0
MAX_BRACKETS = 40
"""Words with brackets in arrays that are escaped for shfmt."""

Node = Any
"""A node of the tree: a dict with "Type" and "Pos", as shfmt --to-json writes it."""


class ShellSyntaxError(Exception):
    """The text cannot be read; `line` is counted from 1.

    `is_ours` where bash itself takes it, `is_placeholder` where a <name> is left in it.
    """

    def __init__(
        self, line: int, reason: str, *, is_ours: bool = False, is_placeholder: bool = False
    ) -> None:
        self.line, self.reason, self.is_ours, self.is_placeholder = line, reason, is_ours, is_placeholder
        super().__init__(f"line {line}: {reason}")


def parse(text: str) -> tuple[Node, bytes]:
    """The tree of a script, and the bytes that its offsets count.

    Raises:
        ShellSyntaxError: bash would not take the script, or it is too deep or too strange to be read.
        PackageNotFoundError: shfmt is not installed.
    """
    source = text.encode(errors="replace")
    output, complaint = _run(source)
    for _ in range(MAX_BRACKETS):
        # a word such as [0]*3+[1]*58 in an array is one to bash, and the beginning of [0]=value to shfmt
        found = re.match(r"(?:<[^>]*>:)?(\d+):(\d+): .*must be followed by `=`", complaint)
        if not found:
            break
        source = _escaped(source, int(found[1]), int(found[2]))
        output, complaint = _run(source)
    if complaint:
        raise _error(complaint, text)
    try:
        return json.loads(output), source
    except (ValueError, RecursionError):
        raise ShellSyntaxError(1, "it is nested too deeply to be read", is_ours=True) from None


def _error(complaint: str, text: str) -> ShellSyntaxError:
    found = re.match(r"(?:<[^>]*>:)?(\d+|\?):(?:\d+|\?):\s*(.*)", complaint)
    line = int(found[1]) if found and found[1].isdigit() else text.count("\n") + 1
    return ShellSyntaxError(line, found[2] if found else complaint, is_ours=_bash_reads(text))


def _escaped(source: bytes, line: int, column: int) -> bytes:
    """`source` with a backslash before one of its bytes."""
    lines = source.split(b"\n")
    at = lines[line - 1]
    lines[line - 1] = at[: column - 1] + b"\\" + at[column - 1 :]
    return b"\n".join(lines)


def _bash_reads(text: str) -> bool:
    """Whether bash takes the text; -n reads without running anything."""
    bash = shutil.which("bash")
    if bash is None:
        return False
    try:
        done = subprocess.run(
            [bash, "--norc", "--noprofile", "-n"],
            input=text.encode(errors="replace"),
            env={},
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _run(source: bytes) -> tuple[bytes, str]:
    """What shfmt writes and what it complains about; at most MAX_TREE_BYTES, for at most TIME_LIMIT_S."""
    with tempfile.TemporaryFile() as script, tempfile.TemporaryFile() as errors:
        script.write(source)
        script.seek(0)
        command = [find_shfmt(), "--to-json", "--language-dialect=bash"]
        with subprocess.Popen(command, stdin=script, stdout=subprocess.PIPE, stderr=errors) as process:
            assert process.stdout
            timer = threading.Timer(TIME_LIMIT_S, process.kill)
            timer.start()
            try:
                output = process.stdout.read(MAX_TREE_BYTES)
                process.kill()  # it has ended, or has too much to say
            finally:
                timer.cancel()
        errors.seek(0)
        return output, errors.read(1000).decode(errors="replace").strip()


@functools.cache
def find_shfmt() -> str:
    """Path of the program shfmt.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    beside = Path(sysconfig.get_path("scripts")) / "shfmt"
    found = str(beside) if beside.is_file() else shutil.which("shfmt")
    if found is None:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError("shfmt-py")
    return found


def names_in(node: Node) -> Iterator[str]:
    """Every variable that is expanded within a node."""
    if isinstance(node, dict):
        if node.get("Type") == "ParamExp" and node.get("Param"):
            yield node["Param"]["Value"]
        for inner in node.values():
            yield from names_in(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from names_in(inner)
