"""Rules for the optimizer: its learning rate and its parameter groups."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from trainer.contract.model.model_size import layers_parameter_count, parameter_names
from trainer.contract.rules.facts import Facts, Rule, Violation

LARGEST_LR = 0.1
"""Maximum learning rate. An AdamW step moves each weight by about lr (Kingma and Ba, arXiv 1412.6980, section 2.1), and
initial weights have a standard deviation of about 0.02."""

FAR_ABOVE = 10
"""Multiple of the published rate that causes a warning. It is beyond any sweep, and typical of a wrong exponent."""

PUBLISHED = (
    (125e6, 6.0e-4),
    (350e6, 3.0e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2.0e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1.0e-4),
    (175e9, 0.6e-4),
)
"""Number of parameters and peak learning rate: Brown et al., arXiv 2005.14165, table 2.1. Llama 3's rates are up to
three times as high (arXiv 2407.21783, table 3)."""


def published_lr(parameters: float) -> float:
    """The usual peak learning rate of a GPT with this number of parameters outside its embeddings.

    PUBLISHED, interpolated in log space. Below its range: 0.003239 - 0.0001395 x ln(parameters), fitted to models of up
    to a billion parameters (Kaplan et al., arXiv 2001.08361, appendix D.6).
    """
    if parameters <= PUBLISHED[0][0]:
        return max(PUBLISHED[0][1], 0.003239 - 0.0001395 * math.log(parameters))
    for (small, upper), (large, lower) in itertools.pairwise(PUBLISHED):
        if parameters <= large:
            share = math.log(parameters / small) / math.log(large / small)
            return upper * math.pow(lower / upper, share)
    return PUBLISHED[-1][1]


def rate_is_possible(facts: Facts) -> Iterator[Violation]:
    """lr <= LARGEST_LR (hpcgen's rule). Does not apply to a custom schedule or to groups that scale lr down."""
    if facts.optimizer.lr > LARGEST_LR and not _is_scaled(facts):
        usual = _usual(facts)
        yield Violation(
            path="optimizer.lr",
            reason=f"is too high for AdamW, because each step would move every weight by about "
            f"{facts.optimizer.lr:g}. The published rate for models of this size is about {usual:.1g}",
            candidates=[float(f"{usual:.1g}")],
        )


def rate_is_usual(facts: Facts) -> Iterator[Violation]:
    """lr <= FAR_ABOVE x the published rate (hpcgen's rule)."""
    usual = _usual(facts)
    if facts.optimizer.lr > FAR_ABOVE * usual and (facts.optimizer.lr <= LARGEST_LR or _is_scaled(facts)):
        yield Violation(
            path="optimizer.lr",
            reason=f"is {facts.optimizer.lr / usual:,.0f} times the published rate for models of this size "
            f"(about {usual:.1g}), so the loss may diverge",
            advice="check the exponent",
        )


def groups_match_parameters(facts: Facts) -> Iterator[Violation]:
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
        yield Violation(
            path="optimizer.parameter_groups",
            reason=f"contains {', '.join(map(repr, missed))}, which matches no parameter outside earlier "
            f"groups. The parameters are {', '.join(shown)}, and the same names for each further layer",
        )


def _usual(facts: Facts) -> float:
    return published_lr(layers_parameter_count(facts.resolved_model))


def _is_scaled(facts: Facts) -> bool:
    optimizer = facts.optimizer
    return optimizer.lr_schedule is not None or any(g.lr_mult < 1 for g in optimizer.parameter_groups)


RULES: tuple[Rule, ...] = (rate_is_possible, groups_match_parameters)

WARNINGS: tuple[Rule, ...] = (rate_is_usual,)
