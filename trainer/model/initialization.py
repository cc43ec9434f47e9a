"""Initial weights that depend on the seed and on a parameter's global name, and not on the layout.

Megatron-Core draws each rank's shard from that rank's generator, so every layout starts elsewhere. Here the
whole parameter is drawn and the rank keeps its shard: one seed gives one model at any TP, PP, VPP, CP and DP,
and the same losses. The global name and the shard's place are those a checkpoint uses (`sharded_state_dict`),
which also takes care of SwiGLU's two halves and of embeddings that the first and last stage share.
"""

from __future__ import annotations

import hashlib
import math

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel

RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
"""The layers that write to the residual stream: two per transformer layer."""


@torch.no_grad()
def initialize_by_name(chunk: GPTModel, seed: int, std: float, num_layers: int) -> None:
    """Draws every matrix of `chunk` from N(0, std^2) and zeroes the biases; norms keep their ones.

    The layers that write to the residual stream get std / sqrt(2 x num_layers), as in GPT-2 and Megatron-LM.
    """
    shards = chunk.sharded_state_dict()
    apply_factories(shards)
    for shard in nested_values(shards):
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            continue
        if shard.data.dim() >= 2:
            scale = math.sqrt(2 * num_layers) if shard.key.endswith(RESIDUAL_OUTPUTS) else 1.0
            shard.data.copy_(_draw(shard, seed) * (std / scale))
        elif shard.key.endswith("bias"):
            shard.data.zero_()


def _draw(shard: ShardedTensor, seed: int) -> torch.Tensor:
    """The shard's part of the whole parameter, of unit variance, in fp32.

    Layers are stacked along leading axes that the shard has one element of: their index is part of the name.
    """
    axes = shard.prepend_axis_num
    layer, start = shard.global_offset[:axes], shard.global_offset[axes:]
    name = f"{seed} {shard.key} {' '.join(map(str, layer))}"
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    whole = torch.randn(shard.global_shape[axes:], generator=generator, device=shard.data.device)
    for axis, (offset, length) in enumerate(zip(start, shard.data.shape, strict=True)):
        whole = whole.narrow(axis, offset, length)
    return whole
