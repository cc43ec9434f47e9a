"""Shipped functions that a site replaces, each with the shipped text on which the site's version is based.

`hpcgen templates override` records that text in the site's file, as a Jinja comment above the function.
"""

from __future__ import annotations

import difflib
import hashlib
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpcgen.slurm.rendering.environment import ShellEnvironment, make_environment
from hpcgen.slurm.rendering.inventory import TEMPLATES, template_chain, template_file

_EMPTY = re.compile(r"\w+\(\) \{ :; \}")
"""A shipped function that does nothing, so that there is nothing in it to compare with."""
_RECORD = re.compile(r"^\{# shipped (\w+), sha256 [0-9a-f]{64}:\n(.*?)\n#\}\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A function in a site's file that replaces a shipped one."""

    name: str
    path: Path
    line: int
    text: str
    shipped: str
    """The current text of the shipped function."""
    recorded: str | None
    """The shipped text on which this function is based. None: not recorded."""

    @property
    def is_stale(self) -> bool:
        """True if the shipped function has changed since it was recorded."""
        return self.recorded not in (None, self.shipped)

    @property
    def is_unrecorded(self) -> bool:
        """True if nothing would tell when the shipped function changes."""
        return self.recorded is None and not _EMPTY.fullmatch(self.shipped)

    @property
    def version(self) -> str:
        """The name and the version on which it is based: launch 1a2b3c4d (stale)."""
        if self.recorded is None:
            return f"{self.name} (not recorded)" if self.is_unrecorded else self.name
        return f"{self.name} {_digest(self.recorded)[:8]}{' (stale)' if self.is_stale else ''}"

    @property
    def written_against(self) -> str | None:
        """The hash of the version on which it is based."""
        return None if self.recorded is None else _digest(self.recorded)

    @property
    def shipped_version(self) -> str:
        """The hash of the current version."""
        return _digest(self.shipped)

    def diffs(self) -> Iterator[str]:
        """The changes in the shipped function, and the differences between it and the site's version."""
        if self.recorded is not None and self.is_stale:
            yield _diff(self.recorded, self.shipped, f"{self.name}, as it was", f"{self.name}, shipped now")
        yield _diff(self.shipped, self.text, f"{self.name}, shipped now", f"{self.path}:{self.line}")


def replaced_functions(environment: ShellEnvironment, name: str) -> tuple[Replaced, ...]:
    """The functions that a site's file replaces; empty if the site has no file for the template.

    Raises:
        HpcgenError: a template is missing, unreadable or invalid.
    """
    file = template_chain(environment, name)[0]
    if file.shipped or file.name != template_file(name):
        return ()
    source, shipped = file.path.read_text(encoding="utf-8"), shipped_functions(name)
    records = {found[1]: textwrap.dedent(found[2]) for found in _RECORD.finditer(source)}
    # line numbers stay the same
    source = _RECORD.sub(lambda found: "\n" * found[0].count("\n"), source)
    return tuple(
        Replaced(
            name=function,
            path=file.path,
            line=source[: source.index(text)].count("\n") + 1,
            text=text,
            shipped=_safe(shipped[function]),
            recorded=records.get(function),
        )
        for function, text in functions(source).items()
        if function in shipped and text != shipped[function]
    )


def all_replaced(environment: ShellEnvironment) -> tuple[Replaced, ...]:
    """The replaced functions of all templates."""
    return tuple(found for name in TEMPLATES for found in replaced_functions(environment, name))


def shipped_functions(name: str) -> dict[str, str]:
    """The source of functions in the shipped template of a stage and the templates it extends."""
    found: dict[str, str] = {}
    for file in template_chain(make_environment(), name):
        found = functions(file.path.read_text(encoding="utf-8")) | found
    return found


def with_records(source: str, shipped: Mapping[str, str]) -> str:
    """A site's file with the current shipped text recorded above each function that it replaces."""
    source = _RECORD.sub("", source)
    for name, text in functions(source).items():
        if name in shipped:
            source = source.replace(text, f"{_record(name, shipped[name])}{text}", 1)
    return source


def _digest(text: str) -> str:
    """The hash that identifies a version of a function in `hpcgen templates list`."""
    return hashlib.sha256(text.encode()).hexdigest()


def _record(name: str, text: str) -> str:
    # indented, so that only the site's version begins at the left margin
    recorded = textwrap.indent(_safe(text), "    ")
    return f"{{# shipped {name}, sha256 {_digest(_safe(text))}:\n{recorded}\n#}}\n"


def _safe(text: str) -> str:
    """The text with delimiters of Jinja comments split."""
    return text.replace("{#", "{ #").replace("#}", "# }")


def functions(source: str) -> dict[str, str]:
    """Functions whose definitions begin at the left margin, as in the shipped templates and libraries -> their text."""
    found: dict[str, str] = {}
    for match in re.finditer(r"^(\w+)\(\) \{", source, re.MULTILINE):
        line = source[match.start() :].partition("\n")[0]
        end = (
            len(line)
            if line.rstrip().endswith("}")
            else source.find("\n}\n", match.start()) + 2 - match.start()
        )
        found[match[1]] = source[match.start() : match.start() + end]
    return found


def _diff(before: str, after: str, name_before: str, name_after: str) -> str:
    lines = difflib.unified_diff(before.split("\n"), after.split("\n"), name_before, name_after, lineterm="")
    return "\n".join(lines)
