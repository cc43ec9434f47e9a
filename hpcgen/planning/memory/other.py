"""Memory of a device that no tensor takes: CUDA, libraries, fragments, and NCCL's buffers."""

from __future__ import annotations

from trainer.contract.model.layout import Layout

OTHER_GIB = 3.0
"""Memory that CUDA, its libraries and fragments take, without NCCL. On an H100, 2.6 GiB were not enough for preset
llama3-70b, and deepseek-v3 used 3.0 GiB (docs/performance.md, "One rank alone")."""
GROUP_GIB = 0.6
"""NCCL's buffers for a group of ranks: 544 MB for two A100s with NVLink, 688 MB for more (NVIDIA/nccl#964)."""
PEER_GIB = 0.44
"""NCCL's buffers for an all-to-all with another device over NVLink. On eight H100s, the first one took 3.3 GB for its
seven peers (NVIDIA/nccl#1685)."""


def nccl_gib(layout: Layout, nvlink_devices: int) -> float:
    """Buffers that NCCL allocates for the groups of a rank, from reports on other machines.

    Their sizes depend on the network, the number of links and the version. None of them was measured with hpcgen.
    """
    axes = (
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.data_parallel_size,
        layout.expert_model_parallel_size,
        layout.world_size,  # the norm of the gradients
    )
    peers = min(layout.expert_model_parallel_size, nvlink_devices) - 1
    return sum(size > 1 for size in axes) * GROUP_GIB + peers * PEER_GIB
