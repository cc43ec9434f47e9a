"""Mistakes in the environment variables of a site or a user: names that nothing reads, values that have no effect."""

from __future__ import annotations

import re
from collections.abc import Iterator

from hpcgen.config import known_variables
from hpcgen.config.node_type import NodeType
from hpcgen.config.variable_values import idle_devices, unknown_devices
from hpcgen.errors import Problem
from hpcgen.text import counted, few

MOST_DEVICES = 8
_EXPANSION = re.compile(r"\$\{?[A-Za-z_]\w*\}?|\$\(|`|^~/")


def variable_mistakes(
    name: str, value: str, node_type: NodeType, *, is_known: bool = False
) -> Iterator[Problem]:
    """Yields what is wrong with a variable that jobs on these nodes get.

    With `is_known`, only the value can be wrong.
    """
    mistake = None if is_known else known_variables.name_mistake(name)
    mistake = mistake or known_variables.value_mistake_of(name, value) or _literal(name, value)
    if mistake:
        yield mistake
    else:
        yield from _devices(name, value, node_type)


def _literal(name: str, value: str) -> Problem | None:
    if not (found := _EXPANSION.search(value)):
        return None
    reason = f"contains {found[0]}, which is not expanded: the tasks get it as it is written"
    hint = "write the value itself, or export the variable in site_prologue of a template"
    return Problem(f"environment.{name}", reason, hint)


def _devices(name: str, value: str, node_type: NodeType) -> Iterator[Problem]:
    """Yields devices that the nodes do not have, or that NCCL would not use."""
    nics = [nic.name for nic in node_type.nics]
    form = known_variables.form_of(name) if nics else ""
    if form not in ("devices", "ports"):
        return
    path, known = f"environment.{name}", f"nics of the node type: {few(nics, MOST_DEVICES)}"
    if missing := unknown_devices(form, value, nics):
        verb = "is" if len(missing) == 1 else "are"
        yield Problem(
            path, f"names {few(missing, MOST_DEVICES)}, which {verb} not in {known}", "correct one of them"
        )
    elif idle := idle_devices(form, value, nics):
        reason = f"leaves {counted(len(idle), 'NIC')} idle: {few(idle, MOST_DEVICES)}"
        yield Problem(path, reason, "name all NICs of the node type, or remove it")
