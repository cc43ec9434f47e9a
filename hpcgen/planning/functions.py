"""Checks that files define the functions named in the run file, with the arguments with which the trainer calls them.

The files are parsed and never imported.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.text import did_you_mean
from trainer.contract.code import signatures
from trainer.contract.code.imports import IMPORT_PATH, file_of, name_problem, named
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
        if wrong := name_problem(file):
            errors.append(Problem(key, wrong, "rename the file"))
            continue
        try:
            source = read_bytes(Path(file))
            tree = ast.parse(source)
        except OSError:
            continue
        except (SyntaxError, ValueError, RecursionError) as error:
            at = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            warnings.append(Problem(key, f"may fail: this Python cannot parse {file}{at} ({error})"))
            continue
        defined = names_defined(tree, source)
        if defined is None:
            continue
        if match["name"] not in defined:
            known = ", ".join(sorted(each for each in defined if not each.startswith("_"))) or "none"
            hint = did_you_mean(match["name"], defined) or f"it defines {known}"
            errors.append(Problem(key, f"names {match['name']}, which {file} does not define", hint))
        elif wrong := _signature_problem(key, definition(tree, match["name"])):
            errors.append(Problem(key, wrong, signatures.example(key, match["name"])))
    return errors, warnings


def names_defined(tree: ast.Module, source: bytes) -> set[str] | None:
    """The names that a module binds at its top level; None if they cannot be determined without running it."""
    found: set[str] = set()
    for statement in _statements(tree.body):
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


def definition(tree: ast.Module, name: str) -> ast.FunctionDef | ast.ClassDef | None:
    """The definition of a function or a class at the top level; None if there are several, or if it is made otherwise.

    A decorator may change the arguments.
    """
    found = [each for each in ast.walk(tree) if getattr(each, "name", None) == name or _binds(each, name)]
    if len(found) == 1 and isinstance(found[0], ast.FunctionDef | ast.ClassDef) and found[0] in tree.body:
        return None if found[0].decorator_list else found[0]
    return None


def _binds(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store)


def _signature_problem(key: str, defined: ast.FunctionDef | ast.ClassDef | None) -> str:
    """Why the trainer could not call what is `defined`. Empty if it can, or if that is not known."""
    if defined is None:
        return ""
    if isinstance(defined, ast.FunctionDef):
        return signatures.function_problem(key, _signature(defined.args))
    methods = {each.name: each for each in defined.body if isinstance(each, ast.FunctionDef)}
    if any(each.decorator_list for each in methods.values()):
        return ""
    inherits = bool(defined.bases or defined.keywords)
    made, called = methods.get("__init__"), methods.get("forward") or methods.get("__call__")
    return signatures.class_problem(
        key,
        _signature(made.args, is_method=True) if made else None if inherits else inspect.Signature(),
        _signature(called.args, is_method=True) if called else None,
        is_called=inherits or called is not None,
    )


def _signature(arguments: ast.arguments, *, is_method: bool = False) -> inspect.Signature:
    """The signature with these arguments; for a method, without the first."""
    kind = inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = []
    for index, each in enumerate(positional):
        is_only = index < len(arguments.posonlyargs)
        how = kind.POSITIONAL_ONLY if is_only else kind.POSITIONAL_OR_KEYWORD
        found.append(kind(each.arg, how, default=kind.empty if index < required else ...))
    if arguments.vararg is not None:
        found.append(kind(arguments.vararg.arg, kind.VAR_POSITIONAL))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(kind(each.arg, kind.KEYWORD_ONLY, default=kind.empty if default is None else ...))
    if arguments.kwarg is not None:
        found.append(kind(arguments.kwarg.arg, kind.VAR_KEYWORD))
    return inspect.Signature(found[1:] if is_method else found)


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
