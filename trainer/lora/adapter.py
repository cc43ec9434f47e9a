"""Adapters next to linear layers, in every layout of these layers.

The output of an adapter is scale x B A x for the input x of the linear layer. Between A and B are only `rank` numbers
per token and part, so that is where tensor-parallel ranks exchange what the linear layer exchanges itself:

- A linear layer with divided outputs has a complete A, and the rows of B of its own outputs. With sequence parallelism,
  the ranks gather A x of their parts of the sequence, and Core sums the gradients of A over the ranks.
- A linear layer with divided inputs has the columns of A of its own inputs, and a complete B. The ranks sum A x. With
  sequence parallelism, each keeps its part of the sequence, and Core sums the gradients of B over the ranks.
- An expert is complete on its rank, whatever the layout of the other layers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from trainer.contract.config import LoraConfig, ModelConfig, TrainerConfig
from trainer.contract.model.adapters import Linear, Part, targets
from trainer.lora.parts import join
from trainer.model.freezing import differentiate_embeddings

NAME = "adapter"
"""Name of the adapter in its linear layer."""

DIVIDED_AXES = {"outputs": {"lora_B": 0}, "inputs": {"lora_A": 1}}
"""Matrices that tensor-parallel ranks divide, and the axis, for each divided side of the linear layer."""


@dataclass(frozen=True)
class _Layout:
    """How the ranks share a linear layer."""

    divided: str
    """The side of the weight that tensor-parallel ranks divide: outputs or inputs."""
    group: torch.distributed.ProcessGroup
    """The ranks that divide it."""
    sequence_parallel: bool
    of_expert: bool

    @property
    def has_equal_inputs(self) -> bool:
        """True if all ranks of the group have the same input."""
        return self.divided == "outputs" and not self.sequence_parallel and not self.of_expert

    def exchange(self, low: torch.Tensor) -> torch.Tensor:
        """Turn a rank's A x [s, b, rank] into what its rows of B are multiplied with."""
        if self.of_expert:
            return low
        exchanged: torch.Tensor
        if self.divided == "outputs" and self.sequence_parallel:
            exchanged = gather_from_sequence_parallel_region(
                low, tensor_parallel_output_grad=True, group=self.group
            )
        elif self.divided == "outputs":
            exchanged = copy_to_tensor_model_parallel_region(low, group=self.group)
        elif self.sequence_parallel:
            exchanged = reduce_scatter_to_sequence_parallel_region(low, group=self.group)
        else:
            exchanged = reduce_from_tensor_model_parallel_region(low, group=self.group)
        return exchanged


class AdapterPart(torch.nn.Module):
    """The matrices of one part: lora_A [rank, inputs] and lora_B [outputs, rank], or this rank's share of them."""

    def __init__(self, part: Part, rank: int, layout: _Layout, weight: torch.nn.Parameter) -> None:
        """`weight` is that of the linear layer, whose type and device the matrices have. They are not initialized."""
        super().__init__()
        shapes = {"lora_A": [rank, part.inputs], "lora_B": [part.outputs, rank]}
        divided = DIVIDED_AXES[layout.divided]
        for name, shape in shapes.items():
            if name in divided:
                shape[divided[name]] //= layout.group.size()
            parameter = torch.nn.Parameter(torch.empty(shape, dtype=weight.dtype, device=weight.device))
            if name in divided:
                set_tensor_model_parallel_attributes(parameter, True, divided[name], 1)
            else:
                parameter.sequence_parallel = layout.sequence_parallel and not layout.of_expert
            parameter.allreduce = getattr(weight, "allreduce", True)
            self.register_parameter(name, parameter)

    def forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices. Core's hooks make sure that a call sees gathered parameters, not a read of an attribute."""
        return self.lora_A, self.lora_B


class Adapter(torch.nn.Module):
    """The adapter of a linear layer, with a child for each of its parts."""

    def __init__(
        self,
        linear: Linear,
        lora: LoraConfig,
        model: ModelConfig,
        layout: _Layout,
        weight: torch.nn.Parameter,
    ) -> None:
        super().__init__()
        assert lora.rank
        self._kind, self._rank, self._model, self._layout = linear.kind, lora.rank, model, layout
        self._scale, self._dropout = lora.scale, lora.dropout
        for part in linear.parts:
            self.add_module(part.name, AdapterPart(part, lora.rank, layout, weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., inputs] -> [..., outputs], in the order of the linear layer. One exchange serves all parts."""
        matrices = {name: part() for name, part in self.named_children()}
        inputs = torch.cat([a for a, _ in matrices.values()])
        low = self._layout.exchange(torch.nn.functional.linear(self._dropped(x), inputs) * self._scale)
        outputs = {
            name: torch.nn.functional.linear(own, b)
            for (name, (_, b)), own in zip(matrices.items(), low.split(self._rank, dim=-1), strict=True)
        }
        return join(self._kind, outputs, self._model, dim=-1)

    def _dropped(self, x: torch.Tensor) -> torch.Tensor:
        if not (self.training and self._dropout > 0):
            return x
        if self._layout.has_equal_inputs:
            return torch.nn.functional.dropout(x, self._dropout)
        with get_cuda_rng_tracker().fork():
            return torch.nn.functional.dropout(x, self._dropout)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: Sequence[Any], metadata: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The matrices as Core's sharded tensors."""
        divided = DIVIDED_AXES[self._layout.divided]
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {f"{part}.{name}": axis for part, _ in self.named_children() for name, axis in divided.items()},
            sharded_offsets,
            tp_group=self._layout.group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        return sharded


class _Adapted(torch.nn.Module):
    """Behavior of a linear layer with an adapter. `attach` derives its class from this one and its own."""

    adapter: Adapter

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The output of the linear layer and its adapter, and the bias if it is added later."""
        output, bias, normalized = _results(super().forward(x))
        return output + self.adapter(x if normalized is None else normalized), bias

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: Sequence[Any] = (),
        metadata: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Core's tensors of the linear layer, and those of the adapter in place of what Core makes of them."""
        assert metadata is not None
        own = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        begin = f"{prefix}{NAME}."
        kept = {name: tensor for name, tensor in own.items() if not name.startswith(begin)}
        return kept | self.adapter.sharded_state_dict(begin, sharded_offsets, metadata)


def _results(returned: Any) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Output, bias and normalized input of a linear layer of Core.

    A layer of Transformer Engine that normalizes its input returns the normalized input after the output if it has no
    bias to return, and after the bias otherwise (extensions/transformer_engine.py, TELayerNormColumnParallelLinear).
    """
    if len(returned) == 3:
        output, bias, normalized = returned
        return output, bias, normalized
    output, bias = returned
    if isinstance(output, tuple):
        output, normalized = output
        return output, bias, normalized
    return output, bias, None


def attach(chunk: GPTModel, config: TrainerConfig, groups: ProcessGroupCollection) -> None:
    """Freeze the weights of `chunk`, and give each of its linear layers that lora.target_modules names an adapter.

    The class of such a layer is replaced by a derived class, so that it keeps its type, its place and the names of its
    parameters. The adapters have undefined weights.
    """
    chunk.requires_grad_(False)
    if config.training.recompute_granularity is not None:
        differentiate_embeddings([chunk])
    found = {linear.name: linear for linear in targets(config.lora, config.model)}
    for layer in chunk.decoder.layers:
        prefix = f"decoder.layers.{layer.layer_number - 1}"  # Core numbers from 1, over the complete model
        for name, module in list(layer.named_modules()):
            without_number = re.sub(r"\.local_experts\.\d+", "", name)
            linear = found.get(f"{prefix}.{without_number}")
            if linear is not None:
                _adapt(module, linear, config, groups)


def _adapt(
    module: torch.nn.Module, linear: Linear, config: TrainerConfig, groups: ProcessGroupCollection
) -> None:
    of_expert = linear.num_experts is not None
    layout = _Layout(
        linear.divided,
        groups.expt_tp if of_expert else groups.tp,
        config.parallelism.sequence_parallel,
        of_expert,
    )
    module.adapter = Adapter(linear, config.lora, config.model, layout, module.weight)
    module.__class__ = type(f"Adapted{type(module).__name__}", (_Adapted, type(module)), {})
    if hasattr(module, "return_layernorm_output"):
        # The layer normalizes its input itself, and the adapter needs the normalized one.
        module.return_layernorm_output = True


def is_adapter(name: str) -> bool:
    """True if the parameter `name` belongs to an adapter."""
    return f".{NAME}." in name
