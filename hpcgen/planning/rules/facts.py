"""What the rules look at: the sections of the run file as written, and the world that they must fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hpcgen.planning.layout import Layout, model_parallel_size
from hpcgen.wording import counted
from trainer.contract.config import (
    BlendConfig,
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.resolve import resolve_model, resolve_optimizer


@dataclass(frozen=True, kw_only=True)
class World:
    """Where the ranks come from: `count` of what the key `path` counts, with `ranks_each` ranks in each."""

    path: str
    count: int
    ranks_each: int

    @property
    def size(self) -> int:
        """Ranks of the job."""
        return self.count * self.ranks_each

    def __str__(self) -> str:
        """The world size and how it comes about: "3 x 8 = 24 ranks"."""
        factors = f"{self.count} x {self.ranks_each} = " if self.ranks_each > 1 else ""
        return f"{factors}{counted(self.size, 'rank')}"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Everything that the rules need to know. Sections may hold nulls: `resolved_model` has none."""

    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    world: World
    gpus_per_node: int
    """Devices of one node, which are also those that NVLink joins."""
    device: Literal["cuda", "cpu"] = "cuda"
    """What the ranks compute on."""
    device_memory_gib: float | None = None
    """Memory of one device; null where nobody knows, and then no estimate is compared with it."""

    @cached_property
    def resolved_model(self) -> ModelConfig:
        """The model with every null filled in."""
        return resolve_model(self.model)

    @cached_property
    def resolved_optimizer(self) -> OptimizerConfig:
        """The optimizer with every null filled in."""
        return resolve_optimizer(self.optimizer, self.training, seq_length=self.model.seq_length)

    @cached_property
    def layout(self) -> Layout | None:
        """The layout, where ranks, batch and layers can be shared out."""
        return Layout.make(self.model, self.parallelism, self.training, self.world.size)

    @cached_property
    def data_parallel_size(self) -> int | None:
        """The ranks left over by the other axes, where they divide the world."""
        size, ranks_left = divmod(self.world.size, model_parallel_size(self.parallelism))
        return None if ranks_left or size == 0 else size

    @property
    def num_chunks(self) -> int:
        """Model chunks on one pipeline stage."""
        return self.parallelism.virtual_pipeline_model_parallel_size or 1

    @property
    def num_layers_per_chunk(self) -> int | None:
        """Layers of one model chunk, where chunks and stages divide the layers."""
        chunks = self.num_chunks * self.parallelism.pipeline_model_parallel_size
        return None if self.model.num_layers % chunks else self.model.num_layers // chunks

    def with_value(self, path: str, value: object) -> Facts:
        """These facts with another value at `path` ("section.key", or the path of the world)."""
        if path == self.world.path:
            assert isinstance(value, int)
            return dataclasses.replace(self, world=dataclasses.replace(self.world, count=value))
        section_name, key = path.split(".")
        section = dataclasses.replace(getattr(self, section_name), **{key: value})
        return dataclasses.replace(self, **{section_name: section})


@dataclass(frozen=True, kw_only=True)
class Violation:
    """A Problem before its hint is worked out.

    `candidates` are values for `path` that may satisfy the rule, the best first; those which do, and satisfy
    the other rules too, are offered, at most `offers`. `advice` says what else would help.
    """

    path: str
    reason: str
    candidates: Sequence[object] = ()
    offers: int = 6
    advice: str = ""


Rule = Callable[[Facts], Iterator[Violation]]


def unread(facts: Facts, paths: Sequence[str], reason: str, advice: str = "") -> Iterator[Violation]:
    """Keys ("section.key") that nothing reads as things are, and that are not at their defaults."""
    for path in paths:
        section_name, key = path.split(".")
        section = getattr(facts, section_name)
        [usual] = (field.default for field in dataclasses.fields(section) if field.name == key)
        if getattr(section, key) != usual:
            yield Violation(path=path, reason=reason, candidates=[usual], advice=advice)


def divisors(number: int, near: int) -> list[int]:
    """The divisors of `number`, those next to `near` first. Absurdly large numbers are searched in part."""
    small = [d for d in range(1, min(math.isqrt(number), 10_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)}, key=lambda divisor: (abs(divisor - near), divisor))


def multiples(unit: int, near: int, count: int = 64) -> list[int]:
    """`count` positive multiples of `unit`, those next to `near` first."""
    first = max(1, near // unit - count // 2)
    found = (unit * factor for factor in range(first, first + count))
    return sorted(found, key=lambda multiple: (abs(multiple - near), multiple))
