"""The template files of a script: their directories, the templates they extend, and the blocks they replace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import nodes

from hpcgen.config.stages import FRAMES, STAGE_ROWS
from hpcgen.slurm.rendering.environment import (
    SHIPPED_PREFIX,
    ShellEnvironment,
    make_environment,
    template_origins,
)
from hpcgen.slurm.rendering.template_errors import template_errors
from hpcgen.text import nearest

TEMPLATES = (*FRAMES, *STAGE_ROWS)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block that a template defines or replaces."""

    name: str
    line: int
    calls_super: bool


@dataclass(frozen=True, kw_only=True)
class TemplateFile:
    """A file in a chain of templates."""

    name: str
    """Name in Jinja: slurm/train.sbatch.j2 or hpcgen/slurm/train.sbatch.j2."""
    path: Path
    directory: Path
    """The template directory that contains it."""
    shipped: bool
    extends: str | None
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True)
class Unused:
    """A site's file that no template uses."""

    path: Path
    reason: str


def template_file(name: str) -> str:
    """The file name of the template of a stage or frame in a template directory."""
    return f"slurm/{name}.sbatch.j2"


def template_chain(environment: ShellEnvironment, name: str) -> tuple[TemplateFile, ...]:
    """The template of a stage or frame and all templates it extends, starting with itself.

    Raises:
        HpcgenError: one of them is missing, unreadable or invalid.
    """
    with template_errors(environment.directories, template_file(name)):
        return tuple(_chain(environment, template_file(name)))


def _chain(environment: ShellEnvironment, name: str) -> Iterator[TemplateFile]:
    assert environment.loader is not None
    source, filename, _ = environment.loader.get_source(environment, name)
    path = Path(filename or name)
    extends, blocks = environment.found(_parent_and_blocks, source, name, str(path))
    directory = next(found for found in environment.directories if path.is_relative_to(found))
    yield TemplateFile(
        name=name,
        path=path,
        directory=directory,
        shipped=directory == environment.directories[-1],
        extends=extends,
        blocks=blocks,
    )
    if extends is not None:
        yield from _chain(environment, extends)


def _parent_and_blocks(tree: nodes.Template) -> tuple[str | None, tuple[Block, ...]]:
    parent = tree.find(nodes.Extends)
    extends = parent.template.value if parent and isinstance(parent.template, nodes.Const) else None
    return extends, tuple(_block(node) for node in tree.find_all(nodes.Block))


def _block(node: nodes.Block) -> Block:
    calls = (call.node for call in node.find_all(nodes.Call))
    calls_super = any(isinstance(called, nodes.Name) and called.name == "super" for called in calls)
    return Block(name=node.name, line=node.lineno, calls_super=calls_super)


def block_names(chain: Sequence[TemplateFile]) -> tuple[str, ...]:
    """All blocks of a chain, starting with the blocks of the base template."""
    return tuple(dict.fromkeys(block.name for file in reversed(chain) for block in file.blocks))


def shipped_blocks(name: str) -> tuple[str, ...]:
    """The blocks of the shipped template of a stage or frame, in the order of the script."""
    return block_names(template_chain(make_environment(), name))


def unused_files(environment: ShellEnvironment) -> tuple[Unused, ...]:
    """Files in the site's directories that look like templates but are not used.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid.
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
        return f"{first} takes precedence"
    known = {Path(file).name: file for file in map(template_file, TEMPLATES)}
    if close := nearest(path.name, known):
        return f"did you mean {directory / known[close]}?"
    return f"templates are {', '.join(known.values())}, and files that they include"


def prefixed(name: str) -> str:
    """The name under which a site's template extends the shipped one."""
    return f"{SHIPPED_PREFIX}/{template_file(name)}"
