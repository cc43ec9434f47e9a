"""Multi-head latent attention (MLA) with torch's kernels.

Core's local layers divide the down-projections over tensor-parallel ranks. This results in wrong gradients: all heads
share the rotated part of the keys, and each rank only adds up the gradients of its own heads. Here every rank has the
complete down-projections, as with Transformer Engine. Core then sums their gradients over the ranks, but only with
sequence parallelism, which MLA therefore requires.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from trainer.contract.attention.latent import LATENT
from trainer.contract.attention.latent_rotary import rotary_arguments
from trainer.contract.config import ModelConfig
from trainer.contract.errors import TrainerError
from trainer.model.attention.parts import Parts
from trainer.model.kernels import Kernels
from trainer.model.rotary import inverse_frequencies


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """Core's latent attention with the norms and projections of its spec.

    With qk_layernorm and without q_lora_rank, megatron-core 0.17 and later normalize the input of the queries twice.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        names = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")
        return {name: getattr(submodules, name) for name in names}


class DownProjection(Linear):
    """A complete projection on each rank. In checkpoints it has the empty extra state of Transformer Engine's."""

    def get_extra_state(self) -> None:
        """No state."""

    def set_extra_state(self, state: Any) -> None:
        """Ignore the state of Transformer Engine's layer."""


NAMES = {
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
    "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
}
"""Names of norms in torch's layers -> names in checkpoints, which are the names of Transformer Engine's fused
layers."""


class LatentParts(Parts):
    """Core's latent attention. Each layer has a rotary embedding of its own."""

    config = MLATransformerConfig
    spec_arguments: ClassVar[dict[str, Any]] = {"multi_latent_attention": True}

    def core_arguments(self, model: ModelConfig, kernels: Kernels) -> dict[str, Any]:
        """Widths and rotary embedding. Core's fused rope for latent attention is experimental, and only for YaRN."""
        return {
            **{key: getattr(model, key) for key in LATENT.keys},
            "rotary_base": model.rotary_base,
            **rotary_arguments(model),
            "softmax_scale": None,  # Core applies YaRN's scale itself
            "apply_rope_fusion": False,
        }

    def use(self, layer: ModuleSpec, core: TransformerConfig, norm: type | None) -> None:
        """Use `LatentAttention`. With torch's kernels, also replace the parts that need Transformer Engine, and give
        checkpoints one naming."""
        layer.submodules.self_attention.module = LatentAttention
        if norm is None:
            return
        module: Any = multi_latent_attention
        module.Linear = DownProjection  # Core compares classes with this name to choose their arguments
        if not isinstance(module.TELinear, type):
            module.HAVE_TE = False  # True in megatron-core 0.16, which then passes it to isinstance
        attention = layer.submodules.self_attention.submodules
        attention.linear_q_down_proj = attention.linear_kv_down_proj = DownProjection
        if core.qk_layernorm:
            attention.q_layernorm = attention.kv_layernorm = norm
        layer.submodules.sharded_state_dict_keys_map = NAMES

    def scale_frequencies(self, chunk: torch.nn.Module, model: ModelConfig) -> None:
        """Replace the frequencies in each layer, except with YaRN, whose frequencies Core computes itself."""
        if model.yarn is not None:
            return
        for layer in chunk.modules():
            if isinstance(layer, multi_latent_attention.MultiLatentAttention):
                layer.rotary_pos_emb.inv_freq = inverse_frequencies(model).to(
                    layer.rotary_pos_emb.inv_freq.device
                )

    def refuse_wrong_parts(self, name: str, module: torch.nn.Module) -> None:
        """Refuse down-projections that tensor-parallel ranks divide."""
        if not isinstance(module, multi_latent_attention.MLASelfAttention):
            return
        core = module.config
        widths = {
            "linear_q_down_proj": core.q_lora_rank,
            "linear_kv_down_proj": core.kv_lora_rank + core.qk_pos_emb_head_dim,
        }
        for part, width in widths.items():
            projection = getattr(module, part, None)  # without q_lora_rank, queries have none
            if projection is not None and projection.weight.shape[0] != width:
                raise TrainerError(
                    f"{name}.{part} is a {type(projection).__name__} with {projection.weight.shape[0]} of {width} rows "
                    "on each tensor-parallel rank, for which Megatron-Core computes wrong gradients. Keep the "
                    "projection of the layers that the function of model.layer_spec is given, which has all rows on "
                    "each rank"
                )
