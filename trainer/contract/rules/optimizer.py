"""Rules for the optimizer: its learning rate."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.model.model_size import layers_parameter_count
from trainer.contract.optimizers import optimizer_of
from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule

FAR_ABOVE = 10
"""Multiple of the published rate that causes a warning. It is beyond any sweep, and typical of a wrong exponent."""


def rate_is_possible(facts: Facts) -> Iterator[Problem]:
    """lr <= largest_lr (hpcgen's rule). Does not apply to a custom schedule or to groups that scale lr down."""
    optimizer, lr = optimizer_of(facts.optimizer), facts.optimizer.lr
    if lr > optimizer.largest_lr and not _is_scaled(facts):
        usual = _usual(facts)
        yield Problem(
            path="optimizer.lr",
            reason=f"is too high for {optimizer.name}, because {optimizer.effect_of_lr(lr)}. The published rate for "
            f"models of this size is about {usual:.1g}",
            candidates=[float(f"{usual:.1g}")],
        )


def rate_is_usual(facts: Facts) -> Iterator[Problem]:
    """lr <= FAR_ABOVE x the published rate (hpcgen's rule)."""
    usual, largest = _usual(facts), optimizer_of(facts.optimizer).largest_lr
    if facts.optimizer.lr > FAR_ABOVE * usual and (facts.optimizer.lr <= largest or _is_scaled(facts)):
        yield Problem(
            path="optimizer.lr",
            reason=f"is {facts.optimizer.lr / usual:,.0f} times the published rate for models of this size "
            f"(about {usual:.1g}), so the loss may diverge",
            hint="check the exponent",
        )


def _usual(facts: Facts) -> float:
    return optimizer_of(facts.optimizer).usual_lr(layers_parameter_count(facts.resolved_model))


def _is_scaled(facts: Facts) -> bool:
    optimizer = facts.optimizer
    return optimizer.lr_schedule is not None or any(g.lr_mult < 1 for g in optimizer.parameter_groups)


RULES: tuple[Rule, ...] = (rate_is_possible,)

WARNINGS: tuple[Rule, ...] = (rate_is_usual,)

OF_MODEL: tuple[Rule, ...] = ()
