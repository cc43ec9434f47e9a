"""Converts --cuda-graph-impl. Graphs do not change results, so they are left out where the trainer records none."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from hpcgen.check.lint.megatron import KEYS
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.values import Flags, carry_as, shown
from trainer.contract.config import (
    BlendConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
    from_dict,
)
from trainer.contract.rules import cuda_graphs
from trainer.contract.rules.facts import Facts, World

S = TypeVar("S")
CUDA_GRAPH_IMPL = "cuda-graph-impl"
KEY = KEYS[CUDA_GRAPH_IMPL]


def carry_graphs(flags: Flags, carried: Carried) -> None:
    """Converts the option after all others, since it depends on them."""
    if (flag := flags.get(CUDA_GRAPH_IMPL)) is None:
        return
    carried.seen.add(CUDA_GRAPH_IMPL)
    if is_sure(flag.value) and flag.value and flag.value.text == "local":
        carried.leave(flag.line, shown(flag), "the trainer records graphs with transformer_engine")
        return
    carry_as(KEY, flag, carried)
    if not carried.is_chosen(KEY) and (why := _problem(carried)):
        carried.drop(KEY)
        carried.leave(flag.line, shown(flag), why)


def _problem(carried: Carried) -> str:
    """Why the trainer cannot record the layers of this run. Empty if it can, or if a value is missing or invalid."""

    def section(cls: type[S], name: str) -> S:
        values = {field.name: carried.get(f"{name}.{field.name}") for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return from_dict(cls, {key: value for key, value in values.items() if value is not None}, name)

    try:
        facts = Facts(
            model=section(ModelConfig, "model"),
            parallelism=section(ParallelismConfig, "parallelism"),
            training=section(TrainingConfig, "training"),
            optimizer=OptimizerConfig(lr=1.0),
            data=BlendConfig(reset_attention_mask=bool(carried.get("data.reset_attention_mask"))),
            world=World(path="", count=1, ranks_each=1),
            gpus_per_node=1,
        )
    except ConfigError:
        return ""
    found = next((found for rule in cuda_graphs.RULES for found in rule(facts)), None)
    if found is None:
        return ""
    return f"{'it' if found.path == KEY else found.path} {found.reason}"
