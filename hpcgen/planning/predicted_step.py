"""The predicted step of a resolved training run, or why there is none."""

from __future__ import annotations

import dataclasses

from hpcgen.config.loader import Run
from hpcgen.config.node_type import NodeType
from hpcgen.errors import HpcgenError
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.measured_file import measured_on
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.estimate import estimate_step_time
from hpcgen.planning.step_time.machine import Machine, missing_facts
from hpcgen.planning.step_time.measurements import Measurements
from hpcgen.planning.step_time.result import StepTime
from trainer.contract.config import ModelConfig, TrainerConfig, TrainingConfig
from trainer.contract.model.layout import Layout


class NoPrediction(HpcgenError):
    """The reason why a run's time cannot be predicted."""


def machine_of(
    training: TrainingConfig,
    name: str,
    node_type: NodeType,
    gpus_per_node: int,
    nvlink_nodes: int,
    cluster: Measurements | None = None,
) -> Machine:
    """The machine of a run on nodes of the type `name`, of which each job uses `gpus_per_node` GPUs. `cluster` is what
    was measured on its cluster (`measured_on`).

    Raises:
        NoPrediction: facts of the nodes are unknown.
    """
    missing = missing_facts(node_type, training.precision_of_layers)
    if missing == ["device"]:
        raise NoPrediction("the run trains on CPUs, whose speed hpcgen does not know")
    if missing:
        raise NoPrediction(f"node type {name} lacks {' and '.join(missing)}")
    return Machine.of(node_type, gpus_per_node * nvlink_nodes, gpus_per_node, cluster)


def layers_are_known(model: ModelConfig) -> None:
    """Check that the layers of a model are not the user's.

    Raises:
        NoPrediction: they are.
    """
    for key in ("model_provider", "layer_spec"):
        if value := getattr(model, key):
            raise NoPrediction(f"model.{key} = {value} builds layers whose time hpcgen does not know")


def machine_of_run(run: Run, training: TrainingConfig, allocation: Allocation) -> Machine:
    """The machine of a run's training, with what was measured on its cluster.

    Raises:
        NoPrediction: facts of the nodes are unknown, or what was measured cannot be used.
    """
    try:
        measured = measured_on(run)
    except HpcgenError as error:
        raise NoPrediction("what was measured on the cluster cannot be used", str(error)) from error
    counts = allocation.ntasks_per_node, allocation.nvlink_nodes
    return machine_of(training, run.cluster.node_type, run.node_type, *counts, measured)


def predicted_step(
    trainer: TrainerConfig, machine: Machine, batch_size: int, *, host: float = 1.0
) -> StepTime:
    """A step with `batch_size` samples, which may be smaller than the full batch of a run whose batch grows.

    `host` is the time of launches relative to the measured one.

    Raises:
        NoPrediction: the run has layers of the user.
    """
    layers_are_known(trainer.model)
    training = dataclasses.replace(trainer.training, global_batch_size=batch_size, rampup_batch_size=None)
    layout = Layout.make(trainer.model, trainer.parallelism, training, trainer.world_size)
    assert layout is not None  # the rules say which batch sizes are possible
    setup = Setup.of(dataclasses.replace(trainer, training=training), layout)
    return estimate_step_time(setup, machine, host=host)
