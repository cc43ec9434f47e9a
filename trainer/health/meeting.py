"""Communication between the ranks of a health program through the store, independent of the collectives under test.

A collective that hangs reports nothing. So each rank notes in the store which step it has begun, and a thread updates a
counter while the process runs. A rank that waits too long reads these notes and names the ranks that cause the hang.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainer.contract.errors import TrainerError
from trainer.distributed.rendezvous import Ranks, open_store

if TYPE_CHECKING:
    from torch.distributed import Store

PULSE_S = 1.0
"""Interval at which each process updates its counter (seconds)."""
GRACE_S = 5.0
"""Time that the other ranks wait for rank 0 to report first (seconds)."""
SILENT_S = 15.0
"""Timeout for reading the notes, which takes three pulses (seconds)."""
HANG_STATUS = 1


class MissingRanksError(TrainerError):
    """Ranks did not reach a step in time."""

    def __init__(self, message: str, *, where: object = "") -> None:
        super().__init__(message, where=where, retry=True)


class BrokenError(TrainerError):
    """The ranks cannot connect, or a collective ended with an error."""

    def __init__(self, message: str, *, where: object = "") -> None:
        super().__init__(message, where=where, retry=True)


@dataclass(frozen=True)
class Note:
    """Note of a rank in the store: the step that it has begun. Steps count from 1; 0 means that it never joined."""

    step: int = 0
    node: str = "?"


class Meeting:
    """Context manager for the ranks of one test, with a thread that detects hangs."""

    def __init__(
        self, ranks: Ranks, node: str, environ: Mapping[str, str], timeout_s: float, program: str
    ) -> None:
        self.ranks = ranks
        self.node = node
        self.on_hang: Callable[[str], None] = lambda line: None
        """Called on a rank that has waited too long, before the process ends."""
        self._timeout_s = timeout_s
        self._program = program
        self._step = 0
        self._name = ""
        self._deadline: float | None = None
        self._ended = threading.Event()
        patience = datetime.timedelta(seconds=timeout_s)
        try:
            self.store = open_store(ranks, environ, patience, waits=False)
            # The watching thread has its own connection, since the main thread may block in the store.
            self._watched = (
                open_store(ranks, environ, patience, hosts=False, waits=False)
                if ranks.world_size > 1
                else self.store
            )
        except RuntimeError as error:
            where = f"{environ['MASTER_ADDR']}:{environ['MASTER_PORT']}"
            raise BrokenError(
                f"cannot connect to rank 0 at {where}: {_first_line(error)}", where=ranks
            ) from error
        self._pulses = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Meeting:
        self._note()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Rank 0 leaves last, since it hosts the store."""
        self._ended.set()
        self._thread.join(timeout=10)
        with contextlib.suppress(RuntimeError):
            self.store.set(f"left/{self.ranks.rank}", "")
            if self.ranks.rank == 0:
                others = [f"left/{rank}" for rank in range(self.ranks.world_size)]
                self.store.wait(others, datetime.timedelta(seconds=GRACE_S))

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Context for a step that all ranks perform at the same time. It must end within the timeout.

        Raises:
            BrokenError: torch raised an error within the step, for example because a peer has left.
        """
        self._step += 1
        self._name = name
        self._note()
        self._deadline = time.monotonic() + self._timeout_s
        try:
            yield
        except RuntimeError as error:
            raise BrokenError(f"{name}: {_first_line(error)}", where=self.ranks) from error
        finally:
            self._deadline = None

    def gather(self, topic: str, value: Any) -> list[Any]:
        """Gather `value` (plain data) from all ranks, in order, on every rank. Each topic can be used only once.

        Raises:
            MissingRanksError: some ranks did not provide their value in time. The message names them.
        """
        self.store.set(f"{topic}/{self.ranks.rank}", json.dumps(value))
        if self.ranks.rank == 0:
            self.store.set(f"{topic}/all", json.dumps(self._collect(topic)))
        patience = datetime.timedelta(seconds=self._timeout_s + 2 * GRACE_S)
        if not _is_there(self.store, f"{topic}/all", patience):
            raise MissingRanksError(f"rank 0 does not answer, in {topic!r}", where=self.ranks)
        found = json.loads(self.store.get(f"{topic}/all"))
        if found["missing"]:
            raise MissingRanksError(found["missing"])
        return list(found["values"])

    def _collect(self, topic: str) -> dict[str, Any]:
        end = time.monotonic() + self._timeout_s
        missing = []
        for rank in range(self.ranks.world_size):
            left = datetime.timedelta(seconds=max(end - time.monotonic(), 0.05))
            if not _is_there(self.store, f"{topic}/{rank}", left):
                missing.append(rank)
        if missing:
            notes = [_read_note(self.store, rank) for rank in range(self.ranks.world_size)]
            text = f"{_named(missing, notes)} did not reach {topic!r} within {self._timeout_s:g} s"
            return {"missing": text, "values": []}
        ranks = range(self.ranks.world_size)
        return {"missing": "", "values": [json.loads(self.store.get(f"{topic}/{rank}")) for rank in ranks]}

    def _note(self) -> None:
        self.store.set(f"note/{self.ranks.rank}", json.dumps({"step": self._step, "node": self.node}))

    def _watch(self) -> None:
        while not self._ended.wait(PULSE_S):
            self._pulse()
            deadline = self._deadline
            grace = 0.0 if self.ranks.rank == 0 else GRACE_S
            if deadline is not None and time.monotonic() > deadline + grace:
                self._end_hang()

    def _pulse(self) -> None:
        self._pulses += 1
        with contextlib.suppress(RuntimeError):  # rank 0 has left because the test is over
            self._watched.set(f"pulse/{self.ranks.rank}", str(self._pulses))

    def _end_hang(self) -> None:
        # If the notes cannot be read, rank 0 itself hangs.
        silent = f"{self._hang()}: rank 0, which hosts the store, does not answer"
        threading.Timer(SILENT_S, self._leave, (silent,)).start()
        try:
            line = f"{self._hang()}: {self._blame()}"
        except RuntimeError:
            line = silent
        self._leave(line)

    def _hang(self) -> str:
        waiting = f"rank {self.ranks.rank} on {self.node}"
        return f"{waiting} has waited {self._timeout_s:g} s in {self._name!r}"

    def _leave(self, line: str) -> None:
        print(f"{self._program}: HANG: {line}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):
            self.on_hang(line)
        os._exit(HANG_STATUS)  # the main thread is in a call that does not return

    def _blame(self) -> str:
        world = range(self.ranks.world_size)
        before = [_read_text(self._watched, f"pulse/{rank}") for rank in world]
        for _ in range(3):
            time.sleep(PULSE_S)
            self._pulse()
        after = [_read_text(self._watched, f"pulse/{rank}") for rank in world]
        notes = [_read_note(self._watched, rank) for rank in world]
        return blame(self._step, notes, [old != new for old, new in zip(before, after, strict=True)])


def blame(step: int, notes: Sequence[Note], alive: Sequence[bool]) -> str:
    """Name the ranks that keep the others waiting in `step`, from the notes and from whether each process is alive."""
    never = [rank for rank, note in enumerate(notes) if note.step == 0]
    dead = [rank for rank, moves in enumerate(alive) if not moves and rank not in never]
    late = [rank for rank, note in enumerate(notes) if 0 < note.step < step and alive[rank]]
    parts = []
    if never:
        parts.append(f"{_named(never, notes)} never joined")
    if dead:
        parts.append(f"{_named(dead, notes)} stopped responding")
    if late:
        parts.append(f"{_named(late, notes)} did not reach it")
    if not parts:
        inside = [rank for rank, note in enumerate(notes) if note.step == step]
        parts.append(
            f"{_named(inside, notes)} began it and are alive, but none finished: a GPU or a link hangs"
        )
    return "; ".join(parts)


def _named(ranks: Sequence[int], notes: Sequence[Note]) -> str:
    """Ranks by node: ranks 2 3 on node-b, rank 8 on node-d."""
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(notes[rank].node, []).append(rank)
    return ", ".join(
        f"rank{'s' if len(those) > 1 else ''} {' '.join(map(str, those))} on "
        f"{'an unknown node' if node == '?' else node}"
        for node, those in by_node.items()
    )


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _is_there(store: Store, key: str, patience: datetime.timedelta) -> bool:
    try:
        store.wait([key], patience)
    except RuntimeError:  # DistStoreError for a timeout, other errors if the store is gone
        return False
    return True


def _read_text(store: Store, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""


def _read_note(store: Store, rank: int) -> Note:
    text = _read_text(store, f"note/{rank}")
    return Note(**json.loads(text)) if text else Note()
