"""Reads a batch script without running it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from hpcgen.check.lint import sbatch
from hpcgen.check.lint.script import Script
from hpcgen.check.lint.syntax import MAX_BYTES, ShellSyntaxError
from hpcgen.check.lint.walker import Walker
from hpcgen.check.lint.words import Ranges
from hpcgen.errors import FilePlace, HpcgenError


def read(
    text: str,
    path: str = "-",
    *,
    trusts_defaults: bool = False,
    follows_values: bool = True,
    expanded: Ranges | None = None,
    options: Mapping[str, str | None] = MappingProxyType({}),
) -> Script:
    """Reads a script. If it has a syntax error or its interpreter is not a shell, only the directives are read.

    With `trusts_defaults`, conditions on ${NAME:-value} are resolved as if NAME were not in the environment.
    Without `follows_values`, all words are unknown and texts of `bash -c` are not read, which takes half the time.
    `expanded` are the parts that another script's shell has expanded, as in sbatch <<EOF, with variables as written.
    `options` are those of the call of sbatch, which override directives.

    Raises:
        HpcgenError: the text is too long or contains NUL characters.
    """
    if "\0" in text:
        raise HpcgenError(
            "is not a text file: it contains NUL characters", "give a shell script", where=FilePlace(path)
        )
    if len(text) > MAX_BYTES:
        raise HpcgenError(
            f"is longer than {MAX_BYTES // 1024} KiB", "give a shell script", where=FilePlace(path)
        )
    lines = tuple(text.split("\n"))
    directives = sbatch.overridden(sbatch.directives(lines), options)
    script = Script(path=path, lines=lines, directives=directives, is_expanded=expanded is not None)
    if not script.is_shell:
        return script
    try:
        walker = Walker(script.options, trusts_defaults=trusts_defaults, follows_values=follows_values)
        walker.walk(text, expanded=expanded or ())
        return walker.added_to(script)
    except ShellSyntaxError as found:
        error = found
    except RecursionError:
        error = ShellSyntaxError(1, "it is nested too deeply to be read")
    here_lines = sbatch.here_document_lines(lines)
    own = tuple(item for item in script.directives if item.line not in here_lines)
    return replace(script, directives=own, error=error)
