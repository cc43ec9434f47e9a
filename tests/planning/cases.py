"""A run that breaks no rule, and how to change single values of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from hpcgen.planning.repairs import WARNINGS, check
from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.problem import Problem
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts, Rule, World

TP = "parallelism__tensor_model_parallel_size"
PP = "parallelism__pipeline_model_parallel_size"
VPP = "parallelism__virtual_pipeline_model_parallel_size"
CP = "parallelism__context_parallel_size"
SP = "parallelism__sequence_parallel"
HEADS = "model__num_attention_heads"
GROUPS = "model__num_query_groups"
BATCH = "training__global_batch_size"
RAMPUP = "training__rampup_batch_size"
ROPE = {"model__position_embedding_type": "rope"}
MLA = ROPE | {"model__multi_latent_attention": True}
MTP = ROPE | {"model__mtp_num_layers": 1}
YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=8192)


def valid_facts(device_memory_gib: float = 80, device: str = "cuda", **changes: object) -> Facts:
    """GPT of 12 layers and 16 heads on two nodes of 8 GPUs; `changes` are "section__key", "nodes" or
    "evaluation_ranks"."""
    facts = Facts(
        model=ModelConfig(
            num_layers=12, hidden_size=1024, num_attention_heads=16, seq_length=2048, vocab_size=50257
        ),
        parallelism=ParallelismConfig(),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=512, train_iters=1000),
        optimizer=OptimizerConfig(lr=3e-4),
        data=BlendConfig(mock=True),
        world=World(path="slurm.train.nodes", count=2, ranks_each=8),
        evaluation_world=World(path="slurm.evaluate.nodes", count=1, ranks_each=8),
        gpus_per_node=8,
        device_memory_gib=device_memory_gib,
        device=device,
    )
    if ranks := changes.pop("evaluation_ranks", None):
        world = World(path="slurm.evaluate.nodes", count=ranks, ranks_each=1)
        facts = dataclasses.replace(facts, evaluation_world=world)
    for name, value in changes.items():
        path = facts.world.path if name == "nodes" else name.replace("__", ".")
        facts = facts.with_value(path, value)
    return facts


def trainer_of(model: ModelConfig, **training: Any) -> TrainerConfig:
    """One step of one GPU with the resolved `model`."""
    return TrainerConfig(
        name="n",
        run_dir="/r",
        device="cuda",
        world_size=1,
        model=model,
        parallelism=ParallelismConfig(),
        training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1, **training),
        optimizer=OptimizerConfig(lr=1e-4),
        data=BlendConfig(mock=True),
    )


def errors(**changes: object) -> list[str]:
    """The errors of the changed run, one line each: "path reason; hint"."""
    return [str(problem) for problem in _errors(valid_facts(**changes))]


def warnings(device_memory_gib: float = 80, **changes: object) -> list[str]:
    """The warnings of the changed run, which has no errors."""
    return [str(problem) for problem in _warnings(valid_facts(device_memory_gib, **changes))]


def broken(**changes: object) -> list[tuple[str, Rule]]:
    """The errors of the changed run: the path of each, and the rule that reports it."""
    facts = valid_facts(**changes)
    return [(problem.path, _rule_of(problem, facts, ERRORS)) for problem in _errors(facts)]


def warned(**changes: object) -> list[tuple[str, Rule]]:
    """The warnings of the changed run, which has no errors: the path of each, and the rule that reports it."""
    facts = valid_facts(**changes)
    return [(problem.path, _rule_of(problem, facts, WARNINGS)) for problem in _warnings(facts)]


def _errors(facts: Facts) -> list[Problem]:
    return check(facts)[0]


def _warnings(facts: Facts) -> list[Problem]:
    problems, found = check(facts, must_fit=False)
    assert problems == []
    return found


def _rule_of(problem: Problem, facts: Facts, rules: Iterable[Rule]) -> Rule:
    """The rule whose violation became `problem`."""
    return next(
        rule
        for rule in rules
        for violation in rule(facts)
        if (violation.path, violation.reason) == (problem.path, problem.reason)
    )
