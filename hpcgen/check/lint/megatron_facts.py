"""The facts for planning's rules, from a command line of Megatron-LM."""

from __future__ import annotations

import contextlib
from typing import Any

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.megatron import (
    UNEVEN,
    counted_as_layers,
    integer,
    knows_layers,
    real,
    virtual_stages,
    word_of,
)
from hpcgen.config.layer_pattern import layer_pattern
from hpcgen.config.megatron_options import in_group
from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.model.layout import fewest_ranks, model_parallel_size
from trainer.contract.model.pipeline import layout_rows
from trainer.contract.rules.facts import Facts, World


def facts(job: Job, launch: Launch) -> Facts | None:
    """The facts for planning's rules from a command line; None if a parallel size is unknown.

    Other unknown values are chosen to satisfy every rule, so that only known values are checked.
    """
    layout = _layout(launch)
    if layout is None:
        return None
    nodes, ranks = job.world_size(launch) or (1, fewest_ranks(layout))
    micro_batch = _or(integer(launch, "micro-batch-size"), 1)
    data_parallel = max(1, nodes * ranks // model_parallel_size(layout))
    return Facts(
        model=_model(launch, layout),
        parallelism=layout,
        training=TrainingConfig(
            micro_batch_size=micro_batch,
            global_batch_size=_or(
                integer(launch, "global-batch-size"),
                micro_batch * data_parallel * layout.pipeline_model_parallel_size,
            ),
            train_iters=_or(integer(launch, "train-iters"), 1_000_000),
        ),
        optimizer=OptimizerConfig(
            lr=real(launch, "lr") or 1.0,
            min_lr=real(launch, "min-lr"),
            lr_decay_iters=integer(launch, "lr-decay-iters"),
            lr_warmup_init=real(launch, "lr-warmup-init") or 0.0,
            lr_warmup_iters=integer(launch, "lr-warmup-iters"),
            lr_warmup_fraction=real(launch, "lr-warmup-fraction"),
        ),
        data=BlendConfig(mock=True),
        world=World(path="world", count=nodes, ranks_each=ranks),
        gpus_per_node=job.gpus_per_node or ranks,
    )


def _layout(launch: Launch) -> ParallelismConfig | None:
    sizes = {}
    for name in ("tensor-model-parallel-size", "pipeline-model-parallel-size", "context-parallel-size"):
        size = integer(launch, name) if name in launch.flags else None if launch.is_open else 1
        if size is None or size < 1:
            return None
        sizes[name] = size
    tensor, pipeline, context = sizes.values()
    return ParallelismConfig(
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        virtual_pipeline_model_parallel_size=_chunks(launch, pipeline),
        context_parallel_size=context,
        sequence_parallel="sequence-parallel" in launch.flags and tensor > 1,
        num_distributed_optimizer_instances=_or(integer(launch, "num-distributed-optimizer-instances"), 1),
        **_split(launch),
        **_expert_layout(launch),
    )


def _split(launch: Launch) -> dict[str, Any]:
    """The keys for an uneven pipeline."""
    if not knows_layers(launch):
        return {}
    values: dict[str, Any] = {
        name: name in launch.flags if name.startswith("account") else integer(launch, name) for name in UNEVEN
    }
    layout = word_of(launch, "pipeline-model-parallel-layout")
    values["pipeline-model-parallel-layout"] = layout and layout.text
    return {UNEVEN[name].partition(".")[2]: value for name, value in values.items()}


def _model(launch: Launch, layout: ParallelismConfig) -> ModelConfig:
    tensor = layout.tensor_model_parallel_size
    heads = _or(integer(launch, "num-attention-heads"), tensor)
    position = word_of(launch, "position-embedding-type")
    is_rope = "use-rotary-position-embeddings" in launch.flags or (
        position is not None and position.text == "rope"
    )
    is_latent = is_rope and "multi-latent-attention" in launch.flags
    return ModelConfig(
        num_layers=_layers(launch, layout.pipeline_model_parallel_size),
        hidden_size=_or(integer(launch, "hidden-size"), 2 * tensor * heads),
        num_attention_heads=heads,
        seq_length=_or(integer(launch, "seq-length"), 2 * layout.context_parallel_size * tensor),
        ffn_hidden_size=_or(integer(launch, "ffn-hidden-size"), 4 * tensor * heads),
        num_query_groups=integer(launch, "num-query-groups")
        if "group-query-attention" in launch.flags
        else None,
        kv_channels=None if is_latent else integer(launch, "kv-channels"),
        max_position_embeddings=integer(launch, "max-position-embeddings"),
        position_embedding_type="rope" if is_rope else "learned_absolute",
        add_bias_linear="disable-bias-linear" not in launch.flags,
        **_experts(launch, layout),
        multi_latent_attention=is_latent,
    )


EXPERT_SIZES = {row.name: row.key.partition(".")[2] for row in in_group("expert sizes")}


def _expert_sizes(launch: Launch) -> dict[str, int]:
    """The sizes of a mixture of experts; none if one is unknown."""
    sizes = {key: integer(launch, name) for name, key in EXPERT_SIZES.items() if name in launch.flags}
    known = {key: size for key, size in sizes.items() if size is not None and size > 0}
    return known if len(known) == len(sizes) and "num_moe_experts" in known and not launch.is_open else {}


def _expert_layout(launch: Launch) -> dict[str, Any]:
    return {key: size for key, size in _expert_sizes(launch).items() if key.startswith("expert_")}


def _experts(launch: Launch, layout: ParallelismConfig) -> dict[str, Any]:
    """Keys of experts in the section `model`, except keys that Megatron-LM ignores."""
    values: dict[str, Any] = {
        key: size for key, size in _expert_sizes(launch).items() if not key.startswith("expert_")
    }
    if not values:
        return {}
    if integer(launch, "ffn-hidden-size") is None:
        values.setdefault("moe_ffn_hidden_size", expert_tensor_parallel_size(layout))
    if "moe_router_group_topk" not in values:
        values.pop("moe_router_num_groups", None)
    score = word_of(launch, "moe-router-score-function")
    if score is not None and score.text == "sigmoid":
        values["moe_router_score_function"] = "sigmoid"
    else:
        balancing = word_of(launch, "moe-router-load-balancing-type")
        has_gradient = (
            balancing is not None and balancing.text == "sinkhorn"
        )  # uses a sigmoid for a single expert
        values["moe_router_pre_softmax"] = "moe-router-pre-softmax" in launch.flags or has_gradient
    values["moe_router_enable_expert_bias"] = "moe-router-enable-expert-bias" in launch.flags
    if "moe-pad-expert-input-to-capacity" in launch.flags:
        values["moe_pad_expert_input_to_capacity"] = True
        factor = real(launch, "moe-expert-capacity-factor")
        values["moe_expert_capacity_factor"] = factor if factor and factor > 0 else None
    pattern = word_of(launch, "moe-layer-freq")
    layers = layer_pattern(pattern.text, integer(launch, "num-layers")) if pattern and pattern.known else None
    return values | {"moe_layer_freq": layers and tuple(layers)}


def _layers(launch: Launch, pipeline: int) -> int:
    return _or(integer(launch, "num-layers"), pipeline)


def _or(number: int | None, other: int) -> int:
    return number if number and number > 0 else other


def _chunks(launch: Launch, pipeline: int) -> int | None:
    """Virtual stages per rank. A layout decides them in Megatron-LM."""
    layout = word_of(launch, "pipeline-model-parallel-layout")
    if layout:
        with contextlib.suppress(ValueError):
            chunks = len(layout_rows(layout.text)) // pipeline
            return chunks if chunks > 1 else None
    if stages := integer(launch, "num-virtual-stages-per-pipeline-rank"):
        return stages
    per_stage = integer(launch, "num-layers-per-virtual-pipeline-stage") or 0
    return virtual_stages(_layers(launch, pipeline) + counted_as_layers(launch), pipeline, per_stage)
