"""Megatron-LM's options by what becomes of them, beyond those that a run file has a key for."""

from __future__ import annotations

import re

OWN_WAY = {
    "bf16": ("training.precision",),
    "fp16": ("training.precision",),
    "group-query-attention": ("model.num_query_groups",),
    "num-query-groups": ("model.num_query_groups",),
    "use-rotary-position-embeddings": ("model.position_embedding_type",),
    "no-position-embedding": ("model.position_embedding_type",),
    "disable-bias-linear": ("model.add_bias_linear",),
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
    "tokenizer-type": ("data.tokenizer",),
    "tokenizer-model": ("data.tokenizer",),
    "vocab-file": ("data.tokenizer",),
    "merge-file": ("data.tokenizer",),
}
"""Options that are carried over in their own way -> the keys that answer for one that cannot be."""

USUAL: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((
        "use-distributed-optimizer", "use-mcore-models", "exit-signal-handler", "log-throughput", "use-dist-ckpt",
        "accumulate-allreduce-grads-in-fp32", "no-create-attention-mask-in-dataloader", "auto-detect-ckpt-format",
        "ckpt-fully-parallel-load", "ckpt-fully-parallel-save", "ckpt-assume-constant-structure",
        "cross-entropy-loss-fusion",
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
}  # fmt: skip
"""Options that say what the trainer does anyway, those with a value only with one of these."""

WITHOUT_VALUE = frozenset((
    "bf16", "fp16", "group-query-attention", "use-rotary-position-embeddings", "no-position-embedding", "mock-data",
    "disable-bias-linear", "recompute-activations", "profile", "use-pytorch-profiler",
    *(name for name, values in USUAL.items() if not values),
))  # fmt: skip
"""Options that take no value, besides those whose key is true or false."""

NO_EFFECT_ON_RESULTS = re.compile("|".join((
    # what is written, and where
    r"((no|disable)-)?log-.*|tensorboard-.*|wandb-.*|timing-.*|(no-|enable-)?one-logger.*|app-tag-.*|otel-.*",
    r"logging-level|set-level-for-all-loggers|no-filter-warnings|throughput-window-size|timers|config-logger-dir",
    r"((no|disable)-)?flight-recorder-.*|.*pytorch-profiler.*|profile(-.*)?|use-nsys-profiler|nvtx-ranges|record-.*",
    r"memory-(profile|snapshot).*|save-config-filepath|verify-integrity|(no|disable)-save-tokenizer-assets",
    # when the job ends, and what watches it
    r"exit-.*|(no-|disable-)?manual-gc.*|adlr-autoresume.*|enable-ft-package|calc-ft-timeouts|ft-.*|inprocess-.*",
    r"rerun-mode|.*straggler.*|check-.*|(no|disable)-check-.*|train-sync-interval|gpu-sniff-test-interval",
    # how checkpoints are written, and what a resumed run takes from them
    r"(no-|disable-)?ckpt-(?!step).*|dist-ckpt-.*|(no-|disable-)?fully-parallel-.*|async-.*|.*persistent-.*ckpt.*",
    r"non-persistent-.*|replication.*|(override|use-checkpoint)-opt[_-]param-scheduler|eval-(interval|iters)",
    # communication, memory and kernels
    r"overlap-.*|no-overlap-.*|(no-)?delay-.*|(no|disable)-align-.*|ddp-.*|((no|disable)-)?tp-comm-.*|cp-comm-type",
    r"use-tp-pp-dp-mapping|.*nccl-.*|sharp-enabled-group|high-priority-.*|.*gloo-process-groups|lazy-mpu-init",
    r"pipeline-model-parallel-(comm-backend|layout)|.*batch-p2p-.*|deallocate-pipeline-outputs|barrier-.*",
    r"no-scatter-gather-tensors-in-pipeline|microbatch-group-size-per-.*|defer-embedding-.*|wgrad-deferral-limit",
    r".*async-tensor-model-parallel-allreduce|decoder-(first|last)-pipeline-num-layers|account-for-.*|standalone-.*",
    r"distributed-.*|distribute-saved-activations|num-distributed-optimizer-instances|hierarchical-context-.*",
    r".*fsdp.*|data-parallel-sharding-strategy|optimizer-cpu-offload|optimizer-offload-.*|(no-)?cpu-offloading.*",
    r"fine-grained-.*|offload-modules|no-pin-cpu-.*|empty-unused-memory-level|recompute-.*|use-torch-optimizer-.*",
    r"checkpoint-activations.*|checkpoint-num-layers|activations-checkpoint-.*|.*-fusion|.*cuda-graph.*|.*te-rng-.*",
    r"use-flash-attn.*|flash-attention-version|attention-backend|transformer-impl|.*persist-layer-norm",
    r"memory-efficient-layer-norm|((no|disable)-)?attention-softmax-in-fp32|.*query-key-layer-scaling",
    # where data is read from, and how
    r"num-dataset-builder-threads|no-mmap-bin-files|dataloader-(defer|fast)-.*|object-storage-.*|s3-cache-path",
    r"tiktoken-.*|tokenizer-(hf|sentencepiece)-.*|legacy-tokenizer|null-tokenizer-.*|data-impl|.*-msc|trust-remote-code|local-rank|use-cpu-initialization|init-model-with-meta-device|inference-.*",
    # DeepSpeed's and others that Megatron-LM does not have, and that follow from what is carried
    r"data-parallel-size|datacenter-id|gradient-accumulation-steps|virtual-pipeline-model-parallel-size",
    r"zero-stage|cpu-offload|no-(load|save)-rng",
)))  # fmt: skip
"""Options without a key that leave the model, its data and its optimizer as they are (to rounding): listed alone."""

OF_EXPERTS = re.compile(r"(moe|expert)-.*")
"""Options that only count with --num-experts."""

REPLACED = {
    "batch-size": "training.micro_batch_size",
    "warmup": "optimizer.lr_warmup_fraction",
    "model-parallel-size": "parallelism.tensor_model_parallel_size",
}
"""Removed options that decide the results -> the key of what replaced them."""

HARMLESS_KEYS = re.compile(
    r"training\.(eval_|distributed_timeout|cross_entropy|cuda_graph|deterministic|recompute_).*"
    r"|parallelism\.(overlap_|tp_comm|use_sharp|sequence_parallel).*"
    r"|data\.(num_workers|cache_dir)|checkpoint\.(?!load|finetune).*|logging\..*"
)
"""Keys of a run file that the results do not depend on."""

WHY_NOT = {
    "tensorboard-dir": "the trainer writes to `tensorboard` in the run directory",
    "wandb-save-dir": "the trainer writes to `wandb` in the run directory",
    "exit-duration-in-mins": "the trainer saves and stops ahead of the time limit",
    "use-persistent-ckpt-worker": "a thread of each rank writes, which needs no worker",
    "step-batch-size-schedule": "the batch grows by training.rampup_batch_size alone",
    "num-experts": "the trainer has no mixture of experts",
    "multi-latent-attention": "the trainer has no latent attention",
    "optimizer": "the trainer's optimizer is AdamW",
    "dataloader-type": "the trainer reads each sample once, in the order of --dataloader-type single",
    "use-checkpoint-args": "the sizes of the model are in a checkpoint; write them into the script",
    "use-mp-args-from-checkpoint-args": "the sizes of the model are in a checkpoint; write them into the script",
    "reset-position-ids": "the trainer's positions go on across documents",
    "reset-attention-mask": "the trainer attends across documents",
    "eod-mask-loss": "the trainer's loss counts the token at the end of a document",
    "use-rope-scaling": "the trainer's rotary frequencies are not scaled",
    "no-load-optim": "the trainer goes on with the optimizer's state, and checkpoint.finetune without it",
    "pretrained-checkpoint": "set checkpoint.load and checkpoint.finetune in its place",
    "transformer-impl": "the trainer takes Transformer Engine where it is installed; training.transformer_impl sets it",
    "override-opt_param-scheduler": "a resumed run follows the run file, and is refused where that has changed",
    "use-checkpoint-opt_param-scheduler": "a resumed run follows the run file, and is refused where that has changed",
}
"""Why the trainer does not do what an option says."""

PLACEHOLDER = re.compile(r"<[^<>]*>|/path/to\b|\b(CHANGE|REPLACE)_?(ME|THIS)\b|\bTODO\b")
"""Placeholders for values that a script leaves to its user."""

ALIASES = {("lr-wsd-decay-style", "1-sqrt"): "minus_sqrt"}
"""Values of forks -> Megatron-LM's own: optimizer_param_scheduler.py of swiss-ai/Megatron-LM has the same formula."""


def decides(name: str, path: str | None) -> bool:
    """Whether the results may depend on an option; `path` is its key in a run file."""
    if path is not None:
        return not HARMLESS_KEYS.fullmatch(path)
    has_no_effect = NO_EFFECT_ON_RESULTS.fullmatch(name) or OF_EXPERTS.match(name) or USUAL.get(name) == ()
    return name in OWN_WAY or not has_no_effect
