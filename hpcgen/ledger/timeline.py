"""A run's time without gaps, in rows whose parts are known. Any stretch of it can be added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hpcgen.ledger.parts import PARTS, Part
from hpcgen.runs.history import Column
from trainer.contract.record import record


@record(kw_only=True)
class Spent:
    """A time by part, in seconds."""

    wall_s: float
    parts: dict[str, float]
    """They add up to `wall_s`."""
    in_jobs_s: float
    """The time in which a job held nodes."""
    gpu_hours: float
    """GPU-hours that jobs held."""
    goodput: float | None
    """Productive steps as a share of the time in jobs; None without such a time."""
    goodput_of_wall: float | None

    @classmethod
    def of(cls, parts: Mapping[Part, float], *, in_jobs_s: float, gpu_hours: float) -> Spent:
        """A time whose parts are known."""
        wall_s, productive_s = sum(parts.values()), parts[Part.PRODUCTIVE]
        return cls(
            wall_s=wall_s,
            parts={part.value: seconds for part, seconds in parts.items()},
            in_jobs_s=in_jobs_s,
            gpu_hours=gpu_hours,
            goodput=productive_s / in_jobs_s if in_jobs_s > 0 else None,
            goodput_of_wall=productive_s / wall_s if wall_s > 0 else None,
        )

    @classmethod
    def total(cls, times: Sequence[Spent]) -> Spent:
        """Several times together."""
        return cls.of(
            {part: sum(time.parts[part.value] for time in times) for part in PARTS},
            in_jobs_s=sum(time.in_jobs_s for time in times),
            gpu_hours=sum(time.gpu_hours for time in times),
        )


@dataclass(frozen=True)
class Timeline:
    """Consecutive rows. Each begins where the one before it ended, so that their parts add up to the time."""

    ended: Column
    """End of each row (Unix time in seconds)."""
    seconds: NDArray[np.float64]
    """Seconds of each row (first axis) and part (second axis)."""
    leg: NDArray[np.int64]
    """Number of the attempt that each row belongs to."""
    is_held: NDArray[np.bool_]
    """True if a job holds nodes during the row."""
    gpus: Column
    """Number of its GPUs."""
    began: float
    """Beginning of the first row."""

    @property
    def ends(self) -> float:
        """End of the last row."""
        return float(self.ended[-1]) if len(self.ended) else self.began

    def of(self, leg: int) -> Timeline:
        """The rows of one attempt."""
        first, last = np.searchsorted(self.leg, (leg, leg + 1))
        rows = slice(int(first), int(last))
        return Timeline(
            ended=self.ended[rows],
            seconds=self.seconds[rows],
            leg=self.leg[rows],
            is_held=self.is_held[rows],
            gpus=self.gpus[rows],
            began=float(self.ended[first - 1]) if first else self.began,
        )

    def spent(self, since: float) -> Spent:
        """The time after `since`."""
        shares = self._shares(since)
        held = shares * self.seconds.sum(axis=1) * self.is_held
        return Spent.of(
            dict(zip(PARTS, (shares @ self.seconds).tolist(), strict=True)),
            in_jobs_s=float(held.sum()),
            gpu_hours=float(held @ self.gpus) / 3600,
        )

    def _shares(self, since: float) -> Column:
        """The share of each row that is after `since`."""
        length = np.diff(self.ended, prepend=self.began)
        after = np.clip(self.ended - since, 0.0, length)
        shares: Column = np.divide(after, length, out=np.zeros(len(length)), where=length > 0)
        return shares


class Walk:
    """Builds a timeline from its beginning to its end. A time before the current one adds nothing."""

    def __init__(self, began: float) -> None:
        self.now = self._began = began
        self.leg = 0
        """Number of the attempt that the next rows belong to."""
        self.gpus: float | None = None
        """Number of GPUs that a job holds during the next rows; None for no job."""
        self._ended: list[Column] = []
        self._seconds: list[NDArray[np.float64]] = []
        self._legs: list[NDArray[np.int64]] = []
        self._held: list[NDArray[np.bool_]] = []
        self._gpus: list[Column] = []

    def to(self, time: float | None, rest: Part, known: Mapping[Part, float] | None = None) -> None:
        """Adds a row up to `time`. What its known parts leave is `rest`."""
        if time is not None and time > self.now:
            amounts = {part: np.array([seconds]) for part, seconds in (known or {}).items()}
            self.rows(np.array([time]), rest, amounts)

    def rows(self, ended: Column, rest: Part, known: Mapping[Part, Column]) -> None:
        """Adds a row up to each of these times, with the known parts of each."""
        ended = np.maximum.accumulate(np.maximum(ended, self.now))
        length = np.diff(ended, prepend=self.now)
        seconds = np.zeros((len(ended), len(PARTS)))
        for part, amounts in known.items():
            seconds[:, PARTS.index(part)] += np.maximum(np.nan_to_num(amounts), 0.0)
        total = seconds.sum(axis=1)
        # Clocks differ between nodes, and Slurm's times are whole seconds: no row is longer than the time that it took.
        scale = np.divide(length, total, out=np.ones(len(total)), where=total > length)
        seconds *= scale[:, None]
        seconds[:, PARTS.index(rest)] += length - seconds.sum(axis=1)
        self._ended.append(ended)
        self._seconds.append(seconds)
        self._legs.append(np.full(len(ended), self.leg))
        self._held.append(np.full(len(ended), self.gpus is not None))
        self._gpus.append(np.full(len(ended), self.gpus or 0.0))
        self.now = float(ended[-1]) if len(ended) else self.now

    def timeline(self) -> Timeline:
        """The rows so far."""
        return Timeline(
            ended=np.concatenate([*self._ended, np.array([])]),
            seconds=np.concatenate([*self._seconds, np.zeros((0, len(PARTS)))]),
            leg=np.concatenate([*self._legs, np.array([], dtype=np.int64)]),
            is_held=np.concatenate([*self._held, np.array([], dtype=np.bool_)]),
            gpus=np.concatenate([*self._gpus, np.array([])]),
            began=self._began,
        )
