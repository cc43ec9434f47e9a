"""The predicted step time of a run, from the configuration and the nodes of its job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hpcgen.config.node_types import load_node_type
from hpcgen.config.stages import MACHINE_FILE
from hpcgen.errors import HpcgenError
from hpcgen.planning.measured_file import measured_in
from hpcgen.planning.predicted_step import machine_of, predicted_step
from hpcgen.planning.step_time.result import StepTime
from hpcgen.report.run import Run
from hpcgen.slurm.job_files import JOBS
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.regular_file import read_text
from trainer.contract.model.batch_size import batch_sizes
from trainer.contract.rules.engine import require


def predicted_step_s(run: Run, batch_size: float | None) -> float | None:
    """Seconds of a step with `batch_size` samples; the full batch if that is not a batch size of the run.

    None if there is no prediction (`predicted_step_of`).
    """
    found = predicted_step_of(run, batch_size)
    return None if found is None else found.total


def predicted_step_of(run: Run, batch_size: float | None) -> StepTime | None:
    """The predicted step with `batch_size` samples; with the full batch if that is not a batch size of the run.

    None if nothing is predicted for the run, if hpcgen 0.2.0 or older rendered it, or if this version does not know
    its configuration or its node type.
    """
    try:
        trainer = from_dict(TrainerConfig, run.config, where=str(run.directory))
        require(trainer)
        trainer, nodes = resolve(trainer), nodes_of(run.directory)
        name = str(nodes["node_type"])
        counts = int(nodes["gpus_per_node"]), int(nodes["nvlink_nodes"])
        node_type = load_node_type(name)
        measured = measured_in(map(Path, nodes.get("measured", ())), node_type)
        machine = machine_of(trainer.training, name, node_type, *counts, measured)
        sizes = batch_sizes(trainer.training)
        size = int(batch_size) if batch_size is not None and batch_size in sizes else sizes[-1]
        return predicted_step(trainer, machine, size)
    except (HpcgenError, TrainerError, OSError, ValueError, LookupError, TypeError):
        return None


def nodes_of(directory: Path) -> dict[str, Any]:
    """The nodes of the newest job.

    Raises:
        OSError, ValueError: there is no such file, it cannot be read, or is damaged.
    """
    newest = max(directory.glob(f"{JOBS}/*/{MACHINE_FILE}"), key=lambda path: path.stat().st_mtime)
    found: dict[str, Any] = json.loads(read_text(newest))
    return found
