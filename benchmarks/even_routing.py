"""The layers of `benchmarks.train`'s cases with experts, for `model.layer_spec`.

Every program draws another router, and the load of the experts decides how long a step takes. So all programs of a
comparison have Megatron-Core choose the experts at random, which loads them evenly.
"""

from __future__ import annotations

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


def evenly_routed(
    core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
) -> TransformerBlockSubmodules:
    """Return the usual layers, whose routers read this setting in each forward pass."""
    core.moe_router_force_load_balancing = True
    return usual
