"""Parses calls of mpirun and mpiexec: options, variables, and the program that they start on every rank.

Covers Open MPI, PRRTE, MPICH's and Intel MPI's Hydra, MVAPICH and ibrun. Their options differ in names more than in
meaning, so one table serves all of them.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hpcgen.check.lint.words import Word

MPI_LAUNCHERS = frozenset((
    "mpirun", "mpiexec", "mpiexec.hydra", "mpiexec.mpich", "mpirun.mpich", "mpiexec.openmpi", "mpirun.openmpi",
    "orterun", "prterun", "prun", "mpirun_rsh", "ibrun",
))  # fmt: skip
"""Programs that start ranks on the nodes of the job, without a call of srun in the script."""

STEP_PROGRAMS = MPI_LAUNCHERS | {"srun"}
"""Programs that start a command on the nodes of the job."""

_NUM_RANKS = ("np", "n", "c")
_RANKS_PER_NODE = ("npernode", "N", "ppn", "perhost", "grr")
_VARIABLES = ("x", "genv", "env", "set-env")
_NAMES = ("envlist", "genvlist")
_TWO_VALUES = frozenset(
    ("mca", "gmca", "omca", "gomca", "pmca", "gpmca", "prtemca", "gprtemca", "pmixmca", "gpmixmca", "append-env",
     "prepend-env")
)  # fmt: skip
_ONE_VALUE = frozenset((
    *_NUM_RANKS, *_RANKS_PER_NODE, *_NAMES, "x", "H", "host", "hosts", "hostfile", "machinefile", "machine", "f",
    "default-hostfile", "map-by", "bind-to", "rank-by", "npersocket", "cpus-per-proc", "cpus-per-rank", "cpu-set",
    "cpu-list", "rankfile", "rf", "slot-list", "wdir", "wd", "path", "prefix", "output-filename", "output", "display",
    "timeout", "tune", "am", "app", "configfile", "personality", "dvm", "dvm-uri", "stdin", "stream-buffering",
    "max-restarts", "launch-agent", "runtime-options", "rtos", "rmk", "bootstrap", "bootstrap-exec", "launcher",
    "launcher-exec", "iface", "outfile-pattern", "errfile-pattern", "prepend-pattern", "genvfile", "envfile", "membind",
    "binding", "topolib", "demux", "localhost", "nameserver", "usize", "tmpdir", "hosts-group", "gtool", "order-nodes",
    "arch", "o", "xterm", "export", "set-env", "unset-env", "add-host", "add-hostfile", "preload-files", "pset",
    "forward-signals", "keepalive", "max-vm-size", "report-pid", "report-uri", "singleton", "spawn-timeout",
    "gtoolfile", "cpu-bind",
))  # fmt: skip
"""Options that take the next word.

Sources: mpirun(1) of Open MPI 4.1 and 5.0, prterun(1), `mpiexec.hydra -help` of MPICH and Intel MPI, `mpirun_rsh
-help`.
"""


@dataclass(frozen=True)
class MpiOption:
    """One option of mpirun, named without dashes, with the words after it."""

    name: str
    values: tuple[Word, ...]
    word: Word


@dataclass(frozen=True, kw_only=True)
class MpiCall:
    """One call of mpirun or mpiexec."""

    options: tuple[MpiOption, ...]
    program: tuple[Word, ...]
    """The program of each rank, or the first of several programs."""
    is_mixed: bool
    """True if other programs follow after a `:`."""

    def value(self, *names: str) -> Word | None:
        """The value of the last option with one of these names."""
        found = [option for option in self.options if option.name in names and option.values]
        return found[-1].values[0] if found else None

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks; None if unknown."""
        word = self.value(*_NUM_RANKS)
        return word.number if word and not self.is_mixed else None

    @property
    def ranks_per_node(self) -> int | None:
        """Number of ranks per node; None if unknown."""
        if any(option.name == "pernode" for option in self.options):
            return 1
        placed = self.value("map-by")
        if placed and placed.known and (found := re.match(r"ppr:(\d{1,4}):node\b", placed.text)):
            return int(found[1])
        word = self.value(*_RANKS_PER_NODE)
        return word.number if word else None

    @property
    def environment(self) -> Iterator[tuple[str, Word | None]]:
        """Variables that the ranks get: name and value, or None for the value that mpirun itself has."""
        for option in self.options:
            if option.name in _NAMES:
                yield from ((name, None) for word in option.values for name in word.text.split(","))
            elif option.name in _VARIABLES and option.values:
                first, *more = option.values
                name, equals, value = first.text.partition("=")
                inner = replace(first, text=value, source=first.source.partition("=")[2])
                yield name, inner if equals else more[0] if more else None


def mpi_call(words: tuple[Word, ...]) -> MpiCall | None:
    """The command as a call of mpirun; None for other commands."""
    if not words or words[0].text.rpartition("/")[2] not in MPI_LAUNCHERS:
        return None
    options: list[MpiOption] = []
    rest = words[1:]
    while rest:
        if rest[0].text.startswith("-"):
            options.append(_option(rest))
            rest = rest[1 + (0 if "=" in rest[0].text else len(options[-1].values)) :]
        elif len(rest) > 1 and re.match(r"[A-Za-z_]\w*=", rest[0].text):
            options.append(MpiOption("x", rest[:1], rest[0]))  # mpirun_rsh NAME=VALUE
            rest = rest[1:]
        elif _may_be_options(rest):
            rest = rest[1:]
        else:
            break
    program = tuple(itertools.takewhile(lambda word: word.text != ":", rest))
    return MpiCall(options=tuple(options), program=program, is_mixed=len(program) < len(rest))


def _option(words: tuple[Word, ...]) -> MpiOption:
    """The option that begins with the first word, and its values."""
    name, equals, value = words[0].text.lstrip("-").partition("=")
    if equals:
        inner = replace(words[0], text=value, source=words[0].source.partition("=")[2])
        return MpiOption(name, (inner,), words[0])
    num_values = 2 if name in _TWO_VALUES else 1 if name in _ONE_VALUE else 0
    if name in ("genv", "env"):  # -genv NAME VALUE, or -genv NAME=VALUE
        num_values = 1 if len(words) > 1 and "=" in words[1].text else 2
    if name == "s" and len(words) > 1 and re.fullmatch(r"all|none|\d[\d,-]*", words[1].text):
        num_values = 1  # of Intel MPI; Open MPI has an option of this name without a value
    return MpiOption(name, words[1 : 1 + num_values], words[0])


def _may_be_options(words: tuple[Word, ...]) -> bool:
    """True for a variable in front of the program, which may contain options."""
    text = words[0].text
    is_variable = not words[0].known and re.match(r"\$\{?\w+", text) is not None
    return is_variable and len(words) > 1 and "PYTHON" not in text.upper()
