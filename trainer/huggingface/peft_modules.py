"""Modules of Hugging Face's models that have an adapter in PEFT, and the matrices of these adapters.

PEFT has an adapter for each module of the model, under the name of the module. GPT-2 computes query, key and value in
one module, so that PEFT has one adapter where the trainer has three. With the rank 3r, one adapter can express all
three: A has the rows of the three A, and B has the three B on its diagonal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from trainer.contract.config import ModelConfig
from trainer.contract.families.model_family import Family, Weight, in_order
from trainer.contract.model.adapters import Linear, Part
from trainer.huggingface.adapters import linear_name

PREFIX = "base_model.model."
"""Beginning of the names of tensors in the files of PEFT."""

Matrices = tuple[torch.Tensor, torch.Tensor]
"""lora_A [rank, inputs] and lora_B [outputs, rank]."""


class PeftModule(NamedTuple):
    """A module of Hugging Face's model, and the parts of the linear layer that it computes."""

    name: str
    """Name in the model, such as model.layers.0.self_attn.q_proj."""
    linear: Linear
    parts: tuple[Part, ...]
    """One, or the three parts of GPT-2's c_attn."""
    expert: int | None

    @property
    def inputs(self) -> int:
        """Width of the input."""
        return self.parts[0].inputs

    @property
    def outputs(self) -> int:
        """Width of the output."""
        return sum(part.outputs for part in self.parts)

    @property
    def kind(self) -> str:
        """Last part of the name, such as q_proj."""
        return self.name.rpartition(".")[2]

    def tensor_names(self) -> tuple[str, str]:
        """Names of lora_A and lora_B in the files of PEFT."""
        return f"{PREFIX}{self.name}.lora_A.weight", f"{PREFIX}{self.name}.lora_B.weight"

    def joined(self, matrices: Mapping[str, Matrices]) -> Matrices:
        """The matrices of the module, from those of its parts."""
        own = [matrices[part.name] for part in self.parts]
        if len(own) == 1:
            return own[0]
        return torch.cat([a for a, _ in own]), torch.block_diag(*(b for _, b in own))

    def split(self, a: torch.Tensor, b: torch.Tensor) -> dict[str, Matrices]:
        """The matrices of the parts, from those of the module. All parts then have the same A."""
        outputs = b.split([part.outputs for part in self.parts])
        return {part.name: (a, own) for part, own in zip(self.parts, outputs, strict=True)}


def peft_modules(family: Family, model: ModelConfig, linears: list[Linear]) -> Iterator[PeftModule]:
    """Yields the modules of the `linears`, in the order of the tensors of the family."""
    found = {linear.name: linear for linear in linears}
    for weight, layer in in_order(family, model):
        linear = found.get(linear_name(weight, layer) or "")
        if linear is not None:
            yield from _of_linear(linear, weight, layer)


def _of_linear(linear: Linear, weight: Weight, layer: int) -> Iterator[PeftModule]:
    names = [name.removesuffix(".weight").format(n=layer) for name in weight.names]
    if len(names) == 1:
        yield PeftModule(names[0], linear, linear.parts, weight.expert)
        return
    for name, part in zip(names, linear.parts, strict=True):
        yield PeftModule(name, linear, (part,), weight.expert)
