"""Initializes weights by seed and global parameter name, independent of the layout.

Megatron-Core draws each rank's shard from that rank's generator, so the initial weights depend on the layout. Here each
rank draws the complete parameter and keeps its shard. So a seed determines the model and the losses at any TP, PP, VPP,
CP and DP. Global names and shard positions are those of checkpoints (`sharded_state_dict`), which also handles SwiGLU's
two halves and embeddings that the first and the last stage share.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

RESIDUAL_OUTPUTS = ("self_attention.linear_proj.weight", "linear_fc2.weight")
"""Weights that write to the residual stream: two per transformer layer. The second may belong to experts."""


@torch.no_grad()
def initialize_by_name(
    chunk: GPTModel, seed: int, std: float, num_layers: int, groups: ProcessGroupCollection
) -> None:
    """Draw every matrix of `chunk` from N(0, std^2) and set biases to zero. Norm weights stay one.

    Weights that write to the residual stream have std / sqrt(2 x num_layers), as in GPT-2 and Megatron-LM. In adapters,
    lora_B is zero and lora_A is drawn from U(-1, 1) / sqrt(inputs), which is kaiming-uniform with a = sqrt(5) as in
    PEFT (peft/tuners/lora/layer.py, reset_lora_parameters).
    """
    shards = chunk.sharded_state_dict(metadata={"dp_cp_group": groups.dp_cp})
    apply_factories(shards)
    for shard in nested_values(shards):
        if not isinstance(shard, ShardedTensor) or shard.data is None:
            continue
        if shard.key.endswith("lora_A"):
            uniform = _draw(shard, seed, torch.rand)
            shard.data.copy_((2 * uniform - 1) / math.sqrt(shard.global_shape[-1]))
        elif shard.key.endswith(("bias", "lora_B")):
            shard.data.zero_()
        elif shard.data.dim() >= 2:
            scale = math.sqrt(2 * num_layers) if shard.key.endswith(RESIDUAL_OUTPUTS) else 1.0
            shard.data.copy_(_draw(shard, seed, torch.randn) * (std / scale))


def _draw(shard: ShardedTensor, seed: int, distribution: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Draw the shard's part of the complete parameter with torch.randn or torch.rand, in fp32.

    Layers and experts are stacked along leading axes, in which a shard has one element. Their indices are part of the
    seed.
    """
    axes = shard.prepend_axis_num
    layer, start = shard.global_offset[:axes], shard.global_offset[axes:]
    name = f"{seed} {shard.key} {' '.join(map(str, layer))}"
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"))
    whole = distribution(shard.global_shape[axes:], generator=generator, device=shard.data.device)
    for axis, (offset, length) in enumerate(zip(start, shard.data.shape, strict=True)):
        whole = whole.narrow(axis, offset, length)
    return whole
