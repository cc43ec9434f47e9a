"""The values of a script's variables at the current statement."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from hpcgen.check.lint.branches import merged, weak
from hpcgen.check.lint.script import SETTERS, Command
from hpcgen.check.lint.words import Variable, unknown_variable, variable_of

Values = Mapping[str, Variable | None]
"""Variable -> its value; None if it is not set."""

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
        self._before: list[dict[str, Variable | None]] = []
        """For each open branch, the variables that it has changed, with their values from before."""

    def __setitem__(self, name: str, value: Variable) -> None:
        self._remember(name)
        super().__setitem__(name, value)

    def unset(self, name: str) -> None:
        """Removes a variable."""
        self._remember(name)
        self.pop(name, None)

    def _remember(self, name: str) -> None:
        # copying all variables at each branch would take most of the time of a long script
        if self._before:
            self._before[-1].setdefault(name, self.get(name))

    def begin(self) -> None:
        """Begins a branch."""
        self._before.append({})

    def end(self) -> Values:
        """Ends the branch, and undoes its changes. Returns the variables it has changed, with their last values."""
        before = self._before.pop()
        ended = {name: self.get(name) for name in before}
        for name, value in before.items():
            if value is None:
                self.pop(name, None)
            else:
                super().__setitem__(name, value)
        return ended

    @contextlib.contextmanager
    def subshell(self) -> Iterator[None]:
        """Undoes all changes at the end, as when a subshell ends."""
        self.begin()
        yield
        self.end()

    def merge(self, ends: Sequence[Values]) -> None:
        """Sets the variables to their values after one of several branches, given what each has changed."""
        for name in dict.fromkeys(itertools.chain.from_iterable(ends)):
            before = self.get(name)
            value = merged(before, [end.get(name, before) for end in ends])
            if value is None:
                self.unset(name)
            elif value is not before:
                self[name] = value

    def weaken(self, names: Iterable[str]) -> None:
        """Makes the values of `names` uncertain, because code that may have run sets them."""
        for name in self.keys() & set(names):
            self[name] = weak(self[name])

    def forget(self, names: Iterable[str]) -> None:
        """Makes the values of `names` unknown."""
        for name in names:
            self[name] = unknown_variable(name)

    def end_function(self, function: str, assigned: Iterable[str]) -> None:
        """Ends the branch of a function's body, and remembers which variables it assigns."""
        self._set_by_function[function] = {name: self[name] for name in self.keys() & set(assigned)}
        ended = self.end()
        self.forget(name for name, value in ended.items() if value is not None and name not in self)

    def run(self, command: Command) -> None:
        """Applies the effects of a command that is a builtin or a function of the script."""
        texts = [word.text for word in command.words]
        # from here on, the text of a trap can run at any time
        is_trap = command.name == "trap"
        for name in re.findall(r"\w+", texts[1]) if is_trap and len(texts) > 2 else [command.name]:
            if called := self._set_by_function.get(name):
                self.merge([{}, called])
            elif is_trap:
                self.weaken((name,))
        if command.name == "unset" and not command.conditional:
            for name in texts[1:]:
                self.unset(name)
        elif command.name in SETTERS or texts[:2] == ["printf", "-v"]:
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
