"""LoRA adapters in a checkpoint, and the weights of their base model with the adapters added."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from trainer.contract.config import LoraConfig, ModelConfig
from trainer.contract.errors import TrainerError
from trainer.contract.families.model_family import LAYERS, Weight
from trainer.contract.model.adapters import Linear, Part, targets
from trainer.contract.wording import few
from trainer.huggingface.torch_dist import StoredWeights
from trainer.lora.parts import join

MATRICES = ("lora_A", "lora_B")


def tensor_name(linear: Linear, part: Part, matrix: str) -> str:
    """Name in a checkpoint of a matrix of an adapter. Megatron-Core stacks the experts of a layer under another
    name."""
    return f"{linear.name.replace('.mlp.experts.', '.mlp.experts.experts.')}.adapter.{part.name}.{matrix}"


def matrix_shapes(part: Part, rank: int) -> dict[str, tuple[int, int]]:
    """Shapes of the matrices of a part."""
    return {"lora_A": (rank, part.inputs), "lora_B": (part.outputs, rank)}


def linear_name(weight: Weight, layer: int) -> str | None:
    """Name of the linear layer whose matrix is `weight`, as in `Linear.name`. None for other tensors."""
    module, _, tensor = weight.core.rpartition(".")
    if tensor != "weight":
        return None
    if weight.in_layers:
        module = module.replace(LAYERS, f"{LAYERS}{layer}.", 1)
    return module.replace(".mlp.experts.experts.", ".mlp.experts.")


class StoredAdapters:
    """The adapters in a checkpoint. All matrices are read in fp32, and belong to the complete model."""

    def __init__(self, path: Path, lora: LoraConfig, model: ModelConfig) -> None:
        """Reads the index of the checkpoint `path`, whose record has the sections `lora` and `model`.

        Raises:
            TrainerError: the index is invalid, or has other tensors than those of the adapters.
        """
        self.lora, self._model, self._path = lora, model, path
        self._stored = StoredWeights(path)
        self._linears = {linear.name: linear for linear in targets(lora, model)}
        self._check()

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the stored matrices."""
        return self._stored.dtype(min(self._stored.names))

    @property
    def linears(self) -> list[Linear]:
        """The linear layers that have adapters."""
        return list(self._linears.values())

    def of_weight(self, weight: Weight, layer: int) -> Linear | None:
        """The linear layer whose matrix is `weight`, if it has an adapter."""
        return self._linears.get(linear_name(weight, layer) or "")

    def matrices(
        self, linear: Linear, expert: int | None = None
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """A [rank, inputs] and B [outputs, rank] of each part of a linear layer, or of one of its experts.

        Raises:
            TrainerError: a file is damaged, or has numbers that are not finite.
        """
        return {part.name: self._of_part(linear, part, expert) for part in linear.parts}

    def _of_part(self, linear: Linear, part: Part, expert: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        index = () if expert is None else (expert,)
        names = [tensor_name(linear, part, matrix) for matrix in MATRICES]
        a, b = (self._stored.read_part(name, index).float() for name in names)
        for name, matrix in zip(names, (a, b), strict=True):
            if not bool(matrix.isfinite().all()):
                raise TrainerError(f"{name} has numbers that are not finite", where=self._path)
        return a, b

    def delta(self, linear: Linear, expert: int | None = None) -> torch.Tensor:
        """Change of the weight [outputs, inputs] of a linear layer, in the order of the fused layer."""
        products = {name: self.lora.scale * (b @ a) for name, (a, b) in self.matrices(linear, expert).items()}
        return join(linear.kind, products, self._model)

    def _check(self) -> None:
        expected = dict(self._expected())
        found = {name: self._stored.shape(name) for name in self._stored.names if "_extra_state" not in name}
        if differing := sorted(
            name for name in expected.keys() | found if expected.get(name) != found.get(name)
        ):
            raise TrainerError(
                f"the tensors are not those of the adapters in its record: {few(differing, 3)}",
                where=self._path,
            )

    def _expected(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        assert self.lora.rank
        for linear in self.linears:
            experts = () if linear.num_experts is None else (linear.num_experts,)
            for part in linear.parts:
                for matrix, shape in matrix_shapes(part, self.lora.rank).items():
                    yield tensor_name(linear, part, matrix), (*experts, *shape)


class MergedWeights:
    """The weights of a base model with adapters added, in place of `StoredWeights`. A tensor with an adapter is in
    fp32."""

    def __init__(self, base: StoredWeights, adapters: StoredAdapters) -> None:
        self._base, self._adapters = base, adapters

    @property
    def names(self) -> set[str]:
        """Names of the tensors of the model."""
        return self._base.names

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor with this name; None if there is none."""
        return self._base.shape(name)

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor of the base model."""
        return self._base.dtype(name)

    def read(self, weight: Weight, layer: int = 0) -> torch.Tensor:
        """The tensor of a layer, or of the model if layers do not have it.

        Raises:
            TrainerError: it is missing or incomplete, or a file is damaged.
        """
        tensor = self._base.read(weight, layer)
        linear = self._adapters.of_weight(weight, layer)
        if linear is None:
            return tensor
        merged = tensor.float() + self._adapters.delta(linear, weight.expert)
        if not bool(merged.isfinite().all()):
            raise TrainerError(f"{linear.name} with its adapter has numbers that are not finite")
        return merged


Weights = StoredWeights | MergedWeights
