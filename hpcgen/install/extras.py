"""The extras of hpcgen: the packages that a capability needs in addition to the base installation."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterator

from hpcgen.errors import HpcgenError

_COLLECTIONS = ("all", "dev")
"""Extras that combine other extras. Every other extra adds one capability."""


def missing_package(error: ModuleNotFoundError, command: str) -> HpcgenError | None:
    """Error for a `command` ("hpcgen data prepare") that failed because a package of an extra is not installed.

    Returns None if no extra has the package. The failed import is then a bug.
    """
    name = project_name((error.name or "").partition(".")[0])
    extras = [extra for extra, requirement in requirements() if extra and project_name(requirement) == name]
    extras = [extra for extra in extras if extra not in _COLLECTIONS]
    if not extras:
        return None
    smallest = min(extras, key=[extra for extra, _ in requirements()].count)
    extra = next((extra for extra in extras if extra in command.split()), smallest)
    return HpcgenError(f"{command} needs {name}. Install it with: pip install 'hpcgen[{extra}]'")


def requirements() -> Iterator[tuple[str | None, str]]:
    """Yields each declared requirement of the installed hpcgen with its extra (None for the base installation)."""
    try:
        declared = importlib.metadata.requires("hpcgen") or ()
    except importlib.metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
        return
    for requirement in declared:
        plain, _, marker = requirement.partition(";")
        extra = re.search(r"""extra\s*==\s*["']([^"']*)""", marker)
        yield (extra[1], plain.strip()) if extra else (None, requirement)


def project_name(requirement: str) -> str:
    """The normalized name that a requirement starts with (PEP 503)."""
    name = re.match(r"[A-Za-z0-9._-]*", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()
