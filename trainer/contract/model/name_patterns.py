"""Patterns for the global names of parameters: which parameters they match, and which of several comes first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from trainer.contract.config import ParameterGroup


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """True if one of the `patterns`, such as those of training.freeze, matches the parameter `name`."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def group_index(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """Index of the first of optimizer.parameter_groups that matches the parameter `name`; None if there is none."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.match)), None)
