"""Whether the files of the user's functions define them: read as text, never imported."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from trainer.contract.imports import IMPORT_PATH, file_of
from trainer.contract.provenance import CODE


def function_problems(config: RunConfig) -> tuple[list[Problem], list[Problem]]:
    """Errors: functions that their files do not define. Warnings: files that this Python cannot parse.

    The paths of `config` are absolute. What is installed is not looked for: the job may run elsewhere. Files that
    cannot be read here are left to the planning of the stage's inputs.
    """
    errors, warnings = [], []
    for key in CODE:
        section, _, name = key.partition(".")
        path = getattr(getattr(config, section), name)
        file = file_of(path) if path else None
        match = IMPORT_PATH.fullmatch(path) if path else None
        if file is None or match is None:
            continue
        try:
            defined = names_defined(Path(file).read_bytes())
        except OSError:
            continue
        except (SyntaxError, ValueError, RecursionError) as error:
            at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            warnings.append(Problem(key, f"may fail: this Python cannot parse {file}{at} ({error})"))
            continue
        if defined is not None and match["name"] not in defined:
            near = difflib.get_close_matches(match["name"], defined, n=1)
            known = ", ".join(sorted(each for each in defined if not each.startswith("_"))) or "none"
            hint = f"did you mean {near[0]}?" if near else f"it has {known}"
            errors.append(Problem(key, f"names {match['name']}, which {file} does not define", hint))
    return errors, warnings


def names_defined(source: bytes) -> set[str] | None:
    """The names that a module binds at its top level; None where that cannot be told without running it.

    Raises:
        SyntaxError: this Python cannot parse it.
        ValueError: it is not text.
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
    """Statements that run when the module does, those within if, for, try and with among them."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for block in (*getattr(statement, "handlers", []), *getattr(statement, "cases", [])):
            yield from _statements(block.body)
