"""Weight decay and learning-rate multipliers of parameters, by global names, which are the same in every layout."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer_config import ParamPredicate
from megatron.core.transformer.moe.moe_layer import MoELayer

from trainer.contract.config import ConfigError, ParameterGroup

Multipliers = tuple[float, float]
"""Multipliers of the weight decay and of the learning rate."""

RATES = ("max_lr", "min_lr")
"""Learning rates that Core writes to a group in addition to its multipliers. The schedule uses the configuration's."""

SHARED_EMBEDDING = "embedding.word_embeddings.weight"


def overrides(
    groups: Sequence[ParameterGroup], model: Iterable[torch.nn.Module]
) -> dict[ParamKey, dict[str, float]]:
    """Overrides for Core's optimizer: multipliers for the parameters of this rank's chunks. Every rank must call this.

    Biases and normalization weights have no weight decay in any group.

    Raises:
        ConfigError: on all ranks, if a group matches no parameter on any rank.
    """
    chosen: dict[Multipliers, set[int]] = {}
    matched: set[int] = set()
    names: set[str] = set()
    for name, parameter in (pair for chunk in model for pair in global_names(chunk)):
        names.add(name)
        index = next((i for i, group in enumerate(groups) if fnmatchcase(name, group.match)), None)
        group = ParameterGroup(match="*") if index is None else groups[index]
        if index is not None:
            matched.add(index)
        decays = parameter.dim() > 1 and not name.endswith(".bias")
        multipliers = (group.wd_mult if decays else 0.0, group.lr_mult)
        if multipliers != (1.0, 1.0):
            chosen.setdefault(multipliers, set()).add(id(parameter))
    _check_all_match(groups, matched, names)
    return {
        _key(multipliers, members): _override(multipliers) for multipliers, members in sorted(chosen.items())
    }


def global_names(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of a chunk with their names in the complete model, without the wrappers' prefix.

    Layers are numbered from 0 over all stages, and experts over all ranks. The last stage's copy of tied embeddings has
    the name of the embedding, since both must be trained in the same way. MTP layers have the names of checkpoints,
    which megatron-core 0.17 changed in the modules.
    """
    layers: dict[str, int] = {}
    first_experts: dict[str, int] = {}
    for name, module in chunk.named_modules():
        if re.search(r"\.layers\.\d+$", name) and hasattr(module, "layer_number"):
            layers[name] = module.layer_number - 1  # Core numbers from 1, over the complete model
        if isinstance(module, MoELayer):
            first_experts[name] = module.local_expert_indices[0]
    for name, parameter in chunk.named_parameters():
        if (
            layer := next((prefix for prefix in first_experts if name.startswith(f"{prefix}.")), None)
        ) is not None:
            name = layer + _expert_name(name[len(layer) :], first_experts[layer])
        if (layer := next((prefix for prefix in layers if name.startswith(f"{prefix}.")), None)) is not None:
            name = f"{layer.rpartition('.')[0]}.{layers[layer]}{name[len(layer) :]}"
        name = name.replace(".mtp_model_layer.", ".transformer_layer.")
        yield (
            SHARED_EMBEDDING if getattr(parameter, "shared", False) else re.sub(r"^(module\.)+", "", name),
            parameter,
        )


def _expert_name(name: str, first: int) -> str:
    """Name of an expert's parameter, from that on a rank whose experts begin at number `first`.

    Core has separate modules (`local_experts.0.linear_fc1.weight`), or one for all of them (`linear_fc1.weight0`).
    """
    found = re.fullmatch(r"(\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)", name)
    return f"{found[1]}{first + int(found[2])}{found[3]}" if found else name


def copy_rates(saved: Iterable[dict[str, Any]], groups: Sequence[dict[str, Any]]) -> None:
    """Set the rates of a checkpoint's groups to the configured ones, since Core 0.19 also matches groups by rates."""
    configured = {(*_multipliers(group), group.get("is_expert_parallel")): group for group in groups}
    for group in saved:
        if (other := configured.get((*_multipliers(group), group.get("is_expert_parallel")))) is not None:
            group.update(_rates(other))


def as_configured(saved: Sequence[dict[str, Any]], groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The checkpoint's group for each of `groups`, with their rates.

    Experts have groups of their own only with expert parallelism. If that has changed, such a group continues one of
    the other parameters, or the reverse.

    Raises:
        KeyError: the checkpoint has no group with these multipliers.
    """
    by_multipliers = {_multipliers(group): group for group in saved}
    return [
        {
            **by_multipliers[_multipliers(group)],
            "is_expert_parallel": group["is_expert_parallel"],
            **_rates(group),
        }
        for group in groups
    ]


def _rates(group: dict[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in RATES if name in group}


def _multipliers(group: dict[str, Any]) -> tuple[Any, ...]:
    return group.get("wd_mult"), group.get("lr_mult")


def _key(multipliers: Multipliers, members: set[int]) -> ParamKey:
    name = "wd_mult {} lr_mult {}".format(*multipliers)
    return ParamKey(predicate=ParamPredicate(name=name, fn=lambda parameter: id(parameter) in members))


def _override(multipliers: Multipliers) -> dict[str, float]:
    """Override for one group. Omits an lr_mult of 1, as Megatron-LM does, to match its checkpoints' groups."""
    wd_mult, lr_mult = multipliers
    return {"wd_mult": wd_mult} if lr_mult == 1.0 else {"wd_mult": wd_mult, "lr_mult": lr_mult}


def _check_all_match(groups: Sequence[ParameterGroup], matched: set[int], names: set[str]) -> None:
    if not groups:
        return
    ranks: list[tuple[set[int], set[str]]] = [(set(), set())] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, (matched, names))
    matched, names = set().union(*(m for m, _ in ranks)), set().union(*(n for _, n in ranks))
    missed = [group.match for index, group in enumerate(groups) if index not in matched]
    if missed:
        raise ConfigError(
            f"optimizer.parameter_groups: {', '.join(map(repr, missed))} matches no parameter, or only parameters of "
            f"an earlier group. The model has {', '.join(sorted(names))}"
        )
