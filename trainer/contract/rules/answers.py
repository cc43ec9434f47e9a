"""Rules for the answers of the model in training."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.contract.config.choice import Choice
from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule


def answers_can_be_chosen(facts: Facts) -> Iterator[Problem]:
    """Values of the section are in range and have an effect, as for generation (hpcgen's rule)."""
    for problem in facts.answers.problems():
        yield dataclasses.replace(problem, path=f"answers.{problem.path}", subject="")


def answers_have_prompts(facts: Facts) -> Iterator[Problem]:
    """Keys of the section need prompts (hpcgen's rule: they would have no effect)."""
    answers, default = facts.answers, Choice()
    if answers.prompts is None:
        for field in dataclasses.fields(Choice):
            if getattr(answers, field.name) != getattr(default, field.name):
                yield Problem(
                    path=f"answers.{field.name}",
                    reason="has no effect without answers.prompts",
                    hint="set answers.prompts, or remove it",
                )


def answers_are_independent(facts: Facts) -> Iterator[Problem]:
    """No capacity of experts (hpcgen's rule: a text would depend on the other texts, which take the capacity)."""
    if facts.answers.prompts is not None and facts.model.moe_expert_capacity_factor is not None:
        yield Problem(
            path="answers.prompts",
            reason="is not supported with model.moe_expert_capacity_factor, with which an answer would depend on the "
            "other answers",
            candidates=[None],
            about=("model.moe_expert_capacity_factor",),
        )


RULES: tuple[Rule, ...] = (answers_can_be_chosen, answers_have_prompts, answers_are_independent)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
