"""A small corpus of real text that is on every machine: sources and docstrings of Python's standard library."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from hpcgen.errors import HpcgenError
from hpcgen.files import private_file, publish
from hpcgen.text import counted

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
"""Directories to skip: installed packages, and tests with deliberately odd files."""


@dataclass(frozen=True)
class SampleReport:
    """Result of `write_sample`."""

    path: str
    documents: int
    text_bytes: int
    """Total size of the texts in UTF-8."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return f"{self.path}  ({counted(self.documents, 'document')}, {self.text_bytes:,} bytes of text)"


def write_sample(target: Path, *, max_mb: float = 8.0, overwrite: bool = False) -> SampleReport:
    """Writes the corpus as JSON Lines to `target`, whose name ends in .jsonl or .jsonl.zst.

    Documents are in the order of their paths in the library, up to `max_mb` megabytes (10^6 bytes) of text.
    The same Python version produces the same bytes, and a `target` that already has them is left alone.

    Raises:
        HpcgenError: `target` has other content, the library has no sources, or the file cannot be written.
    """
    if not target.name.endswith((".jsonl", ".jsonl.zst")):
        raise HpcgenError("the name must end in .jsonl or .jsonl.zst", where=target)
    lines, text_bytes = [], 0
    for source, text in _documents(Path(sysconfig.get_paths()["stdlib"])):
        if not text:
            continue
        if text_bytes + len(text.encode()) > max_mb * 1e6:
            break
        text_bytes += len(text.encode())
        lines.append(json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n")
    if not lines:
        raise HpcgenError(f"--max-mb = {max_mb} is too small for the first document", "use a larger value")
    content = "".join(lines).encode()
    if target.suffix == ".zst":
        content = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(content)
    _write(target, content, overwrite)
    return SampleReport(str(target), len(lines), text_bytes)


def _documents(library: Path) -> Iterator[tuple[str, str]]:
    """Yields the name and text of two documents per module: its source, and its docstrings."""
    modules = sorted(path.relative_to(library).as_posix() for path in _sources(library))
    if not modules:
        raise HpcgenError(
            f"{library} has no Python sources", "use a Python whose standard library is installed as files"
        )
    for path in modules:
        with tokenize.open(library / path) as file:
            source = file.read()
        yield path, source
        yield f"{path}#docstrings", "\n\n".join(_docstrings(ast.parse(source)))


def _sources(library: Path) -> Iterator[Path]:
    """Yields the library's own sources. Does not enter directories of installed packages, which can be large."""
    for directory, inner, files in os.walk(library):
        inner[:] = [name for name in inner if name not in _NOT_THE_LIBRARY]
        yield from (Path(directory, name) for name in files if name.endswith(".py"))


def _docstrings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring:
                yield f"{getattr(node, 'name', '')}\n{docstring}".strip()


def _write(target: Path, content: bytes, overwrite: bool) -> None:
    try:
        if target.exists() and not overwrite:
            if target.read_bytes() == content:
                return
            raise HpcgenError(
                f"{target} already exists with different content", "choose another name, or pass --overwrite"
            )
        with private_file(target) as file:
            file.write(content)
            publish(file, target)
    except OSError as error:
        raise HpcgenError(f"cannot write {target}: {error.strerror}") from error
