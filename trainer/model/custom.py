"""Layers and models of users: `model.layer_spec` and `model.model_provider`.

Some of Megatron-Core's own parts train without an error, but give results that depend on the layout or read other
documents. `refuse_wrong_parts` finds them in a chunk that has been built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from trainer.contract.code import code_loading, imports
from trainer.contract.errors import TrainerError
from trainer.model.attention import PARTS
from trainer.model.experts import Router


def block_submodules(
    path: str, core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
) -> TransformerBlockSubmodules:
    """Calls the function at the import path `path` with the `usual` parts of this chunk of the decoder."""
    function: imports.LayerSpec = code_loading.load(path, "model.layer_spec")
    spec = function(core, vp_stage, usual)
    if isinstance(spec, ModuleSpec):  # one for all layers
        return dataclasses.replace(usual, layer_specs=[spec] * len(usual.layer_specs))
    return spec


def refuse_wrong_parts(chunk: torch.nn.Module, *, separate_documents: bool) -> None:
    """Refuse a model that would train with silently wrong results.

    Raises:
        TrainerError: a part computes something else than the configuration says, or depends on the layout.
    """
    for name, module in chunk.named_modules():
        if isinstance(module, TopKRouter) and not isinstance(module, Router):
            raise TrainerError(
                f"{name} is a {type(module).__name__}, which is not derived from trainer.model.experts.Router. Its "
                "auxiliary losses would depend on the layout, and nothing would count the tokens of its experts. Call "
                "trainer.model.experts.use_router with the spec of the layer, or derive your router from that class"
            )
        for parts in PARTS.values():
            parts.refuse_wrong_parts(name, module)
    if separate_documents:
        _require_separated_documents(chunk)


def _require_separated_documents(chunk: torch.nn.Module) -> None:
    """Refuse attention that would ignore the boundaries of documents."""
    attentions = list(_attentions(chunk))
    others = {type(each).__name__ for each in attentions if not getattr(each, "separates_documents", False)}
    if others or not (attentions or isinstance(chunk, GPTModel)):
        name = ", ".join(sorted(others)) or f"{type(chunk).__name__}, which has no core_attention,"
        raise TrainerError(
            f"data.reset_attention_mask or data.sft is true, but {name} does not separate documents. Make the "
            "attention use the boundaries of documents in place of the mask, and set separates_documents = True in it"
        )


def _attentions(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The parts that mix tokens: each core_attention. In layers without core_attention, the part in place of the
    attention."""
    for module in chunk.modules():
        if hasattr(module, "core_attention"):
            yield module.core_attention
        elif isinstance(module, TransformerBlock):
            for layer in module.layers:
                if not any(hasattr(part, "core_attention") for part in layer.modules()):
                    yield getattr(layer, "self_attention", layer)
