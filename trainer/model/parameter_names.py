"""Names of parameters in the complete model, which are the same in every layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TypeVar

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

T = TypeVar("T")

SHARED_EMBEDDING = "embedding.word_embeddings.weight"


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


def over_all_ranks(values: set[T]) -> set[T]:
    """The union of the `values` of all ranks. Every rank must call this."""
    ranks: list[set[T]] = [set()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, values)
    return set().union(*ranks)
