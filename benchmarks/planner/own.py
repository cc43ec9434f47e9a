"""Our own measured runs (benchmarks.planner_cases): predicted time and memory, and what they needed.

`python -m benchmarks.planner.measure` writes `data/own.csv`, with a row for each case: its name, the gpu_model of the
GPU, the median time of a step in seconds, the memory that torch allocated and reserved on the GPU of rank 0 in GiB, and
the machine, date and versions.
"""

from __future__ import annotations

import csv
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.documents import document_lengths
from benchmarks.planner.published import DATA, Planned
from benchmarks.planner_cases import CASES
from benchmarks.train import configuration
from benchmarks.train_cases import Case
from hpcgen.config.node_types import load_node_type
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.model.layout import Layout

GPU = "H100 SXM 80 GB"
"""The model that the frozen predictions are for."""
NUM_DOCUMENTS = 4000
NODE_TYPES = {"H100 SXM 80 GB": "h100-sxm", "H200 SXM 141 GB": "h200-sxm"}
"""Node types by the GPU model that was measured."""


@dataclass(frozen=True)
class OwnStep:
    """A measured case."""

    case: str
    gpu: str
    step_s: float
    allocated_gib: float
    reserved_gib: float


@functools.cache
def planned_case(name: str, gpu: str) -> Planned:
    """A case as the planner sees it, on GPUs of a model that NVLink connects.

    The router of a case with experts loads them evenly, which is also what a prediction assumes.
    """
    case = _case(name)
    config = configuration(case, Path("/corpus"), Path("/run"))
    config["model"].pop("layer_spec", None)
    trainer = resolve(from_dict(TrainerConfig, config, where=name))
    layout = Layout.make(trainer.model, trainer.parallelism, trainer.training, case.gpus)
    assert layout is not None
    return Planned(trainer, Setup.of(trainer, layout), _machine_of(gpu, case.gpus), documents_of(case))


@functools.cache
def _machine_of(gpu: str, num_gpus: int) -> Machine:
    """GPUs of a model that NVLink connects."""
    return Machine.of(load_node_type(NODE_TYPES[gpu]), num_gpus, num_gpus)


def documents_of(case: Case) -> tuple[int, ...]:
    """Lengths of random documents, cut where samples of a case that separates them end."""
    if not case.data:
        return ()
    length = case.model["seq_length"]
    ends = set(itertools.accumulate(map(int, document_lengths(NUM_DOCUMENTS))))
    samples = range(0, max(ends), length)
    bounds = sorted(end for end in ends.union(samples) if end <= samples[-1])
    return tuple(end - start for start, end in itertools.pairwise(bounds))


def own_steps() -> Iterator[OwnStep]:
    """The measured cases; none before they were measured."""
    file = DATA / "own.csv"
    if file.exists():
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                numbers = (float(row[name]) for name in ("step_s", "allocated_gib", "reserved_gib"))
                yield OwnStep(row["case"], row["gpu"], *numbers)


def _case(name: str) -> Case:
    return next(case for case in CASES if case.name == name)
