"""Names of parameters for the rules about patterns, such as those of training.freeze and optimizer.parameter_groups."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.model.adapters import adapter_parameter_names
from trainer.contract.model.model_size import parameter_names
from trainer.contract.rules.facts import Facts


def name_variants(facts: Facts) -> list[list[str]]:
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


def listed(names: Iterable[str]) -> str:
    """The names in a message, without those of further layers."""
    shown = (name for name in names if not name.startswith("decoder.layers.") or ".layers.0." in name)
    return f"The parameters are {', '.join(shown)}, and the same names for each further layer"
