"""Parses bash with shfmt (mvdan/sh), which writes its syntax tree as JSON and runs nothing."""

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
from types import MappingProxyType
from typing import Any

MAX_BYTES = 256 * 1024
"""Maximum size of a script. Slurm refuses scripts larger than 4 MiB."""
MAX_TREE_BYTES = 64 * 1024 * 1024
"""Maximum size of the tree in JSON. It grows with the square of the nesting: 10,000 brackets produce 300 MB."""
TIME_LIMIT_S = 20.0
MAX_BRACKETS = 40
"""Maximum number of words with brackets in arrays that are escaped for shfmt."""

_COMMENT = re.compile(rb"^((?:[^'\"\n]*[ \t])?#[^\n]*)\\$", re.MULTILINE)
"""A line that ends with a comment and a backslash."""

Node = Any
"""A node of the tree: a dict with "Type" and "Pos", as shfmt --to-json writes it."""


class ShellSyntaxError(Exception):
    """The text cannot be parsed. `line` is counted from 1.

    With `is_ours`, bash accepts the text but shfmt does not. With `is_placeholder`, the text still has a <name>.
    """

    def __init__(
        self, line: int, reason: str, *, is_ours: bool = False, is_placeholder: bool = False
    ) -> None:
        self.line, self.reason, self.is_ours, self.is_placeholder = line, reason, is_ours, is_placeholder
        super().__init__(f"line {line}: {reason}")


def parse(text: str) -> tuple[Node, bytes]:
    """The syntax tree of a script, and the bytes to which its offsets refer.

    Raises:
        ShellSyntaxError: the script has a syntax error, is nested too deeply, or cannot be parsed by shfmt.
        PackageNotFoundError: shfmt is not installed.
    """
    source = text.encode(errors="replace")
    output, complaint = _run(source)
    for _ in range(MAX_BRACKETS):
        # in an array, [0]*3+[1]*58 is a word for bash, but the start of [0]=value for shfmt
        found = re.match(r"(?:<[^>]*>:)?(\d+):(\d+): .*must be followed by `=`", complaint)
        if not found:
            break
        source = _escaped(source, int(found[1]), int(found[2]))
        output, complaint = _run(source)
    if complaint:
        ended = _COMMENT.sub(rb"\1 ", source).decode(errors="replace")
        if ended == text:
            raise _error(complaint, text)
        try:
            return parse(ended)
        except ShellSyntaxError:
            raise _error(complaint, text) from None
    ends: list[int] = []
    try:
        tree = json.loads(output, object_hook=functools.partial(_node, ends=ends))
    except (ValueError, RecursionError):
        raise ShellSyntaxError(1, "it is nested too deeply to be read", is_ours=True) from None
    if not ends:
        return tree, source
    # bash ends a comment at the end of the line, but shfmt reads on after a backslash there
    changed = bytearray(source)
    for end in ends:
        changed[end] = ord(" ")
    return parse(changed.decode(errors="replace"))


def _node(found: Node, *, ends: list[int]) -> Node:
    """A node as the readers of the tree expect it.

    Positions are hidden from walkers, which would spend most of their time in these dictionaries. shfmt leaves out the
    value of an empty literal, such as a backslash at the end of a line of a here-document.

    Appends the offset of a backslash at the end of a comment to `ends`.
    """
    if "Offset" in found:
        return MappingProxyType(found)
    if found.get("Type") == "Lit":
        found.setdefault("Value", "")
    elif "Hash" in found and (text := found.get("Text", "")).endswith("\\\n"):
        ends.append(found["Hash"]["Offset"] + len(text.encode()) - 1)
    return found


def _error(complaint: str, text: str) -> ShellSyntaxError:
    found = re.match(r"(?:<[^>]*>:)?(\d+|\?):(?:\d+|\?):\s*(.*)", complaint)
    line = int(found[1]) if found and found[1].isdigit() else text.count("\n") + 1
    return ShellSyntaxError(line, found[2] if found else complaint, is_ours=_bash_reads(text))


def _escaped(source: bytes, line: int, column: int) -> bytes:
    """`source` with a backslash before the byte at a line and column."""
    lines = source.split(b"\n")
    at = lines[line - 1]
    lines[line - 1] = at[: column - 1] + b"\\" + at[column - 1 :]
    return b"\n".join(lines)


def _bash_reads(text: str) -> bool:
    """True if bash accepts the text. With -n, it runs nothing."""
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
    """The output and error message of shfmt, limited to MAX_TREE_BYTES and TIME_LIMIT_S."""
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
                process.kill()  # it has ended, or its output is too large
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
    next_to_python = Path(sysconfig.get_path("scripts")) / "shfmt"
    found = str(next_to_python) if next_to_python.is_file() else shutil.which("shfmt")
    if found is None:
        from importlib.metadata import PackageNotFoundError

        raise PackageNotFoundError("shfmt-py")
    return found


def names_in(node: Node) -> Iterator[str]:
    """All variables that are expanded in a node."""
    if isinstance(node, dict):
        if node.get("Type") == "ParamExp" and node.get("Param"):
            yield node["Param"]["Value"]
        for inner in node.values():
            yield from names_in(inner)
    elif isinstance(node, list):
        for inner in node:
            yield from names_in(inner)
