"""Multi-head latent attention (MLA) with torch's kernels.

Core's local layers divide the down-projections over tensor-parallel ranks. This results in wrong gradients: all heads
share the rotated part of the keys, and each rank only adds up the gradients of its own heads. Here every rank has the
complete down-projections, as with Transformer Engine. Core then sums their gradients over the ranks, but only with
sequence parallelism, which MLA therefore requires.
"""

from __future__ import annotations

from typing import Any

from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig


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
"""Names of norms in torch's layers -> in checkpoints, where they are those of Transformer Engine's fused layers."""


def use_norms_of_spec(layer: ModuleSpec) -> None:
    """Make the attention of a spec `LatentAttention`."""
    layer.submodules.self_attention.module = LatentAttention


def use_torch(layer: ModuleSpec, norm: type, config: TransformerConfig) -> None:
    """Replace the parts of Core's local `layer` that need Transformer Engine, and give checkpoints one naming."""
    module: Any = multi_latent_attention
    module.Linear = DownProjection  # whose arguments Core knows by this name
    if not isinstance(module.TELinear, type):
        module.HAVE_TE = False  # True in megatron-core 0.16, which then passes it to isinstance
    attention = layer.submodules.self_attention.submodules
    attention.linear_q_down_proj = attention.linear_kv_down_proj = DownProjection
    if config.qk_layernorm:
        attention.q_layernorm = attention.kv_layernorm = norm
    layer.submodules.sharded_state_dict_keys_map = NAMES
