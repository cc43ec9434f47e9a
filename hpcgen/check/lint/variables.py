"""The values of a script's variables at the current statement."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hpcgen.check.lint.branches import merged, weak
from hpcgen.check.lint.script import Command
from hpcgen.check.lint.words import Variable, unknown_variable, variable_of

_READERS = ("read", "readarray", "mapfile", "getopts")
"""Builtins that set the variables they name."""

_SET_BY_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "job-name": ("SLURM_JOB_NAME",),
}
"""Directive -> the variables that Slurm sets to its value."""


class Variables(dict[str, Variable]):
    """Name -> value of the known variables. Also remembers which variables each function assigns."""

    def __init__(self, options: Mapping[str, str]) -> None:
        super().__init__(_set_by_slurm(options))
        self._set_by_function: dict[str, dict[str, Variable]] = {}

    def restore(self, saved: Mapping[str, Variable]) -> None:
        """Replaces every variable by the saved ones."""
        self.clear()
        self.update(saved)

    def weaken(self, names: Iterable[str]) -> None:
        """Makes the values of `names` uncertain: code that may have run replaces them."""
        for name in self.keys() & set(names):
            self[name] = weak(self[name])

    def forget(self, names: Iterable[str]) -> None:
        """Makes the values of `names` unknown."""
        for name in names:
            self[name] = unknown_variable(name)

    def end_function(self, function: str, assigned: Iterable[str], saved: dict[str, Variable]) -> None:
        """Restores the variables from before a function's body, and remembers which the body assigns."""
        self._set_by_function[function] = {name: self[name] for name in self.keys() & set(assigned)}
        new = self.keys() - saved.keys()
        self.restore(saved)
        self.forget(new)

    def run(self, command: Command) -> None:
        """Applies the effects of a command that is a builtin or a function of the script."""
        texts = [word.text for word in command.words]
        # from here on, the text of a trap can run at any time
        is_trap = command.name == "trap"
        for name in re.findall(r"\w+", texts[1]) if is_trap and len(texts) > 2 else [command.name]:
            if called := self._set_by_function.get(name):
                now = dict(self)
                self.restore(merged(now, [now, {**now, **called}]))
            elif is_trap:
                self.weaken((name,))
        if command.name == "unset" and not command.conditional:
            for name in texts[1:]:
                self.pop(name, None)
        elif command.name in _READERS or texts[:2] == ["printf", "-v"]:
            self.forget(name for name in texts[1:] if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII))


def _set_by_slurm(options: Mapping[str, str]) -> dict[str, Variable]:
    """The variables that Slurm sets in the job, as far as its directives determine them."""
    found = {}
    per_node, nodes = options.get("ntasks-per-node", ""), options.get("nodes", "")
    if "ntasks" not in options and per_node.isdigit() and nodes.isdigit():
        options = {**options, "ntasks": str(int(per_node) * int(nodes))}
    for option, names in _SET_BY_SLURM.items():
        value = options.get(option, "")
        if value.isdigit() or (option == "job-name" and value):
            found.update({name: variable_of(value) for name in names})
    return found
