"""Base class of the parts that the trainer builds for a kind of attention (`trainer.contract.attention`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.config import ModelConfig
from trainer.model.kernels import Kernels


class Parts(ABC):
    """Arguments and modules for Megatron-Core."""

    config: ClassVar[type[TransformerConfig]] = TransformerConfig
    """Core's class of the configuration."""
    spec_arguments: ClassVar[dict[str, Any]] = {}
    """Arguments of Core's functions that make the spec of a layer."""

    @abstractmethod
    def core_arguments(self, model: ModelConfig, kernels: Kernels) -> dict[str, Any]:
        """Arguments of `config` that only attention uses. `model` is resolved."""

    @abstractmethod
    def use(self, layer: ModuleSpec, core: TransformerConfig, norm: type | None) -> None:
        """Complete the spec of Core's layer. `norm` is the norm of torch's kernels; None with Transformer Engine."""

    @abstractmethod
    def scale_frequencies(self, chunk: torch.nn.Module, model: ModelConfig) -> None:
        """Set the rotary frequencies of `chunk` according to model.rope_scaling, which is not null.

        Raises:
            TrainerError: the chunk is a custom model without Core's rotary embedding.
        """

    @abstractmethod
    def refuse_wrong_parts(self, name: str, module: torch.nn.Module) -> None:
        """Refuse a module of the user's model, called `name`, that this kind would train with wrong results.

        Raises:
            TrainerError: the module is wrong.
        """
