"""The layout: how ranks are divided into tensor, pipeline, context and data parallel axes.

Source: megatron/core/parallel_state.py, initialize_model_parallel.
"""

from __future__ import annotations

import functools
import itertools
import math

from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.model.pipeline import chunk_layers
from trainer.contract.record import record
from trainer.contract.wording import counted


@record(kw_only=True)
class Layout:
    """The axes of a run. `make` builds a layout only if the sizes are consistent.

    The names are Megatron-Core's. `virtual_pipeline_model_parallel_size` is 1 without the interleaved schedule.
    """

    world_size: int
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    context_parallel_size: int
    data_parallel_size: int
    num_distributed_optimizer_instances: int
    """Number of groups of ranks that each hold the complete optimizer state."""
    num_microbatches: int
    """Number of forward passes of a data-parallel rank per optimizer step."""
    chunk_layers: tuple[int, ...]
    """Transformer layers of each model chunk, in pipeline order: chunk i is on stage i % PP."""
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int = 1
    expert_data_parallel_size: int | None = None
    """Number of ranks that hold the same experts; None for a dense model."""

    @classmethod
    def make(
        cls, model: ModelConfig, parallelism: ParallelismConfig, training: TrainingConfig, world_size: int
    ) -> Layout | None:
        """The layout; None if ranks, batch, layers or optimizer instances do not divide evenly (rules report why)."""
        stages = parallelism.pipeline_model_parallel_size
        chunks = parallelism.num_chunks
        data_parallel_size, ranks_left = divmod(world_size, model_parallel_size(parallelism))
        if ranks_left or data_parallel_size == 0:
            return None
        num_microbatches, samples_left = divmod(
            training.global_batch_size, training.micro_batch_size * data_parallel_size
        )
        layers = chunk_layers(model.num_layers, parallelism, model.mtp_num_layers)
        expert_ranks = expert_data_parallel_size(model, parallelism, world_size)
        if samples_left or layers is None or (model.num_moe_experts is not None and expert_ranks is None):
            return None
        instances = parallelism.num_distributed_optimizer_instances
        if (
            data_parallel_size * parallelism.context_parallel_size % instances
            or (expert_ranks or 0) % instances
        ):
            return None
        return cls(
            world_size=world_size,
            tensor_model_parallel_size=parallelism.tensor_model_parallel_size,
            pipeline_model_parallel_size=stages,
            virtual_pipeline_model_parallel_size=chunks,
            context_parallel_size=parallelism.context_parallel_size,
            data_parallel_size=data_parallel_size,
            num_distributed_optimizer_instances=instances,
            num_microbatches=num_microbatches,
            chunk_layers=layers,
            expert_model_parallel_size=parallelism.expert_model_parallel_size,
            expert_tensor_parallel_size=expert_tensor_parallel_size(parallelism),
            expert_data_parallel_size=expert_ranks,
        )

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks per model replica: tensor x pipeline x context."""
        return self.world_size // self.data_parallel_size

    def stage_layers(self, stage: int) -> int:
        """Number of transformer layers on a pipeline stage."""
        return sum(self.chunk_layers[stage :: self.pipeline_model_parallel_size])

    def layers_of_stage(self, stage: int) -> list[range]:
        """Numbers of the transformer layers of each model chunk on a pipeline stage, from 0."""
        return self._layers_of_chunks[stage :: self.pipeline_model_parallel_size]

    @functools.cached_property
    def _layers_of_chunks(self) -> list[range]:
        ends = itertools.accumulate(self.chunk_layers)
        return [range(end - layers, end) for layers, end in zip(self.chunk_layers, ends, strict=True)]

    @property
    def bubble_fraction(self) -> float:
        """Idle time of the pipeline relative to its compute time, (PP - 1) / (VPP x num_microbatches).

        Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
        arXiv 2104.04473, section 2.2.
        """
        chunks = self.virtual_pipeline_model_parallel_size * self.num_microbatches
        return (self.pipeline_model_parallel_size - 1) / chunks

    def __str__(self) -> str:
        """The common notation: "TP4 PP8 VPP6 CP1 DP4, 384 microbatches on 128 ranks". EP and ETP divide the
        same ranks and add none."""
        axes = (
            f"TP{self.tensor_model_parallel_size} PP{self.pipeline_model_parallel_size} "
            f"VPP{self.virtual_pipeline_model_parallel_size} CP{self.context_parallel_size} "
            f"DP{self.data_parallel_size}"
        )
        if self.expert_data_parallel_size is not None:
            axes += f" EP{self.expert_model_parallel_size} ETP{self.expert_tensor_parallel_size}"
        stages = [self.stage_layers(stage) for stage in range(self.pipeline_model_parallel_size)]
        if len(set(stages)) > 1:
            axes += f" with {' + '.join(map(str, stages))} layers"
        microbatches = counted(self.num_microbatches, "microbatch", "microbatches")
        return f"{axes}, {microbatches} on {counted(self.world_size, 'rank')}"


def expert_data_parallel_size(
    model: ModelConfig, parallelism: ParallelismConfig, world_size: int
) -> int | None:
    """Number of ranks that hold the same experts; None for a dense model, or if the ranks cannot be divided."""
    if model.num_moe_experts is None:
        return None
    size, ranks_left = divmod(world_size, expert_parallel_size(parallelism))
    return None if ranks_left or size == 0 else size


def model_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks per model replica: TP x PP x CP."""
    return (
        parallelism.tensor_model_parallel_size
        * parallelism.pipeline_model_parallel_size
        * parallelism.context_parallel_size
    )


def expert_parallel_size(parallelism: ParallelismConfig) -> int:
    """Number of ranks that together hold all experts once: ETP x EP x PP."""
    return (
        expert_tensor_parallel_size(parallelism)
        * parallelism.expert_model_parallel_size
        * parallelism.pipeline_model_parallel_size
    )


def fewest_ranks(parallelism: ParallelismConfig) -> int:
    """The smallest world size that TP x PP x CP and ETP x EP x PP both divide."""
    return math.lcm(model_parallel_size(parallelism), expert_parallel_size(parallelism))
