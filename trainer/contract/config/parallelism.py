"""How the model and the data are divided over the ranks."""

from __future__ import annotations

from typing import Literal

from trainer.contract.config.values import Count
from trainer.contract.record import config_section


@config_section
class ParallelismConfig:
    """Model parallelism. The data-parallel size is the world size divided by TP x PP x CP."""

    tensor_model_parallel_size: Count = 1
    """Tensor-parallel size (TP): number of ranks that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline-parallel size (PP): number of pipeline stages."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Virtual pipeline size (VPP): number of model chunks per pipeline stage, for the interleaved schedule.
    Default: 1."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Number of layers on the first pipeline stage. The other stages share the remaining layers evenly. Default: all
    stages have the same number of layers."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Number of layers on the last pipeline stage, which also computes the loss."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when the layers are divided over the pipeline stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer when the layers are divided over the pipeline stages."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each pipeline stage, as text such as Et*7|t*8|t*8|t*7L: E embedding, t layer, m MTP layer, L loss,
    | next stage, t*3 and (tt|)*2 repetitions. With an interleaved schedule, the first virtual stages of all stages come
    first."""
    context_parallel_size: Count = 1
    """Context-parallel size (CP): number of ranks that share each sequence."""
    expert_model_parallel_size: Count = 1
    """Expert-parallel size (EP): number of ranks that share the experts of each MoE layer. EP needs no additional
    ranks: EP x ETP must divide world size / PP."""
    expert_tensor_parallel_size: Count | None = None
    """Expert-tensor-parallel size (ETP): number of ranks that share each expert. Default: TP."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts: each is sent to the ranks of its experts (alltoall) or to every rank that shares
    the layer (allgather)."""
    moe_grouped_gemm: bool | None = None
    """Compute all experts of a rank in one grouped matrix product. Default: true with Transformer Engine."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = None
    """Exchange of keys and values between context-parallel ranks: around a ring (p2p), gathered (all_gather), by
    attention heads (a2a), or by heads in groups of ranks and around a ring of groups (a2a+p2p). Default: p2p, or
    all_gather with torch's kernels, window_size or reset_attention_mask."""
    hierarchical_context_parallel_sizes: tuple[Count, ...] | None = None
    """With a2a+p2p: number of ranks in a group and number of groups. Their product is the context-parallel size."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. Requires TP > 1."""
    num_distributed_optimizer_instances: Count = 1
    """Number of groups of data-parallel ranks that each hold the complete optimizer state. More instances need more
    memory, and reduce the communication between groups. It must divide DP x CP."""
    overlap_grad_reduce: bool = False
    """Overlap the data-parallel gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated parameters with the next forward pass. Requires overlap_grad_reduce."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with matrix products. Requires sequence_parallel and Transformer Engine."""
    use_sharp: bool = False
    """Reduce data-parallel gradients in the InfiniBand switches (SHARP). Requires GPUs."""

    @property
    def num_chunks(self) -> int:
        """Number of model chunks per pipeline stage."""
        return self.virtual_pipeline_model_parallel_size or 1
