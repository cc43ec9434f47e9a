"""All rules, in the order in which their violations are reported, and the trainer's check of them.

hpcgen lists all violations of a run file with values that repair it (hpcgen/planning/repairs.py).
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from typing import Protocol

from trainer.contract.config import (
    AnswersSettings,
    BlendConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.evaluation import EvaluationConfig
from trainer.contract.problem import Problem
from trainer.contract.rules import (
    answers,
    batch,
    chats,
    checkpoint,
    context_parallel,
    cuda_graphs,
    data,
    data_stages,
    evaluation,
    experts,
    forward,
    latent_attention,
    logging,
    lora,
    losses,
    model,
    multi_token,
    optimizer,
    parallelism,
    parameter_patterns,
    precision,
    recompute,
    schedule,
)
from trainer.contract.rules.facts import Facts, Rule, World


class RuleModule(Protocol):
    """Attributes of every module of `MODULES`. A tuple is empty if the module has no such rules."""

    RULES: tuple[Rule, ...]
    """Rules that a run must obey, including those of OF_MODEL."""
    WARNINGS: tuple[Rule, ...]
    """Rules that a run may break at the cost of speed, memory or quality."""
    OF_MODEL: tuple[Rule, ...]
    """Rules about keys of the section `model` that contradict each other."""


MODULES: tuple[RuleModule, ...] = (
    model,
    parallelism,
    experts,
    latent_attention,
    multi_token,
    context_parallel,
    batch,
    recompute,
    schedule,
    losses,
    optimizer,
    data,
    chats,
    data_stages,
    precision,
    parameter_patterns,
    cuda_graphs,
    checkpoint,
    lora,
    logging,
    evaluation,
    answers,
)
"""Causes precede consequences, because the trainer reports only the first violation."""

ERRORS = tuple(rule for module in MODULES for rule in module.RULES)
WARNINGS = tuple(rule for module in MODULES for rule in module.WARNINGS)
OF_MODEL = tuple(rule for module in MODULES for rule in module.OF_MODEL)


def vocabulary_is_known(facts: Facts) -> Iterator[Problem]:
    """The trainer needs vocab_size or padded_vocab_size. hpcgen takes it from the tokenizer."""
    if facts.resolved_model.padded_vocab_size is None:
        reason = "must be set, because the trainer does not read a tokenizer"
        yield Problem(path="model.vocab_size", reason=reason)


def end_of_document_is_known(facts: Facts) -> Iterator[Problem]:
    """The trainer needs eod_id, unless it makes the samples itself. hpcgen takes it from the tokenizer."""
    data = facts.data
    if data.needs_eod and data.eod_id is None and not data.mock:
        yield Problem(
            path="data.eod_id",
            reason="must be set for reset_attention_mask, reset_position_ids and eod_mask_loss, because the trainer "
            "does not read a tokenizer",
            about=(
                "data.reset_attention_mask",
                "data.reset_position_ids",
                "data.eod_mask_loss",
                "data.tokenizer",
            ),
        )


WITHOUT_TOKENIZER: tuple[Rule, ...] = (vocabulary_is_known, end_of_document_is_known)
"""Rules for configurations that hpcgen has not completed."""

FORWARD: tuple[Rule, ...] = (
    *OF_MODEL,
    model.padded_vocabulary_covers_vocabulary,
    *forward.RULES,
    data.end_of_document_has_row,
    *WITHOUT_TOKENIZER,
)
"""Rules for computing a trained model."""

SAMPLES: tuple[Rule, ...] = (*data.RULES, *chats.OF_SAMPLES, *data_stages.RULES, *WITHOUT_TOKENIZER)
"""Rules for reading the samples of a run, which do not depend on its ranks."""

TRAINING: tuple[Rule, ...] = (
    *(rule for rule in ERRORS if rule is not parameter_patterns.groups_match_parameters),
    *WITHOUT_TOKENIZER,
)
"""Rules for training. The trainer compares parameter groups with the parameters of the real model instead."""


def require(config: TrainerConfig, rules: Sequence[Rule] = TRAINING) -> None:
    """Check that `config` obeys the rules. Call this before `resolve`, because defaults hide some contradictions.

    Raises:
        ConfigError: the first violation.
    """
    facts = facts_of(config)
    for rule in rules:
        for violation in rule(facts):
            raise ConfigError(_with_advice(facts, violation, rules))


def facts_of(config: TrainerConfig) -> Facts:
    """The facts that the trainer knows. Nodes only matter for hints and warnings."""
    return Facts(
        model=config.model,
        parallelism=config.parallelism,
        training=config.training,
        optimizer=config.optimizer,
        data=config.data,
        checkpoint=config.checkpoint,
        logging=config.logging,
        answers=config.answers or AnswersSettings(),
        lora=config.lora,
        world=World(path="world_size", count=config.world_size, ranks_each=1),
        gpus_per_node=config.world_size,
        device=config.device,
        why_no_gpus="device is cpu",
    )


def contradictions(model: ModelConfig) -> list[Problem]:
    """Keys of `model` that contradict each other."""
    facts = dataclasses.replace(ANY_RUN, model=model)
    return [_with_value(facts, found) for rule in OF_MODEL for found in rule(facts)]


def evaluation_problems(config: EvaluationConfig) -> list[Problem]:
    """Mistakes in the settings of an evaluation job, except settings of the model."""
    world = World(path="world_size", count=config.world_size, ranks_each=1)
    facts = dataclasses.replace(ANY_RUN, evaluation=config.settings, evaluation_world=world)
    rules = (*evaluation.OF_JOB, evaluation.job_has_work)
    return [_with_advice(facts, found, rules) for rule in rules for found in rule(facts)]


ANY_RUN = Facts(
    model=ModelConfig(num_layers=1, hidden_size=1, num_attention_heads=1, seq_length=1),
    parallelism=ParallelismConfig(),
    training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1),
    optimizer=OptimizerConfig(lr=1.0),
    data=BlendConfig(mock=True),
    world=World(path="world_size", count=1, ranks_each=1),
    gpus_per_node=1,
)
"""Facts for rules that read a single section."""


def _with_value(facts: Facts, violation: Problem) -> Problem:
    """The violation with the value next to the path: "model.num_layers = 3". The value of a section is left out."""
    value = facts.value_at(violation.path)
    is_plain = not dataclasses.is_dataclass(value) and not (
        isinstance(value, tuple) and any(map(dataclasses.is_dataclass, value))
    )
    subject = f"{violation.path} = {json.dumps(value)}" if is_plain else violation.path
    return dataclasses.replace(violation, subject=subject)


def _with_advice(facts: Facts, violation: Problem, rules: Sequence[Rule]) -> Problem:
    """The violation with its value and its advice, as a sentence of the trainer's log."""
    advice = " or ".join(filter(None, (_repair(facts, violation, rules), violation.advice)))
    sentence = f"{violation.reason}. {advice[0].upper()}{advice[1:]}" if advice else violation.reason
    shown = _with_value(facts, violation)
    return dataclasses.replace(shown, reason=sentence, hint="", settings=(), candidates=())


def _repair(facts: Facts, violation: Problem, rules: Sequence[Rule]) -> str:
    """The first candidate with which no rule is violated; empty if there is none."""
    for value in violation.candidates:
        changed = facts.with_value(violation.path, value)
        if all(next(rule(changed), None) is None for rule in rules):
            return f"use {json.dumps(value)}"
    return ""
