"""Time that the host needs to launch a layer, forward and backward, measured with the trainer's own steps.

Samples of 64 tokens leave the GPU almost nothing to do. Two models differ in their number of layers only, so that the
difference of their steps is the time of these layers.

`python -m trainer.calibration.host FEWER MORE RESULT` is a process that trains both as one of their ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.contract.calibration import Job
from trainer.contract.config import read
from trainer.contract.config.document import to_dict
from trainer.distributed import device
from trainer.distributed.rendezvous import Ranks, find_ranks
from trainer.health.meeting import Meeting

Row = dict[str, Any]
LIMIT_S = 180.0
"""Time after which a process that measures a row is killed (seconds)."""
MAX_ERROR = 500
"""Characters of the end of a process's output that an error shows."""


@dataclass(frozen=True)
class Place:
    """Ranks of one node that measure a row."""

    job: Job
    ranks: tuple[int, ...]


def waves(jobs: Sequence[Job], nodes: Sequence[str]) -> Iterator[list[Place]]:
    """Yields what is measured at the same time. `nodes` has the node of each rank."""
    left = list(jobs)
    while left:
        wave: list[Place] = []
        free = list(range(len(nodes)))
        for job in list(left):
            if ranks := _together(free, nodes, job.trainings[0].world_size):
                wave.append(Place(job, ranks))
                free = [rank for rank in free if rank not in ranks]
                left.remove(job)
        if not wave:  # no node has two ranks
            return
        yield wave


def _together(free: Sequence[int], nodes: Sequence[str], number: int) -> tuple[int, ...]:
    """The first `number` free ranks of one node; empty if there are none."""
    for first in free:
        ranks = [rank for rank in free if nodes[rank] == nodes[first]][:number]
        if len(ranks) == number:
            return tuple(ranks)
    return ()


def measured(wave: Sequence[Place], meeting: Meeting, topic: str) -> list[Row]:
    """The rows of a wave, with times or errors. All ranks call this together and get the same."""
    mine = next((place for place in wave if meeting.ranks.rank in place.ranks), None)
    leads = mine is not None and mine.ranks[0] == meeting.ranks.rank
    ports = meeting.gather(f"{topic}: ports", _free_port() if leads else None)
    result: Row | None = None
    if mine is not None:
        result = _run(mine, meeting.ranks, ports[mine.ranks[0]])
    results = meeting.gather(f"{topic}: results", result)
    return [place.job.row | results[place.ranks[0]] for place in wave]


def _run(place: Place, ranks: Ranks, port: int) -> Row:
    """The result of a process that measures the row as one of its ranks, on the GPU of this process."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        scratch = Path(directory)
        result, log = scratch / "result.json", scratch / "log"
        files = [scratch / f"{training.model.num_layers}-layers.json" for training in place.job.trainings]
        for file, training in zip(files, place.job.trainings, strict=True):
            file.write_text(json.dumps(to_dict(dataclasses.replace(training, run_dir=directory))))
        command = [sys.executable, "-m", "trainer.calibration.host", *map(str, files), str(result)]
        position = dataclasses.replace(ranks, rank=place.ranks.index(ranks.rank), world_size=len(place.ranks))
        with log.open("wb") as output:
            ended = _ended(command, _environment(os.environ, position, port), output)
        if result.exists():
            row: Row = json.loads(result.read_text())
            return row
        return {"error": f"{ended}: {log.read_text(errors='replace').strip()[-MAX_ERROR:]}"}


def _ended(command: list[str], environment: dict[str, str], output: BinaryIO) -> str:
    """Run a process, which has LIMIT_S. Returns how it ended."""
    child = subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return f"status {child.wait(LIMIT_S)}"
    except subprocess.TimeoutExpired:
        return f"no result after {LIMIT_S:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def _environment(environ: Mapping[str, str], ranks: Ranks, port: int) -> dict[str, str]:
    """Variables with which a child on this node has these `ranks`. The local rank, and so the GPU, stays."""
    kept = {
        name: value
        for name, value in environ.items()
        if not name.startswith("TORCHELASTIC_") and name != "TRAINER_RENDEZVOUS_ID"
    }
    return kept | {
        "RANK": str(ranks.rank),
        "LOCAL_RANK": str(ranks.local_rank),
        "WORLD_SIZE": str(ranks.world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def main() -> int:
    """Train the two configurations of the command line as one of their ranks, and write the time of a layer."""
    trainings = [read(Path(path)) for path in sys.argv[1:3]]
    ranks = find_ranks(os.environ)
    device.prepare(trainings[0].device)
    # imports megatron.core: after `device.prepare`
    from trainer.calibration.trainings import write_launch_times

    write_launch_times(trainings, ranks, Path(sys.argv[3]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
