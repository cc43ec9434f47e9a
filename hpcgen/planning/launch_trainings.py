"""Small trainings whose steps tell how long the host launches a layer of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

from hpcgen.planning.setup import Setup
from trainer.contract.config import (
    BlendConfig,
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve

LAYERS = (4, 12)
MICROBATCHES = 8
SEQ_LENGTH = 64
WIDTH, HEADS, FFN_WIDTH, EXPERT_WIDTH = 1024, 16, 2048, 512
VOCAB_SIZE = 1024
FEWEST_EXPERTS = 4
"""A router needs more experts than it chooses."""


def launch_trainings(trainer: TrainerConfig, setup: Setup, *, has_experts: bool) -> tuple[TrainerConfig, ...]:
    """Two trainings with the layers of a run, but so small that the GPU waits for the host. They differ in their number
    of layers, so the difference of their steps is the time of these layers."""
    tensor = min(2, setup.layout.tensor_model_parallel_size)
    found = []
    for layers in LAYERS:
        config = dataclasses.replace(
            trainer,
            name="host",
            world_size=tensor,
            model=_model(setup, layers, has_experts=has_experts),
            parallelism=_parallelism(trainer.parallelism, tensor),
            training=_training(trainer.training),
            data=BlendConfig(mock=True),
            checkpoint=CheckpointConfig(),
            logging=LoggingConfig(tensorboard=False),
        )
        found.append(resolve(config))
    return tuple(found)


def _model(setup: Setup, layers: int, *, has_experts: bool) -> ModelConfig:
    model = setup.model
    is_grouped = model.num_query_groups != model.num_attention_heads
    small = dataclasses.replace(
        model,
        num_layers=layers,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=HEADS // 2 if is_grouped else HEADS,
        kv_channels=None,
        ffn_hidden_size=FFN_WIDTH,
        seq_length=SEQ_LENGTH,
        max_position_embeddings=SEQ_LENGTH,
        window_size=None,
        rope_scaling=None,
        init_method_std=None,
        mtp_num_layers=None,
        mtp_loss_scaling_factor=ModelConfig.mtp_loss_scaling_factor,
        moe_layer_freq=None,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=VOCAB_SIZE,
    )
    if not has_experts:
        fields = dataclasses.fields(model)
        dense: dict[str, Any] = {field.name: field.default for field in fields if "moe_" in field.name}
        return dataclasses.replace(small, **dense)
    experts = max(FEWEST_EXPERTS, setup.local_experts)
    return dataclasses.replace(
        small,
        num_moe_experts=experts,
        moe_router_topk=min(model.moe_router_topk, experts // 2),
        moe_ffn_hidden_size=EXPERT_WIDTH,
        moe_shared_expert_intermediate_size=model.moe_shared_expert_intermediate_size and EXPERT_WIDTH,
        moe_router_num_groups=None,
        moe_router_group_topk=None,
    )


def _parallelism(parallelism: ParallelismConfig, tensor: int) -> ParallelismConfig:
    return ParallelismConfig(
        tensor_model_parallel_size=tensor,
        sequence_parallel=parallelism.sequence_parallel and tensor > 1,
        moe_token_dispatcher_type=parallelism.moe_token_dispatcher_type,
        moe_grouped_gemm=parallelism.moe_grouped_gemm,
    )


def _training(training: TrainingConfig) -> TrainingConfig:
    return dataclasses.replace(
        training,
        micro_batch_size=1,
        global_batch_size=MICROBATCHES,
        train_iters=1000,
        rampup_batch_size=None,
        recompute_granularity=None,
        recompute_modules=None,
        recompute_method=None,
        recompute_num_layers=None,
        eval_interval=None,
        eval_iters=0,
    )
