"""Checks that files define the functions named in the run file, by parsing and never importing them."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean
from trainer.contract.code.imports import IMPORT_PATH, file_of, named
from trainer.contract.files.regular_file import read_bytes


def function_problems(config: RunConfig) -> tuple[list[Problem], list[Problem]]:
    """Returns errors for functions that their files do not define, and warnings for files that cannot be parsed.

    The paths of `config` are absolute. Installed modules are not checked, because the job may use another environment.
    Files that cannot be read here are reported as missing inputs of the stage.
    """
    errors, warnings = [], []
    for key, path in named(config).items():
        file = file_of(path)
        match = IMPORT_PATH.fullmatch(path)
        if file is None or match is None:
            continue
        try:
            defined = names_defined(read_bytes(Path(file)))
        except OSError:
            continue
        except (SyntaxError, ValueError, RecursionError) as error:
            at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            warnings.append(Problem(key, f"may fail: this Python cannot parse {file}{at} ({error})"))
            continue
        if defined is not None and match["name"] not in defined:
            known = ", ".join(sorted(each for each in defined if not each.startswith("_"))) or "none"
            hint = did_you_mean(match["name"], defined) or f"it defines {known}"
            errors.append(Problem(key, f"names {match['name']}, which {file} does not define", hint))
    return errors, warnings


def names_defined(source: bytes) -> set[str] | None:
    """The names that a module binds at its top level; None if they cannot be determined without running it.

    Raises:
        SyntaxError: this Python cannot parse the source.
        ValueError: the source is not text.
    """
    found: set[str] = set()
    for statement in _statements(ast.parse(source).body):
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
        else:
            found |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
    is_dynamic = found & {"*", "__getattr__"} or any(
        name in source for name in (b"globals(", b"exec(", b"setattr(")
    )
    return None if is_dynamic else found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements that run on import, including those within if, for, try and with."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for block in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _statements(block.body)
