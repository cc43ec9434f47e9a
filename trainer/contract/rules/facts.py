"""The input of the rules: the sections of the run file as written, and the world of ranks that they must fit."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any, Literal

from trainer.contract.config import (
    AnswersSettings,
    BlendConfig,
    CheckpointConfig,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve_model, resolve_optimizer
from trainer.contract.evaluation import EvaluationSettings
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.layout import Layout, expert_data_parallel_size, model_parallel_size
from trainer.contract.model.pipeline import chunk_layers
from trainer.contract.problem import Problem, Setting
from trainer.contract.record import record, replaced
from trainer.contract.wording import counted


@record(kw_only=True)
class World:
    """The ranks of the job. Their number is the value of the key `path` (`count`) times `ranks_each`."""

    path: str
    count: int
    ranks_each: int

    @property
    def size(self) -> int:
        """Number of ranks of the job."""
        return self.count * self.ranks_each

    def __str__(self) -> str:
        """The world size with its factors: "3 x 8 = 24 ranks"."""
        factors = f"{self.count} x {self.ranks_each} = " if self.ranks_each > 1 else ""
        return f"{factors}{counted(self.size, 'rank')}"


@record(kw_only=True)
class Facts:
    """The facts that the rules need. Sections may contain nulls; `resolved_model` does not."""

    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    answers: AnswersSettings = dataclasses.field(default_factory=AnswersSettings)
    evaluation: EvaluationSettings = dataclasses.field(default_factory=EvaluationSettings)
    world: World
    evaluation_world: World = World(path="slurm.evaluate.nodes", count=1, ranks_each=1)
    """The ranks of the evaluation job."""
    gpus_per_node: int
    """Devices per node that the job uses."""
    nvlink_nodes: int = 1
    """Nodes whose devices are all connected by NVLink."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the ranks."""
    why_no_gpus: str = "the cluster's nodes have no GPUs"
    """Why the device is a CPU, as the end of a sentence after "but"."""
    device_memory_gib: float | None = None
    """Memory of one device. None if unknown; the memory estimate is then not checked."""
    set_by_user: tuple[str, ...] = ()
    """Keys with a value from --set, then keys with a value from the run file. Other values are from the preset."""

    @cached_property
    def resolved_model(self) -> ModelConfig:
        """The model with defaults for all nulls."""
        return resolve_model(self.model)

    @cached_property
    def resolved_optimizer(self) -> OptimizerConfig:
        """The optimizer with defaults for all nulls."""
        return resolve_optimizer(self.optimizer, self.training, seq_length=self.model.seq_length)

    @cached_property
    def layout(self) -> Layout | None:
        """The layout; None if it is inconsistent (see `Layout.make`)."""
        return Layout.make(self.model, self.parallelism, self.training, self.world.size)

    @cached_property
    def data_parallel_size(self) -> int | None:
        """The data-parallel size; None if the other axes do not divide the world size."""
        size, ranks_left = divmod(self.world.size, model_parallel_size(self.parallelism))
        return None if ranks_left or size == 0 else size

    @property
    def expert_data_parallel_size(self) -> int | None:
        """Number of ranks that hold the same experts; None if the ranks cannot be divided, or for a dense model."""
        return expert_data_parallel_size(self.model, self.parallelism, self.world.size)

    @property
    def nvlink_devices(self) -> int:
        """Number of devices that are all connected by NVLink. Groups that exchange activations should not be larger."""
        return self.gpus_per_node * self.nvlink_nodes

    @property
    def connected_devices(self) -> str:
        """The devices that are connected by NVLink, in words: "8 GPUs of a node"."""
        devices = counted(self.nvlink_devices, "GPU" if self.device == "cuda" else "rank")
        return (
            f"{devices} of {'a node' if self.nvlink_nodes == 1 else f'{self.nvlink_nodes} nodes with NVLink'}"
        )

    def crosses_network(self, size: int) -> bool:
        """True if some groups of `size` consecutive ranks are on devices that NVLink does not connect."""
        return size > self.nvlink_devices or (
            self.world.size > self.nvlink_devices and self.nvlink_devices % size != 0
        )

    def too_large(self, size: int) -> str:
        """Why groups of `size` ranks cross the network, for a message."""
        if size > self.nvlink_devices:
            return f"more than the {self.connected_devices}"
        return f"which does not divide the {self.connected_devices}"

    @property
    def engine_problem(self) -> str:
        """Why the layers cannot use Transformer Engine, after "but". Empty if they can."""
        if self.device != "cuda":
            return self.why_no_gpus
        return "training.transformer_impl is torch" if self.training.transformer_impl == "torch" else ""

    @property
    def has_dense_layers(self) -> bool:
        """True if a layer has an MLP in place of experts."""
        return not all(moe_layer_pattern(self.model))

    @cached_property
    def chunk_layers(self) -> tuple[int, ...] | None:
        """Layers of each model chunk, in pipeline order; None if the layers cannot be divided over the chunks."""
        return chunk_layers(self.model.num_layers, self.parallelism, self.model.mtp_num_layers)

    def value_at(self, path: str) -> object:
        """The value at `path`, such as "data.train[0].weight", or the path of the world."""
        if path == self.world.path:
            return self.world.count
        value: Any = self
        for key, index in re.findall(r"(\w+)|\[(\d+)\]", path):
            value = getattr(value, key) if key else value[int(index)]
        return value

    def with_value(self, path: str, value: object) -> Facts:
        """A copy with a different value at `path` ("section.key", or the path of the world)."""
        if path == self.world.path:
            assert isinstance(value, int)
            return self.changed(world=replaced(self.world, count=value))
        section_name, key = path.split(".")
        return self.changed(**{section_name: replaced(getattr(self, section_name), **{key: value})})

    def changed(self, **fields: Any) -> Facts:
        """A copy with different values of these fields. It does not resolve the same model again."""
        copy = replaced(self, **fields)
        if copy.model is self.model:
            vars(copy)["resolved_model"] = self.resolved_model
        return copy


Rule = Callable[[Facts], Iterator[Problem]]


def unread(
    facts: Facts,
    paths: Sequence[str],
    reason: str,
    hint: str = "",
    about: tuple[str, ...] = (),
    settings: tuple[Setting, ...] = (),
) -> Iterator[Problem]:
    """Yields problems for keys ("section.key") that have no effect here but differ from their defaults."""
    for path in paths:
        section_name, key = path.split(".")
        section = getattr(facts, section_name)
        default = getattr(type(section), key)
        if getattr(section, key) != default:
            yield Problem(path, reason, hint, about=about, settings=settings, candidates=[default])


def indivisible(path: str, size: int, key: str, number: int) -> Problem:
    """The problem of `size` at `path`, which does not divide `number`, the value of `key`."""
    return Problem(
        path=path,
        reason=f"does not divide {key} = {number} ({number} / {size})",
        candidates=divisors(number, near=size),
        about=(key,),
    )


def divisors(number: int, near: int) -> list[int]:
    """The divisors of `number`, closest to `near` first. Extremely large numbers are searched only in part."""
    small = [d for d in range(1, min(math.isqrt(number), 10_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda divisor: (abs(divisor - near), divisor))


def multiples(unit: int, near: int, count: int = 64) -> list[int]:
    """`count` positive multiples of `unit`, closest to `near` first."""
    first = max(1, near // unit - count // 2)
    found = (unit * factor for factor in range(first, first + count))
    return sorted(found, key=lambda multiple: (abs(multiple - near), multiple))
