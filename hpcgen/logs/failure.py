"""The reason why an attempt failed, as `logs`, `status`, `doctor` and bundles show it."""

from __future__ import annotations

import re

from trainer.contract.record import record
from trainer.contract.wording import counted

UNKNOWN = "unknown"
"""Kind of a failure whose log names no cause."""


@record(kw_only=True)
class Consequence:
    """Failures of other ranks that followed from the root."""

    kind: str
    """Kind of signature, such as lost-peers."""
    title: str
    """The words for it: "lost their peers"."""
    ranks: tuple[int, ...]
    """The ranks that said so, in order. Empty if the lines name no rank."""
    count: int
    """Number of ranks, or of lines without a rank."""

    def __str__(self) -> str:
        title = self.title
        if self.count == 1:
            for plural, singular in (("their", "its"), ("were", "was"), ("they", "it")):
                title = re.sub(rf"\b{plural}\b", singular, title)
        return f"{counted(self.count, 'rank' if self.ranks else 'line')}: {title}"


@record(kw_only=True)
class Failure:
    """The root failure of an attempt. Texts come from logs: pass them through `harmless` before a terminal."""

    kind: str
    """Kind of the cause, such as gpu-memory (signatures.KINDS), or `unknown`."""
    title: str
    """The kind in words: "a GPU ran out of memory"."""
    rank: int | None = None
    """The first rank that failed. None if the log does not say."""
    ranks: tuple[int, ...] = ()
    """All ranks with the same failure."""
    node: str | None = None
    """Node of `rank`, in Slurm's spelling where the job recorded it."""
    time: float | None = None
    """Unix time (seconds). None if neither the line nor a line near it has a time."""
    message: str = ""
    """The line that shows the failure."""
    traceback: str = ""
    """The first traceback of `rank`, or its last lines if it left none. Unknown cause: the first traceback."""
    cascade: tuple[Consequence, ...] = ()
    place: str = ""
    """File and line number of `message`, as FILE:LINE."""
    fix: str = ""
    """Page and heading that say what to do: faults.md#the-disk-is-full."""

    def __str__(self) -> str:
        """One line for `status`: what failed, where, and the message."""
        where = "" if self.rank is None else f"rank {self.rank}"
        if self.node:
            where = f"{where} on {self.node}" if where else self.node
        message = f": {self.message}" if self.message else ""
        return f"{self.title}{f' ({where})' if where else ''}{message}"
