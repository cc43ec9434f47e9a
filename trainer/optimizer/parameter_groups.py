"""Weight decay and learning-rate multipliers of parameters, by global names, which are the same in every layout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from megatron.core.optimizer import ParamKey
from megatron.core.optimizer.optimizer_config import ParamPredicate

from trainer.contract.config import ConfigError, ParameterGroup
from trainer.contract.config.optimizer import group_index
from trainer.model.parameter_names import global_names, over_all_ranks

Multipliers = tuple[float, float]
"""Multipliers of the weight decay and of the learning rate."""

RATES = ("max_lr", "min_lr")
"""Learning rates that Core writes to a group in addition to its multipliers. The schedule uses the configuration's."""


def overrides(
    groups: Sequence[ParameterGroup], model: Iterable[torch.nn.Module]
) -> dict[ParamKey, dict[str, float]]:
    """Overrides for Core's optimizer: multipliers for the parameters of this rank's chunks. Every rank must call this.

    Biases and normalization weights have no weight decay in any group.

    Raises:
        ConfigError: on all ranks, if a group matches no parameter that is trained, on any rank.
    """
    chosen: dict[Multipliers, set[int]] = {}
    matched: set[int] = set()
    names: set[str] = set()
    for name, parameter in (pair for chunk in model for pair in global_names(chunk)):
        if not parameter.requires_grad:
            continue
        names.add(name)
        index = group_index(name, groups)
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
    matched, names = over_all_ranks(matched), over_all_ranks(names)
    missed = [group.match for index, group in enumerate(groups) if index not in matched]
    if missed:
        raise ConfigError(
            f"optimizer.parameter_groups: {', '.join(map(repr, missed))} matches no parameter, or only parameters of "
            f"an earlier group. The model has {', '.join(sorted(names))}"
        )
