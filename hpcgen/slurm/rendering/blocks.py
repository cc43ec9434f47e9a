"""Checks the names of blocks in a site's template. Jinja silently drops a misspelled block."""

from __future__ import annotations

from collections.abc import Iterator

from jinja2 import nodes

from hpcgen.errors import FilePlace, HpcgenError
from hpcgen.slurm.rendering.environment import ShellEnvironment
from hpcgen.slurm.rendering.template_errors import template_errors
from hpcgen.text import did_you_mean

REPLACED = {
    "header": "block directives, which can also contain comments",
    "functions": "block site, for the site's functions",
    "run_directory": "function site_prologue",
    "job_files": "function site_prologue",
    "nodes": "function prepare_node",
    "scratch": "function prepare_node, and task_environment+=(...) in function site_prologue",
    "image": "function site_prologue",
    "ready": "function prepare_node",
    "container": "block settings: {{ super() }}, then container+=(...) or step+=(...)",
    "rendezvous": "function site_prologue",
    "checks": "function site_prologue",
    "launch": "function launch",
    "cleanup": "function site_epilogue",
    "prologue": "function site_prologue",
    "epilogue": "function site_epilogue",
    "conclusion": "function site_epilogue",
}
"""Block of hpcgen 0.1's templates -> its replacement. Functions are defined in block site."""


def require_known_blocks(environment: ShellEnvironment, name: str) -> None:
    """Checks each template of the chain that `name` extends.

    Raises:
        HpcgenError: a top-level block does not exist in the templates that are extended.
    """
    with template_errors(environment.directories, name):
        chain = list(_chain(environment, name))
    known: set[str] = set()
    for position, (filename, tree) in enumerate(reversed(chain)):
        for block in (node for node in tree.body if isinstance(node, nodes.Block)):
            if position > 0 and block.name not in known:
                where = FilePlace(filename, block.lineno)
                if block.name in REPLACED:
                    hint = f"write {REPLACED[block.name]} (docs/templates.md)"
                    raise HpcgenError(f"block {block.name!r} no longer exists", hint, where=where)
                hint = did_you_mean(block.name, known) or f"blocks are {', '.join(sorted(known))}"
                raise HpcgenError(f"no shipped template has block {block.name!r}", hint, where=where)
        known |= {block.name for block in tree.find_all(nodes.Block)}


def _chain(environment: ShellEnvironment, name: str) -> Iterator[tuple[str, nodes.Template]]:
    """The template and the templates it extends, starting with itself."""
    assert environment.loader is not None
    source, filename, _ = environment.loader.get_source(environment, name)
    tree = environment.parse(source, name, filename)
    yield filename or name, tree
    parent = tree.find(nodes.Extends)
    if parent is not None and isinstance(parent.template, nodes.Const):
        yield from _chain(environment, parent.template.value)
