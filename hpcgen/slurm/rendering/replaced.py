"""Shipped functions that a site replaces, each with the shipped text that the site's version was written against.

`hpcgen templates override` records that text in the site's file, as a comment of Jinja above the function.
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

_RECORD = re.compile(r"^\{# shipped (\w+), sha256 [0-9a-f]{64}:\n(.*?)\n#\}\n", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Replaced:
    """A function of a site's file that replaces a shipped one."""

    name: str
    path: Path
    line: int
    text: str
    shipped: str
    """The text of the shipped function today."""
    recorded: str | None
    """The shipped text that this function was written against. None: not recorded."""

    @property
    def is_stale(self) -> bool:
        """Whether the shipped function has changed since."""
        return self.recorded not in (None, self.shipped)

    @property
    def version(self) -> str:
        """The name and the version that it was written against: launch 1a2b3c4d (stale)."""
        if self.recorded is None:
            return self.name
        return f"{self.name} {digest(self.recorded)[:8]}{' (stale)' if self.is_stale else ''}"

    def diffs(self) -> Iterator[str]:
        """What changed in the shipped function, then what the site's does otherwise."""
        if self.recorded is not None and self.is_stale:
            yield _diff(self.recorded, self.shipped, f"{self.name}, as it was", f"{self.name}, shipped now")
        yield _diff(self.shipped, self.text, f"{self.name}, shipped now", f"{self.path}:{self.line}")


def replaced_functions(environment: ShellEnvironment, name: str) -> tuple[Replaced, ...]:
    """The functions that a site's own file of a template replaces; none where it has no such file.

    Raises:
        HpcgenError: a template is missing, unreadable or wrong.
    """
    file = template_chain(environment, name)[0]
    if file.shipped or file.name != template_file(name):
        return ()
    source, shipped = file.path.read_text(encoding="utf-8"), shipped_functions(name)
    records = {found[1]: textwrap.dedent(found[2]) for found in _RECORD.finditer(source)}
    # lines keep their numbers
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
        for function, text in _functions(source).items()
        if function in shipped and text != shipped[function]
    )


def all_replaced(environment: ShellEnvironment) -> tuple[Replaced, ...]:
    """Those of every template."""
    return tuple(found for name in TEMPLATES for found in replaced_functions(environment, name))


def shipped_functions(name: str) -> dict[str, str]:
    """The functions that the shipped template of a stage and what it extends define, as its source has them."""
    found: dict[str, str] = {}
    for file in template_chain(make_environment(), name):
        found = _functions(file.path.read_text(encoding="utf-8")) | found
    return found


def with_records(source: str, shipped: Mapping[str, str]) -> str:
    """A site's file with the shipped text of today recorded above each function that it replaces."""
    source = _RECORD.sub("", source)
    for name, text in _functions(source).items():
        if name in shipped:
            source = source.replace(text, f"{_record(name, shipped[name])}{text}", 1)
    return source


def digest(text: str) -> str:
    """The hash by which `hpcgen templates list` names a version of a function."""
    return hashlib.sha256(text.encode()).hexdigest()


def _record(name: str, text: str) -> str:
    # indented, so that who looks for the function at the left margin finds the site's own
    recorded = textwrap.indent(_safe(text), "    ")
    return f"{{# shipped {name}, sha256 {digest(_safe(text))}:\n{recorded}\n#}}\n"


def _safe(text: str) -> str:
    """A text that cannot end or begin a comment of Jinja."""
    return text.replace("{#", "{ #").replace("#}", "# }")


def _functions(source: str) -> dict[str, str]:
    """Functions of a template whose definitions begin at the left margin, with their text."""
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
