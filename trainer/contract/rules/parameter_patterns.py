"""Rules for the patterns of parameter names: training.freeze and optimizer.parameter_groups."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from trainer.contract.config.optimizer import group_index
from trainer.contract.model.adapters import adapter_parameter_names
from trainer.contract.model.frozen import is_frozen
from trainer.contract.model.model_size import parameter_names
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule

KEY = "training.freeze"

_EXPERT = re.compile(r"(.*\.experts\.)(?:local_experts\.\d+\.)?(linear_fc[12])\.(weight|bias)\d*")


def groups_match_parameters(facts: Facts) -> Iterator[Problem]:
    """Each group matches a trained parameter that no earlier group matches (trainer/optimizer/parameter_groups.py)."""
    groups = facts.optimizer.parameter_groups
    # Names are only listed if there are groups: those of an absurd model would fill the memory.
    if not groups or not (variants := _name_variants(facts)):
        return
    matched = {
        group_index(name, groups)
        for names in variants
        for name in names
        if not is_frozen(name, facts.training.freeze)
    }
    missed = [group.match for index, group in enumerate(groups) if index not in matched]
    if missed:
        yield Problem(
            path="optimizer.parameter_groups",
            reason=f"contains {', '.join(map(repr, missed))}, which matches no parameter that is trained, outside "
            f"earlier groups. {_listed(variants[-1])}",
        )


def frozen_patterns_match(facts: Facts) -> Iterator[Problem]:
    """Each pattern matches a parameter, and some parameters are trained (trainer/model/freezing.py)."""
    patterns = facts.training.freeze
    if not patterns or facts.lora.rank is not None or not (variants := _name_variants(facts)):
        return
    missed = [
        pattern
        for pattern in patterns
        if not any(is_frozen(name, [pattern]) for names in variants for name in names)
    ]
    if missed:
        yield Problem(
            path=KEY,
            reason=f"contains {', '.join(map(repr, missed))}, which matches no parameter. {_listed(variants[-1])}",
        )
    elif any(not list(_trained(names, patterns)) for names in variants):
        yield Problem(KEY, "matches all parameters, so there is nothing to train", "leave some out")


def experts_are_frozen_together(facts: Facts) -> Iterator[Problem]:
    """A layer's experts are all frozen or all trained.

    Transformer Engine decides by the first expert of a rank whether to compute the gradients of all of them
    (transformer_engine/pytorch/module/grouped_linear.py, weights[0].requires_grad).
    """
    patterns = facts.training.freeze
    if not patterns or facts.model.num_moe_experts is None:
        return
    for names in _name_variants(facts):
        experts = [name for name in names if _EXPERT.fullmatch(name)]
        trained = set(map(_product, _trained(experts, patterns)))
        frozen = {_product(name) for name in experts if is_frozen(name, patterns)}
        if mixed := sorted(trained & frozen):
            yield Problem(
                path=KEY,
                reason=f"matches only some of the experts of {mixed[0]}, which one kernel computes together",
                hint="use patterns that match all experts of a layer, such as *.experts.*",
            )
            return


def frozen_layers_need_no_cuda_graphs(facts: Facts) -> Iterator[Problem]:
    """No CUDA graphs (hpcgen's rule: losses with and without graphs were not compared)."""
    if facts.training.freeze and facts.training.cuda_graph_impl != "none":
        yield Problem(
            path="training.cuda_graph_impl",
            reason=f"is not supported with {KEY}",
            candidates=["none"],
            settings=(Setting(KEY, ()),),
            about=(KEY,),
        )


def _name_variants(facts: Facts) -> list[list[str]]:
    """Names of all parameters, or of those of adapters if only these are trained. Empty for layers or models of users,
    whose names are unknown.

    On GPUs, the layers are Transformer Engine's or Core's own. The two name the norms differently, so there are two
    lists, and a pattern must match the names of one of them.
    """
    model = facts.resolved_model
    if model.layer_spec is not None or model.model_provider is not None:
        return []
    if facts.lora.rank is not None:
        return [adapter_parameter_names(facts.lora, model)]
    variants = [parameter_names(model)]
    if facts.device == "cuda":
        variants.append(parameter_names(model, transformer_engine=True))
    return variants


def _listed(names: Iterable[str]) -> str:
    """The names in a message, without those of further layers."""
    shown = (name for name in names if not name.startswith("decoder.layers.") or ".layers.0." in name)
    return f"The parameters are {', '.join(shown)}, and the same names for each further layer"


def _trained(names: Iterable[str], patterns: Sequence[str]) -> Iterator[str]:
    return (name for name in names if not is_frozen(name, patterns))


def _product(name: str) -> str:
    """The product of an expert's parameter: `decoder.layers.1.mlp.experts.linear_fc1.weight`."""
    found = _EXPERT.fullmatch(name)
    assert found
    return f"{found[1]}{found[2]}.{found[3]}"


RULES: tuple[Rule, ...] = (
    groups_match_parameters,
    frozen_patterns_match,
    experts_are_frozen_together,
    frozen_layers_need_no_cuda_graphs,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
