"""Rules for the optimizer: its learning rate and its parameter groups."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase

from trainer.contract.model.model_size import layers_parameter_count, parameter_names
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


def groups_match_parameters(facts: Facts) -> Iterator[Problem]:
    """Each group matches a parameter that no earlier group matches (trainer/optimizer/parameter_groups.py).

    Checked only for Megatron-Core's layers. On GPUs, these are Transformer Engine's or Core's own. The two name the
    norms differently, so a group must match the names of one of them.
    """
    groups, model = facts.optimizer.parameter_groups, facts.resolved_model
    if not groups or model.layer_spec is not None or model.model_provider is not None:
        return
    variants = [parameter_names(model)]
    if facts.device == "cuda":
        variants.append(parameter_names(model, transformer_engine=True))
    matched = set()
    for names in variants:
        for name in names:
            matched.add(next((i for i, group in enumerate(groups) if fnmatchcase(name, group.match)), None))
    missed = [group.match for index, group in enumerate(groups) if index not in matched]
    if missed:
        shown = (
            name for name in variants[-1] if not name.startswith("decoder.layers.") or ".layers.0." in name
        )
        yield Problem(
            path="optimizer.parameter_groups",
            reason=f"contains {', '.join(map(repr, missed))}, which matches no parameter outside earlier "
            f"groups. The parameters are {', '.join(shown)}, and the same names for each further layer",
        )


def _usual(facts: Facts) -> float:
    return optimizer_of(facts.optimizer).usual_lr(layers_parameter_count(facts.resolved_model))


def _is_scaled(facts: Facts) -> bool:
    optimizer = facts.optimizer
    return optimizer.lr_schedule is not None or any(g.lr_mult < 1 for g in optimizer.parameter_groups)


RULES: tuple[Rule, ...] = (rate_is_possible, groups_match_parameters)

WARNINGS: tuple[Rule, ...] = (rate_is_usual,)

OF_MODEL: tuple[Rule, ...] = ()
