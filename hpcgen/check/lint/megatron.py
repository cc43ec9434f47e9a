"""Megatron-LM's options, and the equivalent keys of a run file."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from hpcgen.check.lint.launch import Flag, Launch
from hpcgen.check.lint.words import Word
from hpcgen.text import nearest

UNEVEN = {
    "decoder-first-pipeline-num-layers": "parallelism.num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": "parallelism.num_layers_in_last_pipeline_stage",
    "account-for-embedding-in-pipeline-split": "parallelism.account_for_embedding_in_pipeline_split",
    "account-for-loss-in-pipeline-split": "parallelism.account_for_loss_in_pipeline_split",
    "pipeline-model-parallel-layout": "parallelism.pipeline_model_parallel_layout",
}
"""Options that divide the layers unevenly over the pipeline stages -> key of a run file."""

EXPERTS = {
    "num-experts": "model.num_moe_experts",
    "moe-ffn-hidden-size": "model.moe_ffn_hidden_size",
    "moe-shared-expert-intermediate-size": "model.moe_shared_expert_intermediate_size",
    "moe-layer-freq": "model.moe_layer_freq",
    "moe-router-topk": "model.moe_router_topk",
    "moe-router-score-function": "model.moe_router_score_function",
    "moe-router-pre-softmax": "model.moe_router_pre_softmax",
    "moe-router-topk-scaling-factor": "model.moe_router_topk_scaling_factor",
    "moe-router-num-groups": "model.moe_router_num_groups",
    "moe-router-group-topk": "model.moe_router_group_topk",
    "moe-router-load-balancing-type": "model.moe_router_load_balancing_type",
    "moe-aux-loss-coeff": "model.moe_aux_loss_coeff",
    "moe-z-loss-coeff": "model.moe_z_loss_coeff",
    "moe-router-enable-expert-bias": "model.moe_router_enable_expert_bias",
    "moe-router-bias-update-rate": "model.moe_router_bias_update_rate",
    "moe-expert-capacity-factor": "model.moe_expert_capacity_factor",
    "moe-pad-expert-input-to-capacity": "model.moe_pad_expert_input_to_capacity",
    "moe-token-drop-policy": "model.moe_token_drop_policy",
    "expert-model-parallel-size": "parallelism.expert_model_parallel_size",
    "expert-tensor-parallel-size": "parallelism.expert_tensor_parallel_size",
    "moe-token-dispatcher-type": "parallelism.moe_token_dispatcher_type",
    "moe-grouped-gemm": "parallelism.moe_grouped_gemm",
}
"""Options of mixtures of experts -> key of a run file."""

LATENT_WIDTHS = {
    "q-lora-rank": "model.q_lora_rank",
    "kv-lora-rank": "model.kv_lora_rank",
    "qk-head-dim": "model.qk_head_dim",
    "qk-pos-emb-head-dim": "model.qk_pos_emb_head_dim",
    "v-head-dim": "model.v_head_dim",
}
"""Options for the widths of multi-head latent attention -> key of a run file."""

KEYS = {
    "num-layers": "model.num_layers",
    "hidden-size": "model.hidden_size",
    "num-attention-heads": "model.num_attention_heads",
    "seq-length": "model.seq_length",
    "ffn-hidden-size": "model.ffn_hidden_size",
    "num-query-groups": "model.num_query_groups",
    "kv-channels": "model.kv_channels",
    "multi-latent-attention": "model.multi_latent_attention",
    **LATENT_WIDTHS,
    "mtp-num-layers": "model.mtp_num_layers",
    "mtp-loss-scaling-factor": "model.mtp_loss_scaling_factor",
    "max-position-embeddings": "model.max_position_embeddings",
    "position-embedding-type": "model.position_embedding_type",
    "rotary-base": "model.rotary_base",
    "normalization": "model.normalization",
    "norm-epsilon": "model.layernorm_epsilon",
    "layernorm-epsilon": "model.layernorm_epsilon",
    "swiglu": "model.swiglu",
    "add-qkv-bias": "model.add_qkv_bias",
    "qk-layernorm": "model.qk_layernorm",
    "untie-embeddings-and-output-weights": "model.untie_embeddings_and_output_weights",
    "attention-dropout": "model.attention_dropout",
    "hidden-dropout": "model.hidden_dropout",
    "init-method-std": "model.init_method_std",
    "vocab-size": "model.vocab_size",
    **EXPERTS,
    "tensor-model-parallel-size": "parallelism.tensor_model_parallel_size",
    "pipeline-model-parallel-size": "parallelism.pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": "parallelism.virtual_pipeline_model_parallel_size",
    **UNEVEN,
    "context-parallel-size": "parallelism.context_parallel_size",
    "cp-comm-type": "parallelism.cp_comm_type",
    "hierarchical-context-parallel-sizes": "parallelism.hierarchical_context_parallel_sizes",
    "sequence-parallel": "parallelism.sequence_parallel",
    "num-distributed-optimizer-instances": "parallelism.num_distributed_optimizer_instances",
    "overlap-grad-reduce": "parallelism.overlap_grad_reduce",
    "overlap-param-gather": "parallelism.overlap_param_gather",
    "tp-comm-overlap": "parallelism.tp_comm_overlap",
    "use-sharp": "parallelism.use_sharp",
    "micro-batch-size": "training.micro_batch_size",
    "global-batch-size": "training.global_batch_size",
    "train-iters": "training.train_iters",
    "seed": "training.seed",
    "rampup-batch-size": "training.rampup_batch_size",
    "fp8-format": "training.fp8",
    "fp8-recipe": "training.fp8_recipe",
    "fp8-amax-history-len": "training.fp8_amax_history_len",
    "fp8-amax-compute-algo": "training.fp8_amax_compute_algo",
    "cross-entropy-fusion-impl": "training.cross_entropy_fusion_impl",
    "cuda-graph-impl": "training.cuda_graph_impl",
    "deterministic-mode": "training.deterministic_mode",
    "recompute-granularity": "training.recompute_granularity",
    "recompute-method": "training.recompute_method",
    "recompute-num-layers": "training.recompute_num_layers",
    "recompute-modules": "training.recompute_modules",
    "eval-interval": "training.eval_interval",
    "eval-iters": "training.eval_iters",
    "distributed-timeout-minutes": "training.distributed_timeout_minutes",
    "distributed-timeout-seconds-after-init": "training.distributed_timeout_seconds_after_init",
    "lr": "optimizer.lr",
    "min-lr": "optimizer.min_lr",
    "lr-decay-style": "optimizer.lr_decay_style",
    "lr-decay-iters": "optimizer.lr_decay_iters",
    "lr-wsd-decay-style": "optimizer.lr_wsd_decay_style",
    "lr-wsd-decay-iters": "optimizer.lr_wsd_decay_iters",
    "lr-warmup-init": "optimizer.lr_warmup_init",
    "lr-warmup-iters": "optimizer.lr_warmup_iters",
    "lr-warmup-fraction": "optimizer.lr_warmup_fraction",
    "weight-decay": "optimizer.weight_decay",
    "adam-beta1": "optimizer.adam_beta1",
    "adam-beta2": "optimizer.adam_beta2",
    "adam-eps": "optimizer.adam_eps",
    "clip-grad": "optimizer.clip_grad",
    "loss-scale": "optimizer.loss_scale",
    "initial-loss-scale": "optimizer.initial_loss_scale",
    "min-loss-scale": "optimizer.min_loss_scale",
    "loss-scale-window": "optimizer.loss_scale_window",
    "hysteresis": "optimizer.hysteresis",
    "split": "data.split",
    "mock-data": "data.mock",
    "reset-attention-mask": "data.reset_attention_mask",
    "reset-position-ids": "data.reset_position_ids",
    "eod-mask-loss": "data.eod_mask_loss",
    "num-workers": "data.num_workers",
    "data-cache-path": "data.cache_dir",
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    "finetune": "checkpoint.finetune",
    "save-interval": "checkpoint.save_interval",
    "save-retain-interval": "checkpoint.keep_every",
    "async-save": "checkpoint.async_save",
    "log-interval": "logging.log_interval",
    "wandb-project": "logging.wandb_project",
    "wandb-entity": "logging.wandb_entity",
    "wandb-exp-name": "logging.wandb_exp_name",
    "profile-step-start": "logging.profile_step_start",
    "profile-step-end": "logging.profile_step_end",
    "profile-ranks": "logging.profile_ranks",
    "record-memory-history": "logging.record_memory_history",
}
"""Option -> key of a run file with the same value."""

OPTIONS = {path: option for option, path in reversed(KEYS.items())}
"""Key of a run file -> Megatron-LM's option."""

NEGATED = {"model.add_bias_linear": "disable-bias-linear"}
"""Key of a run file -> Megatron-LM's option with the opposite value."""

REMOVED = {
    "checkpoint-activations": "--recompute-granularity selective, or --recompute-activations",
    "checkpoint-num-layers": "--recompute-num-layers",
    "checkpoint-activations-method": "--recompute-method",
    "model-parallel-size": "--tensor-model-parallel-size",
    "batch-size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
}
"""Options that make Megatron-LM stop with a message -> what replaces them (arguments.py, validate_args)."""

NOT_MEGATRON = {
    "data-parallel-size": "it is derived from the number of ranks and the other sizes",
    "datacenter-id": "Megatron-LM has no data center IDs",
    "zero-stage": "it is an option of DeepSpeed; --use-distributed-optimizer shards the optimizer",
    "cpu-offload": "it is an option of DeepSpeed; --optimizer-cpu-offload moves the optimizer to the CPU",
    "virtual-pipeline-model-parallel-size": "use --num-virtual-stages-per-pipeline-rank",
    "gradient-accumulation-steps": "it is derived from --global-batch-size",
    # names of Megatron-Core's configuration
    "num-moe-experts": "use --num-experts",
    "moe-token-dropping": "use --moe-expert-capacity-factor",
    "num-layers-in-first-pipeline-stage": "use --decoder-first-pipeline-num-layers",
    "num-layers-in-last-pipeline-stage": "use --decoder-last-pipeline-num-layers",
    "layernorm-zero-centered-gamma": "use --apply-layernorm-1p",
    "gated-linear-unit": "use --swiglu",
    "add-bias-linear": "use --disable-bias-linear for models without biases",
    "params-dtype": "use --bf16 or --fp16",
    "fp8": "use --fp8-format",
}
"""Common options that Megatron-LM does not have -> advice."""


OTHER_LAYERS = frozenset((
    "encoder-num-layers", "hybrid-layer-pattern", "hybrid-override-pattern", "heterogeneous-layers-config-path",
    "pipeline-model-parallel-split-rank", "standalone-embedding-stage", "mtp-num-layers",
))  # fmt: skip
"""Options for layers of several kinds, which the rules for pipelines do not cover."""


DOCUMENT_MASK = "reset-attention-mask"
PACKED_DOCUMENTS = "dataloader-inter-document-masking"
"""Core 0.19's option that separates documents by packed sequences."""


@functools.cache
def options() -> frozenset[str]:
    """All options of pretrain_gpt.py in any release, without dashes."""
    text = (Path(__file__).parent / "megatron_options.txt").read_text(encoding="utf-8")
    return frozenset(line for line in text.splitlines() if line and not line.startswith("#"))


@functools.cache
def nearest_option(option: str) -> str | None:
    """The option closest to a misspelled one; None if the option exists or none is close."""
    if option in options() or option in REMOVED or option in NOT_MEGATRON:
        return None
    if (dashed := option.replace("_", "-")) in options():
        return dashed
    return nearest(option, options())


def unknown_options(launch: Launch) -> frozenset[str]:
    """The options of a command line that Megatron-LM never had."""
    return frozenset(launch.flags) - options() - REMOVED.keys() - NOT_MEGATRON.keys()


def word_of(launch: Launch, option: str) -> Word | None:
    """The value of an option that is certainly given; None otherwise."""
    flag = launch.flags.get(option)
    return flag.value if flag and flag.value and flag.value.certain else None


def is_of_a_fork(launch: Launch) -> bool:
    """True if a command line may be for a program that is not Megatron-LM's own."""
    return bool(unknown_options(launch)) or launch.is_open


def integer(launch: Launch, option: str) -> int | None:
    """The integer value of an option; None if unknown."""
    word = word_of(launch, option)
    return word.number if word else None


def real(launch: Launch, option: str) -> float | None:
    """The numeric value of an option; None if unknown."""
    word = word_of(launch, option)
    if (
        word
        and word.known
        and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", word.text, re.ASCII)
    ):
        return float(word.text)
    return None


def as_options(text: str) -> str:
    """A message with keys of a run file replaced by Megatron-LM's options."""

    def option(found: re.Match[str]) -> str:
        name = found[0].rpartition(".")[2]
        return names.get(name, found[0])

    names = {path.rpartition(".")[2]: f"--{name}" for path, name in OPTIONS.items()}
    for path, name in NEGATED.items():
        key = path.rpartition(".")[2]
        text = text.replace(f"set {key} to false", f"add --{name}").replace(
            f"{key} = true", f"a run without --{name}"
        )
    # not "split", "lr" and similar, which are also words
    text = re.sub(
        r"\b(?:model|parallelism|training|optimizer|data)\.[a-z]\w*|\b[a-z]+(?:_[a-z0-9]+)+\b", option, text
    )
    return re.sub(r"set (--[\w-]+) to true", r"add \1", text)


def ignores_document_mask(flags: Mapping[str, Flag]) -> bool:
    """True if tokens see other documents of their sample in spite of --reset-attention-mask.

    The attention is causal. Transformer Engine's kernels then read no mask, and neither does the fused softmax of
    Megatron-Core's local layers.
    """
    layers = flags.get("transformer-impl")
    is_local = layers is not None and layers.value is not None and layers.value.text == "local"
    return not (is_local and "no-masked-softmax-fusion" in flags)


def knows_layers(launch: Launch) -> bool:
    """True if the number of layers of each pipeline stage is known."""
    given = [launch.flags[name] for name in UNEVEN.keys() & launch.flags.keys()]
    if not given:
        return launch.flags.keys().isdisjoint(OTHER_LAYERS)
    values = [flag.value for flag in (*given, launch.flags.get("num-layers")) if flag and flag.value]
    return (
        launch.flags.keys().isdisjoint(OTHER_LAYERS)
        and "num-layers" in launch.flags
        and all(value.certain for value in values)
    )


def counted_as_layers(launch: Launch) -> int:
    """Number of layers by which the embedding and the loss increase num_layers when stages are divided evenly."""
    return sum(name in launch.flags for name in UNEVEN if name.startswith("account"))


def virtual_stages(layers: int, stages: int, per_stage: int) -> int | None:
    """Virtual stages per rank for --num-layers-per-virtual-pipeline-stage; None if it does not divide a stage."""
    each = stages * per_stage
    return layers // each if each > 0 and layers % each == 0 else None
