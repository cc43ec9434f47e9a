"""Published runs: their measured steps, and their configurations as run files of hpcgen.

`data/configurations.yaml` describes its keys, and `data/steps.csv` has the measurements with their sources.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcgen.config import document as documents
from hpcgen.config.loader import Run, load_document
from hpcgen.config.presets import PRESETS
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import build
from hpcgen.errors import ConfigErrors
from hpcgen.planning.paths import absolute_paths
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.machine import Machine
from hpcgen.planning.step_time.measurements import Measurements
from hpcgen.run_plan.training import plan_training
from trainer.contract.config import TrainerConfig

DATA = Path(__file__).with_name("data")
UNCHANGING: dict[str, Any] = {
    "paths": {"run_dir": "/runs"},
    "optimizer": {"lr": 1e-4},
    "data": {"mock": True},
}
"""Sections that the time of a step does not depend on."""


@dataclass(frozen=True)
class Software:
    """Abilities of the published software that this trainer lacks."""

    gradient_bytes: int = 4
    """Size of an accumulated and reduced gradient."""
    unfused_attention: bool = False
    """True if attention wrote its scores to memory."""
    dispatch: Literal["plain", "deduplicated", "hidden"] = "plain"
    """How tokens reached their experts: all copies one by one, one copy per node, or while other microbatches are
    computed."""


@dataclass(frozen=True)
class Configuration:
    """A run as a run file would describe it."""

    name: str
    group: str
    cluster: str
    nodes: int
    model: str
    parallelism: Mapping[str, Any]
    training: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()
    """Assumptions where the source states nothing."""
    software: Software = Software()

    def changed(self, changes: Mapping[str, Mapping[str, Any]]) -> Configuration:
        """The configuration with other keys in sections of its run file."""
        sections = {name: {**getattr(self, name), **keys} for name, keys in changes.items()}
        return dataclasses.replace(self, **sections)

    @functools.cached_property
    def planned(self) -> Planned:
        """The run, planned as `hpcgen render` would, except that its memory is not checked.

        Published runs kept gradients in bf16, so they fit where this trainer would not.

        Raises:
            ConfigErrors: the configuration has mistakes, or breaks rules.
        """
        document = documents.constant(self._document(), self.name)
        config, mistakes = build(RunConfig, document)
        if config is None or mistakes:
            raise ConfigErrors(list(mistakes))
        run = _run_on(self.cluster)
        node_type = dataclasses.replace(run.node_type, gpu_memory_gib=None)
        training = plan_training(
            dataclasses.replace(run, config=config, document=document, node_type=node_type),
            absolute_paths(config, run.directory),
            must_fit=False,
        )
        if training.errors:
            raise ConfigErrors(list(training.errors))
        assert training.trainer is not None
        assert training.layout is not None
        setup = Setup.of(training.trainer, training.layout)
        setup = dataclasses.replace(setup, gradient_bytes=self.software.gradient_bytes)
        return Planned(training.trainer, setup, _machine_of(self.cluster))

    def _document(self) -> dict[str, Any]:
        return {
            **UNCHANGING,
            "name": self.name,
            "cluster": self.cluster,
            "slurm": {"train": {"nodes": self.nodes}},
            "model": models()[self.model],
            "parallelism": dict(self.parallelism),
            "training": {"train_iters": 1000, **self.training},
        }


@dataclass(frozen=True)
class Planned:
    """A planned run and its machine."""

    trainer: TrainerConfig
    setup: Setup
    machine: Machine
    documents: tuple[int, ...] = ()
    """Lengths of the documents of typical samples, for a run that separates them."""


@dataclass(frozen=True)
class Step:
    """A measured step."""

    row: str
    configuration: str
    software: str
    date: str
    step_s: float
    source: str
    note: str


@functools.cache
def models() -> dict[str, dict[str, Any]]:
    """The sections `model` by name: those of the file, and those of presets."""
    presets = {name: dict(preset.sections["model"]) for name, preset in PRESETS.items()}
    return presets | _document()["models"]


@functools.cache
def configurations() -> dict[str, Configuration]:
    """The configurations by name."""
    return {
        name: Configuration(
            name,
            **keys
            | {
                "assumptions": tuple(keys["assumptions"]),
                "software": Software(**keys.get("software", {})),
            },
        )
        for name, keys in _document()["configurations"].items()
    }


@functools.cache
def steps() -> dict[str, list[Step]]:
    """The measured steps by configuration."""
    measured: dict[str, list[Step]] = {}
    for step in _rows():
        measured.setdefault(step.configuration, []).append(step)
    return measured


def _rows() -> Iterator[Step]:
    names = [field.name for field in dataclasses.fields(Step)]
    with (DATA / "steps.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            yield Step(**{name: row[name] for name in names} | {"step_s": float(row["step_s"])})


@functools.cache
def _document() -> dict[str, Any]:
    return read("configurations.yaml")


def read(name: str) -> Any:
    """The values of a YAML file of the folder."""
    return documents.parse((DATA / name).read_text(encoding="utf-8"), name).values


@functools.cache
def _run_on(cluster: str) -> Run:
    """A run on a cluster. Reading a profile takes longer than planning a run."""
    values = {**UNCHANGING, "name": "any", "cluster": cluster}
    return load_document(documents.constant(values, cluster), DATA)


@functools.cache
def _machine_of(cluster: str) -> Machine:
    """The machine of a cluster, with a host that no GPU waits for. Sources do not say how fast the host was.

    Predictions for one machine share the times of its kernels.
    """
    node_type = _run_on(cluster).node_type
    machine = Machine.of(node_type, node_type.gpus_per_node)
    shapes = itertools.product(("dense", "experts"), (False, True), (False, True), ("bf16", "fp8"))
    names = ("layer", "tensor_parallel", "graphs", "precision")
    host = tuple(dict(zip(names, shape, strict=True), us=0.0) for shape in shapes)
    measured = machine.measurements or Measurements(machine.gpu_model)
    return dataclasses.replace(machine, measurements=dataclasses.replace(measured, host=host))
