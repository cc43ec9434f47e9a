"""Measures the jobs of a calibration with all ranks: the host, then transfers, then kernels, within the time budget."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from trainer.calibration import collectives, host, section
from trainer.contract.calibration import CalibrationConfig, Job
from trainer.contract.wording import counted, duration
from trainer.health.fabric import Fabric
from trainer.health.meeting import Meeting

Row = dict[str, Any]
HOST, TRANSFERS = ("host",), ("collectives", "beside")
"""Sections that all ranks measure together."""
HOST_SHARE = 0.4
"""Part of the budget after which no further processes for the host are started."""
TRANSFERS_SHARE = 0.7
"""Part of the budget after which no further transfer begins."""


def measured(config: CalibrationConfig, meeting: Meeting, fabric: Fabric) -> dict[str, list[Row]]:
    """The measured rows by section. All ranks call this together; rank 0 gets all rows and says what is missing."""
    calibration = _Calibration(config, meeting, fabric)
    found: dict[str, list[Row]] = {}
    for part, sections, measure in (
        ("host", HOST, calibration.host),
        ("transfers", TRANSFERS, calibration.transfers),
        ("kernels", section.SECTIONS, calibration.kernels),
    ):
        began = time.monotonic()
        rows = list(measure())
        number = sum(job.section in sections for job in config.jobs)
        missing = number - len(rows)
        failed = [(name, row) for name, row in rows if not _is_usable(row)]
        for name, row in rows:
            if _is_usable(row):
                found.setdefault(name, []).append(row)
        if number and meeting.ranks.rank == 0:
            for name, row in failed:
                print(f"calibration: not measured: {name} {json.dumps(row)}", flush=True)
            text = f"{counted(len(rows) - len(failed), 'row')} in {duration(round(time.monotonic() - began))}"
            left = f", and {missing} for which there was no time or no GPUs" if missing else ""
            print(f"calibration: {part}: {text}{left}", flush=True)
    return found


def _is_usable(row: Row) -> bool:
    """True if a job gave a result. The difference of two noisy times can be negative."""
    return "error" not in row and row.get("us", 1.0) > 0


class _Calibration:
    """One calibration. Every rank runs it."""

    def __init__(self, config: CalibrationConfig, meeting: Meeting, fabric: Fabric) -> None:
        self._config = config
        self._meeting = meeting
        self._fabric = fabric
        self._began = time.monotonic()
        self._questions = 0

    def host(self) -> Iterator[tuple[str, Row]]:
        """Yields the rows of the host. Each is measured by processes of its own, next to each other."""
        jobs = self._jobs(*HOST)
        nodes = self._meeting.gather("nodes of ranks", self._meeting.node)
        for number, wave in enumerate(host.waves(jobs, nodes)):
            if not self._goes_on(HOST_SHARE):
                return
            for row in host.measured(wave, self._meeting, f"host {number}"):
                yield "host", row

    def transfers(self) -> Iterator[tuple[str, Row]]:
        """Yields the rows of transfers, alone and next to products."""
        if not (jobs := self._jobs(*TRANSFERS)):
            return
        transfers = collectives.Transfers(self._fabric, self._config.domain_size)
        for job in jobs:
            if not self._goes_on(TRANSFERS_SHARE):
                return
            with self._meeting.step(f"{job.section} {json.dumps(job.row)}"):
                row = transfers.measured(job)
            if row is not None:
                yield job.section, row

    def kernels(self) -> Iterator[tuple[str, Row]]:
        """Yields the rows of kernels, which the ranks share among them."""
        ranks, device = self._meeting.ranks, self._config.device
        jobs = self._jobs(*section.SECTIONS)
        power_s = max((job.row["seconds"] for job in jobs if job.section == "power"), default=0.0)
        if device == "cuda":
            torch.cuda.set_stream(torch.cuda.Stream())  # CUDA graphs cannot be recorded on the default stream
        mine: list[tuple[str, Row]] = []
        for job in jobs[ranks.rank :: ranks.world_size]:
            reserve_s = 0.0 if job.section == "power" else power_s
            if self._left_s(1.0) > reserve_s:
                mine.append((job.section, section.measured(job, self._config.row_s, device)))
        parts = self._meeting.gather("kernels", mine)
        for rows in itertools.zip_longest(*parts):  # in the order of the jobs
            yield from ((name, row) for name, row in filter(None, rows))

    def _jobs(self, *sections: str) -> Sequence[Job]:
        return [job for job in self._config.jobs if job.section in sections]

    def _left_s(self, share: float) -> float:
        return self._began + share * self._config.budget_s - time.monotonic()

    def _goes_on(self, share: float) -> bool:
        """True if rank 0 has time left. All ranks get its answer."""
        self._questions += 1
        key, store = f"goes on {self._questions}", self._meeting.store
        if self._meeting.ranks.rank == 0:
            store.set(key, "yes" if self._left_s(share) > 0 else "no")
        return bool(store.get(key) == b"yes")
