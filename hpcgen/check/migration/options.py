"""Megatron-LM's options without an equivalent key in a run file, by how they are converted."""

from __future__ import annotations

import re

from hpcgen.check.lint.megatron import DOCUMENT_MASK, PACKED_DOCUMENTS

SPECIAL_KEYS = {
    "bf16": ("training.precision",),
    "fp16": ("training.precision",),
    "group-query-attention": ("model.num_query_groups",),
    "num-query-groups": ("model.num_query_groups",),
    "use-rotary-position-embeddings": ("model.position_embedding_type",),
    "no-position-embedding": ("model.position_embedding_type",),
    "disable-bias-linear": ("model.add_bias_linear",),
    **dict.fromkeys(("squared-relu", "openai-gelu", "no-bias-gelu-fusion"), ("model.activation_func",)),
    "window-size": ("model.window_size",),
    **dict.fromkeys(
        ("use-rope-scaling", "rope-scaling-factor", "rotary-seq-len-interpolation-factor"),
        ("model.rope_scaling",),
    ),
    **dict.fromkeys(
        ("rope-type", "rotary-scaling-factor", "mscale", "mscale-all-dim"), ("model.rope_scaling",)
    ),
    "multi-latent-attention": ("model.multi_latent_attention",),
    "padded-vocab-size": ("model.padded_vocab_size",),
    "make-vocab-size-divisible-by": ("model.padded_vocab_size",),
    "vocab-size": ("model.vocab_size",),
    "num-layers-per-virtual-pipeline-stage": ("parallelism.virtual_pipeline_model_parallel_size",),
    "train-samples": ("training.train_iters",),
    "lr-decay-samples": ("optimizer.lr_decay_iters",),
    "lr-warmup-samples": ("optimizer.lr_warmup_iters", "optimizer.lr_warmup_fraction"),
    "lr-wsd-decay-samples": ("optimizer.lr_wsd_decay_iters",),
    "data-path": ("data.datasets", "data.train", "data.mock", "data.corpus"),
    "train-data-path": ("data.train", "data.datasets", "data.mock", "data.corpus"),
    "valid-data-path": ("data.valid", "data.datasets", "data.mock", "data.corpus"),
    "test-data-path": ("data.test", "data.datasets", "data.mock", "data.corpus"),
    "mock-data": ("data.mock",),
    **dict.fromkeys((DOCUMENT_MASK, PACKED_DOCUMENTS), ("data.reset_attention_mask",)),
    "tokenizer-type": ("data.tokenizer",),
    "tokenizer-model": ("data.tokenizer",),
    "vocab-file": ("data.tokenizer",),
    "merge-file": ("data.tokenizer",),
}
"""Options with a special conversion -> the keys to set if the conversion fails."""

USUAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "use-distributed-optimizer", "use-mcore-models", "exit-signal-handler", "log-throughput", "use-dist-ckpt",
        "accumulate-allreduce-grads-in-fp32", "no-create-attention-mask-in-dataloader", "auto-detect-ckpt-format",
        "ckpt-fully-parallel-load", "ckpt-fully-parallel-save", "ckpt-assume-constant-structure",
        "cross-entropy-loss-fusion", "moe-permute-fusion", "calculate-per-token-loss",
    ), ()),
    "optimizer": ("adam",),
    "dataloader-type": ("single",),
    "distributed-backend": ("nccl",),
    "ckpt-format": ("torch_dist",),
    "attention-backend": ("auto",),
    "transformer-impl": ("transformer_engine",),
    "rotary-percent": ("1", "1.0"),
    "weight-decay-incr-style": ("constant",),
    "main-grads-dtype": ("fp32",),
    "main-params-dtype": ("fp32",),
    "exp-avg-dtype": ("fp32",),
    "exp-avg-sq-dtype": ("fp32",),
    "softmax-type": ("vanilla",),
    "moe-router-dtype": ("fp32",),
}  # fmt: skip
"""Options that request the trainer's default behavior -> values for which that holds (empty: no value)."""

WITHOUT_VALUE = frozenset((
    "bf16", "fp16", "group-query-attention", "use-rotary-position-embeddings", "no-position-embedding", "mock-data",
    "disable-bias-linear", "squared-relu", "openai-gelu", "no-bias-gelu-fusion", "use-rope-scaling",
    "recompute-activations", "profile", "use-pytorch-profiler", PACKED_DOCUMENTS,
    *(name for name, values in USUAL.items() if not values),
))  # fmt: skip
"""Options without a value, in addition to those with a boolean key."""

NO_EFFECT_ON_RESULTS = re.compile("|".join((
    # logs and metrics
    r"((no|disable)-)?log-.*|tensorboard-.*|wandb-.*|timing-.*|(no-|enable-)?one-logger.*|app-tag-.*|otel-.*",
    r"logging-level|set-level-for-all-loggers|no-filter-warnings|throughput-window-size|timers|config-logger-dir",
    r"((no|disable)-)?flight-recorder-.*|.*pytorch-profiler.*|profile(-.*)?|use-nsys-profiler|nvtx-ranges|record-.*",
    r"memory-(profile|snapshot).*|save-config-filepath|verify-integrity|(no|disable)-save-tokenizer-assets",
    # exit conditions and monitoring
    r"exit-.*|(no-|disable-)?manual-gc.*|adlr-autoresume.*|enable-ft-package|calc-ft-timeouts|ft-.*|inprocess-.*",
    r"rerun-mode|.*straggler.*|check-.*|(no|disable)-check-.*|train-sync-interval|gpu-sniff-test-interval",
    # how checkpoints are written, and what a resumed run reads from them
    r"(no-|disable-)?ckpt-(?!step).*|dist-ckpt-.*|(no-|disable-)?fully-parallel-.*|async-.*|.*persistent-.*ckpt.*",
    r"non-persistent-.*|replication.*|(override|use-checkpoint)-opt[_-]param-scheduler|eval-(interval|iters)",
    # communication, memory and kernels
    r"overlap-.*|no-overlap-.*|(no-)?delay-.*|(no|disable)-align-.*|ddp-.*|((no|disable)-)?tp-comm-.*|cp-comm-type",
    r"use-tp-pp-dp-mapping|.*nccl-.*|sharp-enabled-group|high-priority-.*|.*gloo-process-groups|lazy-mpu-init",
    r"pipeline-model-parallel-comm-backend|.*batch-p2p-.*|deallocate-pipeline-outputs|barrier-.*",
    r"no-scatter-gather-tensors-in-pipeline|microbatch-group-size-per-.*|defer-embedding-.*|wgrad-deferral-limit",
    r".*async-tensor-model-parallel-allreduce|standalone-.*",
    r"distributed-.*|distribute-saved-activations|hierarchical-context-.*",
    r".*fsdp.*|data-parallel-sharding-strategy|optimizer-cpu-offload|optimizer-offload-.*|((no|disable)-)?cpu-offloading.*",
    r"fine-grained-.*|offload-modules|min-offloaded-.*|activation-offload-.*|delta-offload-.*",
    r"no-pin-cpu-.*|empty-unused-memory-level|recompute-.*|use-torch-optimizer-.*",
    r"checkpoint-activations.*|checkpoint-num-layers|activations-checkpoint-.*|.*-fusion|.*cuda-graph.*|.*te-rng-.*",
    r"use-flash-attn.*|flash-attention-version|attention-backend|transformer-impl|.*persist-layer-norm",
    r"enable-experimental|use-transformer-engine-op-fuser|memory-efficient-layer-norm|((no|disable)-)?attention-softmax-in-fp32|.*query-key-layer-scaling",
    # communication, memory and kernels of experts, and logs about them
    r"moe-.*-fusion(-into-hybridep)?|moe-shared-expert-overlap|moe-layer-recompute|moe-per-layer-logging",
    r"moe-(enable-)?deepep.*|moe-(flex-dispatcher|hybridep|ncclep)-.*|moe-use-(legacy-grouped-gemm|grouped-tensor)",
    r"moe-extended-tp|moe-router-(dtype|padding-for-.*)|moe-single-grouped-.*|moe-paged-stash.*|moe-pad-experts-.*",
    r"moe-routing-trace-.*|save-tokens-per-expert-interval|use-grouped-gemm-for-shared-expert",
    # storage of the data
    r"num-dataset-builder-threads|no-mmap-bin-files|dataloader-(defer|fast)-.*|object-storage-.*|s3-cache-path",
    r"tiktoken-.*|tokenizer-(hf|sentencepiece)-.*|legacy-tokenizer|null-tokenizer-.*|data-impl|.*-msc|trust-remote-code|local-rank|use-cpu-initialization|init-model-with-meta-device|inference-.*",
    # options of DeepSpeed and others that Megatron-LM lacks, which follow from carried options
    r"data-parallel-size|datacenter-id|gradient-accumulation-steps|virtual-pipeline-model-parallel-size",
    r"zero-stage|cpu-offload|no-load-rng|no-save-(rng|optim)",
)))  # fmt: skip
"""Options without a key that change model, data and optimizer at most by rounding. They are only listed."""

EXPERT_OPTIONS = re.compile(r"(moe|expert)-.*")
"""Options that only apply with --num-experts."""

REPLACED = {
    "batch-size": "training.micro_batch_size",
    "warmup": "optimizer.lr_warmup_fraction",
    "model-parallel-size": "parallelism.tensor_model_parallel_size",
}
"""Removed options that affect the results -> the key of their replacement."""

HARMLESS_KEYS = re.compile(
    r"training\.(eval_|distributed_timeout|cross_entropy|cuda_graph|deterministic|recompute_).*"
    r"|parallelism\.(overlap_|tp_comm|cp_comm|hierarchical_context_|use_sharp|sequence_parallel|num_layers_in_).*"
    r"|parallelism\.(num_distributed_|account_for_|moe_|pipeline_.*layout).*"
    r"|data\.(num_workers|cache_dir)|checkpoint\.(?!load|finetune).*|logging\..*"
)
"""Keys of a run file that do not affect the results."""

WHY_NOT = {
    "tensorboard-dir": "the trainer writes to `tensorboard` in the run directory",
    "wandb-save-dir": "the trainer writes to `wandb` in the run directory",
    "exit-duration-in-mins": "the trainer saves and stops before the time limit",
    "use-persistent-ckpt-worker": "each rank writes in a thread, without a worker process",
    "step-batch-size-schedule": "the trainer only supports training.rampup_batch_size",
    "optimizer": "the trainer's optimizer is AdamW",
    "dataloader-type": "the trainer reads each sample once, in the order of --dataloader-type single",
    "use-checkpoint-args": "the model's sizes are in a checkpoint; write them into the script",
    "use-mp-args-from-checkpoint-args": "the model's sizes are in a checkpoint; write them into the script",
    "no-load-optim": "the trainer resumes with the optimizer's state; checkpoint.finetune starts without it",
    "no-save-optim": "the trainer always saves the optimizer's state",
    "no-check-for-nan-in-loss-and-grad": "the trainer checks both before each update",
    "pretrained-checkpoint": "set checkpoint.load and checkpoint.finetune instead",
    **dict.fromkeys(
        ("cpu-offloading", "fine-grained-activation-offloading"),
        "the trainer does not offload activations; if they do not fit, use training.recompute_modules or a larger "
        "parallelism.context_parallel_size (docs/long-context.md#offloading-activations)",
    ),
    "transformer-impl": "the trainer uses Transformer Engine if installed; see training.transformer_impl",
    "override-opt_param-scheduler": "a resumed run follows the run file, and is refused if that has changed",
    "use-checkpoint-opt_param-scheduler": "a resumed run follows the run file, and is refused if that has changed",
}
"""Why an option is not carried over."""

PLACEHOLDER = re.compile(r"<[^<>]*>|/path/to\b|\b(CHANGE|REPLACE)_?(ME|THIS)\b|\bTODO\b")
"""Placeholders for values that the user of a script fills in."""

ALIASES = {("lr-wsd-decay-style", "1-sqrt"): "minus_sqrt"}
"""Values of forks -> Megatron-LM's. optimizer_param_scheduler.py of swiss-ai/Megatron-LM has the same formula."""


def decides(name: str, path: str | None) -> bool:
    """True if the results can depend on an option with the key `path`."""
    if path is not None:
        return not HARMLESS_KEYS.fullmatch(path)
    has_no_effect = NO_EFFECT_ON_RESULTS.fullmatch(name) or USUAL.get(name) == ()
    return name in SPECIAL_KEYS or not has_no_effect
