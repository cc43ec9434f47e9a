"""The user's own loss and metrics: `training.loss` and `training.metrics`.

All ranks load the functions, since all of them must know the columns. Only ranks that compute the loss call them.
Shapes: b microbatch, s tokens of the sequence on this context-parallel rank, v the vocabulary, or this rank's part.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from trainer.contract.code import code_loading, imports
from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files.metrics_columns import own_name_problem
from trainer.data.microbatch import MicroBatch


class Logits:
    """The logits of a microbatch, complete or in parts, as functions of the user get them."""

    def __init__(self, part: torch.Tensor) -> None:
        """`part` [b, s, v / TP] is this rank's part, in the precision of the model."""
        self._part = part
        self._complete: torch.Tensor | None = None

    def of(self, function: Any) -> torch.Tensor:
        """The logits for `function` in fp32, in parts if it has the attribute `vocab_parallel`."""
        if getattr(function, "vocab_parallel", False):
            return self._part.float()
        if self._complete is None:
            # Every rank computes the same loss, so the gradient of its part is a part of the gradient.
            self._complete = gather_from_tensor_model_parallel_region(self._part).float()
        return self._complete


@dataclass(frozen=True)
class UserLoss:
    """The loss of the user, as a function or as a class."""

    where: str
    """The key with its value, for messages."""
    function: Any
    terms: tuple[str, ...]
    """Columns for the parts that it returns."""

    @classmethod
    def load(cls, config: TrainerConfig) -> UserLoss | None:
        """Load training.loss; None if there is none.

        Raises:
            ConfigError: it cannot be imported, or its arguments are others.
            TrainerError: its attribute `terms` cannot be columns.
        """
        path = config.training.loss
        if path is None:
            return None
        where = f"training.loss = {path!r}"
        function = code_loading.load(path, "training.loss")
        terms = getattr(function, "terms", ())
        if not isinstance(terms, tuple) or not all(isinstance(name, str) for name in terms):
            raise TrainerError(f"the attribute terms is {terms!r}. It must be a tuple of names", where=where)
        metrics = metric_names(config)
        for index, name in enumerate(terms):
            problem = own_name_problem(name)
            if name in (*terms[:index], *metrics):
                problem = "is the name of another column"
            if problem:
                raise TrainerError(f"{name!r} in the attribute terms {problem}", where=where)
        return cls(where, function, terms)

    def instance(self, config: TrainerConfig) -> UserLoss:
        """The loss to call: an instance if it is a class."""
        if not inspect.isclass(self.function):
            return self
        factory: Any = self.function
        return UserLoss(self.where, factory(config), self.terms)

    def __call__(
        self, logits: Logits, labels: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """The losses [b, s], and their parts by name.

        Raises:
            TrainerError: the function returns something else.
        """
        found = self.function(
            logits=logits.of(self.function), labels=labels, loss_mask=batch.loss_mask, batch=batch
        )
        losses, parts = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        self._check("it", losses, labels)
        if torch.is_grad_enabled() and not losses.requires_grad:
            raise TrainerError("it returns losses that do not depend on the logits", where=self.where)
        if not isinstance(parts, Mapping) or set(parts) != set(self.terms):
            names = sorted(parts) if isinstance(parts, Mapping) else type(parts).__name__
            raise TrainerError(
                f"it returns the parts {names}, but its attribute terms is {self.terms!r}", where=self.where
            )
        for name, part in parts.items():
            self._check(f"its part {name!r}", part, labels)
        return losses.float(), parts

    def _check(self, what: str, value: object, labels: torch.Tensor) -> None:
        if isinstance(value, torch.Tensor) and value.shape == labels.shape and value.is_floating_point():
            return
        found = (
            f"a tensor {list(value.shape)} of {value.dtype}"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise TrainerError(
            f"{what} is {found}. It must be the loss of each token, a floating-point tensor {list(labels.shape)}",
            where=self.where,
        )


@dataclass(frozen=True)
class UserMetric:
    """A metric of the user."""

    where: str
    function: imports.Metric

    @torch.no_grad()
    def __call__(
        self, logits: Logits, labels: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum and the number of the microbatch.

        Raises:
            TrainerError: the function returns something else.
        """
        found = self.function(
            logits=logits.of(self.function).detach(), labels=labels, loss_mask=batch.loss_mask, batch=batch
        )
        if isinstance(found, tuple) and len(found) == 2:
            total, number = (
                torch.as_tensor(each, dtype=torch.float32, device=labels.device) for each in found
            )
            if total.ndim == number.ndim == 0:
                return total, number
        raise TrainerError("it must return a sum and a number, two scalars", where=self.where)


def metric_names(config: TrainerConfig) -> tuple[str, ...]:
    """Columns of the metrics, which are the names of their functions."""
    return tuple(path.rpartition(":")[2] for path in config.training.metrics)


def load_metrics(config: TrainerConfig) -> tuple[UserMetric, ...]:
    """Load training.metrics.

    Raises:
        ConfigError: a function cannot be imported, or its arguments are others.
    """
    return tuple(
        UserMetric(f"training.metrics = {path!r}", code_loading.load(path, "training.metrics"))
        for path in config.training.metrics
    )
