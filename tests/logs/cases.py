"""Logs of failed attempts with the failure that a person found in them: cases/NAME.txt.

A case begins with `name: value` lines and an empty line, then follows the log. `ranks` are those that may be named as
the root, `kinds` the kinds, and `node` the nodes; `-` stands for none. `failed` is the text of the marker FAILED. The
cases blind-NAME were chosen and labeled by someone who had not seen the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcgen.logs.evidence import collect
from hpcgen.logs.failure import Failure
from hpcgen.logs.lines import parse
from hpcgen.logs.root import find_root
from hpcgen.logs.signatures import rank_numbers

DIRECTORY = Path(__file__).with_name("cases")


@dataclass(frozen=True)
class Case:
    """A log and its label."""

    name: str
    fault: str
    """What happened."""
    source: str
    """`injected`, or the address of the public log that it was reduced from."""
    kinds: tuple[str, ...]
    """Kinds that name the failure. The first one is the best."""
    ranks: tuple[int, ...]
    """Ranks one of which failed first; empty if the log does not tell."""
    node: tuple[str, ...]
    """Nodes that may be named; empty if the log does not tell."""
    log: str
    proof: str = ""
    """Part of the line that must be shown. Only in blind cases."""
    failed: str = ""
    nodes: tuple[str, ...] = ()
    """Nodes of the step, if the job recorded them; with the number of ranks in `world_size`."""
    world_size: int = 0

    def found(self) -> Failure | None:
        """What hpcgen finds."""
        found = collect(parse(self.log.splitlines()), self.name)
        return find_root(found, self._node_of, self.failed, self.world_size)

    def mistake(self) -> str:
        """The mistake in that; "" if there is none."""
        failure = self.found()
        if failure is None:
            return "" if "-" in self.kinds else "no failure is found"
        if failure.kind not in self.kinds:
            return f"the kind is {failure.kind} instead of {self.kinds[0]}: {failure.message}"
        if self.ranks and failure.rank is not None and failure.rank not in self.ranks:
            return f"the rank is {failure.rank} instead of {self.ranks[0]}"
        if self.node and failure.node not in self.node:
            return f"the node is {failure.node} instead of {self.node[0]}"
        if self.proof not in f"{failure.message}\n{failure.traceback}":
            return f"the message is {failure.message!r} and lacks {self.proof!r}"
        return ""

    def _node_of(self, rank: int) -> str | None:
        return self.nodes[rank * len(self.nodes) // self.world_size] if rank < self.world_size else None


def cases() -> list[Case]:
    """All cases, by name."""
    return [read(path) for path in sorted(DIRECTORY.glob("*.txt"))]


def read(path: Path) -> Case:
    """The case in a file."""
    header, _, log = path.read_text(encoding="utf-8").partition("\n\n")
    label = dict(line.split(": ", 1) for line in header.splitlines())
    return Case(
        name=path.stem,
        fault=label["fault"],
        source=label["source"],
        kinds=tuple(label["kinds"].split()),
        ranks=() if label["ranks"] == "-" else rank_numbers(label["ranks"]),
        node=() if label["node"] == "-" else tuple(label["node"].split()),
        proof=label.get("proof", ""),
        log=log,
        failed=label.get("failed", ""),
        nodes=tuple(label.get("nodes", "").split()),
        world_size=int(label.get("world_size", 0)),
    )
