"""Which template files a script is made of: where each lies, what it extends, which blocks it replaces."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import nodes

from hpcgen.slurm.rendering.environment import SHIPPED_PREFIX, ShellEnvironment, template_origins
from hpcgen.slurm.rendering.template_errors import template_errors
from hpcgen.stages import FRAMES, STAGES

TEMPLATES = (*FRAMES, *STAGES)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that a template replaces, or with the first of a chain: has."""

    name: str
    line: int
    calls_super: bool


@dataclass(frozen=True, kw_only=True)
class TemplateFile:
    """One file of a chain."""

    name: str
    """As Jinja is asked for it: slurm/train.sbatch.j2, hpcgen/slurm/train.sbatch.j2."""
    path: Path
    directory: Path
    """The template directory that it lies in."""
    shipped: bool
    extends: str | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A file of a site that no script is made of."""

    path: Path
    reason: str


def template_file(name: str) -> str:
    """The file of a stage's template, or of a frame, in a template directory."""
    return f"slurm/{name}.sbatch.j2"


def template_chain(environment: ShellEnvironment, name: str) -> tuple[TemplateFile, ...]:
    """The template of a stage, or a frame, and all that it extends, itself first.

    Raises:
        HpcgenError: one of them is missing, unreadable or wrong.
    """
    with template_errors(environment.directories, template_file(name)):
        return tuple(_chain(environment, template_file(name)))


def _chain(environment: ShellEnvironment, name: str) -> Iterator[TemplateFile]:
    assert environment.loader is not None
    source, filename, _ = environment.loader.get_source(environment, name)
    tree = environment.parse(source, name, filename)
    path = Path(filename or name)
    parent = tree.find(nodes.Extends)
    extends = parent.template.value if parent and isinstance(parent.template, nodes.Const) else None
    directory = next(found for found in environment.directories if path.is_relative_to(found))
    yield TemplateFile(
        name=name,
        path=path,
        directory=directory,
        shipped=directory == environment.directories[-1],
        extends=extends,
        blocks=tuple(_block(node) for node in tree.find_all(nodes.Block)),
    )
    if extends is not None:
        yield from _chain(environment, extends)


def _block(node: nodes.Block) -> Block:
    calls = (call.node for call in node.find_all(nodes.Call))
    calls_super = any(isinstance(called, nodes.Name) and called.name == "super" for called in calls)
    return Block(name=node.name, line=node.lineno, calls_super=calls_super)


def block_names(chain: Sequence[TemplateFile]) -> tuple[str, ...]:
    """All blocks of a chain, those of the farthest ancestor first."""
    return tuple(dict.fromkeys(block.name for file in reversed(chain) for block in file.blocks))


def unused_files(environment: ShellEnvironment) -> tuple[Unused, ...]:
    """Files in the site's directories that look like templates and that no script is made of.

    Raises:
        HpcgenError: a template is missing, unreadable or wrong.
    """
    used = {
        Path(origin) for name in TEMPLATES for origin in template_origins(environment, template_file(name))
    }
    found = []
    for directory in environment.directories[:-1]:
        for path in sorted(directory.rglob("*")):
            relative = path.relative_to(directory)
            hidden = any(part.startswith(".") for part in relative.parts)
            looks_like_one = path.suffix == ".j2" or relative.parts[0] == "slurm"
            if looks_like_one and not hidden and path.is_file() and path not in used:
                found.append(Unused(path=path, reason=_reason(environment, directory, path, used)))
    return tuple(found)


def _reason(environment: ShellEnvironment, directory: Path, path: Path, used: set[Path]) -> str:
    relative = path.relative_to(directory).as_posix()
    first = next((d / relative for d in environment.directories[:-1] if d / relative in used), None)
    if first is not None:
        return f"{first} comes first"
    known = [template_file(name) for name in TEMPLATES]
    if close := difflib.get_close_matches(relative, known, n=1, cutoff=0.7):
        return f"did you mean {directory / close[0]}?"
    return f"files are {', '.join(known)}, and what these include"


def prefixed(name: str) -> str:
    """The name under which a site's template extends the shipped one."""
    return f"{SHIPPED_PREFIX}/{template_file(name)}"
