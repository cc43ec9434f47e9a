"""Rules about the optimizer: its learning rate, and its groups of parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from hpcgen.planning.model_size import layer_parameter_count, parameter_names
from hpcgen.planning.rules.facts import Facts, Rule, Violation

LARGEST_LR = 0.1
"""Above it a run is refused. An AdamW step moves each weight by about lr (Kingma and Ba, arXiv 1412.6980, section 2.1),
and weights begin with a standard deviation of about 0.02."""

FAR_ABOVE = 10
"""So many times the published rate is a warning: more than any sweep of rates tries, and what a slip of the exponent
gives."""

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
"""Parameters and peak learning rate: Brown et al., arXiv 2005.14165, table 2.1. Llama 3's are up to three times these
(arXiv 2407.21783, table 3)."""


def published_lr(parameters: float) -> float:
    """The usual peak learning rate of a GPT with so many parameters outside its embeddings.

    PUBLISHED, interpolated in logarithms. Below it 0.003239 - 0.0001395 x ln(parameters), Kaplan et al.,
    arXiv 2001.08361, appendix D.6, which was fitted to models of up to a billion parameters.
    """
    if parameters <= PUBLISHED[0][0]:
        return max(PUBLISHED[0][1], 0.003239 - 0.0001395 * math.log(parameters))
    for (small, upper), (large, lower) in itertools.pairwise(PUBLISHED):
        if parameters <= large:
            share = math.log(parameters / small) / math.log(large / small)
            return upper * math.pow(lower / upper, share)
    return PUBLISHED[-1][1]


def rate_is_possible(facts: Facts) -> Iterator[Violation]:
    """lr <= LARGEST_LR (ours). A schedule or groups of the user's may scale it down, and then it is only unusual."""
    if facts.optimizer.lr > LARGEST_LR and not _is_scaled(facts):
        usual = _usual(facts)
        yield Violation(
            path="optimizer.lr",
            reason=f"is no rate that AdamW can train with: each step would move every weight by about "
            f"{facts.optimizer.lr:g}. Published for a model of this size is about {usual:.1g}",
            candidates=[float(f"{usual:.1g}")],
        )


def rate_is_usual(facts: Facts) -> Iterator[Violation]:
    """lr <= FAR_ABOVE x the published one (ours)."""
    usual = _usual(facts)
    if facts.optimizer.lr > FAR_ABOVE * usual and (facts.optimizer.lr <= LARGEST_LR or _is_scaled(facts)):
        yield Violation(
            path="optimizer.lr",
            reason=f"is {facts.optimizer.lr / usual:,.0f} times the rate of about {usual:.1g} that is published for "
            "models of this size: the loss may diverge",
            advice="check the exponent",
        )


def groups_match_parameters(facts: Facts) -> Iterator[Violation]:
    """Each of parameter_groups matches a parameter that no earlier one has (trainer/optimizer/parameter_groups.py).

    Known only where the layers are Megatron-Core's. On a GPU they are Transformer Engine's or Core's own, which name
    the norms in different ways: a group must match in one of them.
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
            reason=f"has {', '.join(map(repr, missed))}, which matches no parameter, or only such as an earlier group "
            f"has; the model has {', '.join(shown)}, and so on for each layer",
        )


def _usual(facts: Facts) -> float:
    return published_lr(facts.model.num_layers * layer_parameter_count(facts.resolved_model))


def _is_scaled(facts: Facts) -> bool:
    optimizer = facts.optimizer
    return optimizer.lr_schedule is not None or any(g.lr_mult < 1 for g in optimizer.parameter_groups)


RULES: tuple[Rule, ...] = (rate_is_possible, groups_match_parameters)

WARNINGS: tuple[Rule, ...] = (rate_is_usual,)
