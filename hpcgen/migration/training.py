"""Megatron-LM's command line as sections of a run file: model, parallelism, training, optimizer, data, checkpoint."""

from __future__ import annotations

import re
import types
import typing
from typing import Annotated, Any, Literal, Union

from hpcgen.config.run import RunConfig
from hpcgen.config.validation import inner_class
from hpcgen.lint.job import Job
from hpcgen.lint.launch import Flag, Launch
from hpcgen.lint.megatron import KEYS, NOT_MEGATRON, REMOVED, options, virtual_stages, whole
from hpcgen.lint.words import Word
from hpcgen.migration.leftover import Carried, unknown
from hpcgen.planning.secret import SECRET
from trainer.batch_size import steps_within
from trainer.config import TrainingConfig
from trainer.resolve import VOCAB_MULTIPLE, pad_vocab_size

GPT2_VOCAB_SIZE = 50257

DEFAULTS: dict[str, object] = {
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "model.init_method_std": 0.02,
    "training.eval_interval": 1000,
    "training.eval_iters": 100,
    "training.precision": "fp32",
    "optimizer.min_lr": 0.0,
    "optimizer.lr_decay_style": "linear",
    "optimizer.weight_decay": 0.01,
    "optimizer.adam_beta2": 0.999,
    "data.split": "969, 30, 1",
}
"""Megatron-LM's defaults (arguments.py) that are not a run file's: written out, so that the run stays the same."""

DELAYED_SCALING: dict[str, object] = {
    "training.fp8_recipe": "delayed",
    "training.fp8_amax_history_len": 1,
    "training.fp8_amax_compute_algo": "most_recent",
}
"""Those for FP8, the recipe first: the others belong to it."""

PROFILE: dict[str, object] = {"logging.profile_step_start": 10, "logging.profile_step_end": 12}
"""Those for --profile."""

BELONGS_TO: dict[str, tuple[str, object]] = {
    **dict.fromkeys(
        ("loss-scale", "initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"),
        ("training.precision", "fp16"),
    ),
    **dict.fromkeys(("lr-wsd-decay-style", "lr-wsd-decay-iters"), ("optimizer.lr_decay_style", "WSD")),
    "fp8-recipe": ("training.fp8", None),
    **dict.fromkeys(("fp8-amax-history-len", "fp8-amax-compute-algo"), ("training.fp8_recipe", "delayed")),
    **dict.fromkeys(("wandb-entity", "wandb-exp-name"), ("logging.wandb_project", None)),
    **dict.fromkeys(
        ("profile-step-start", "profile-step-end", "profile-ranks", "record-memory-history"),
        ("logging.profile_step_start", None),
    ),
    "finetune": ("checkpoint.load", None),
}
"""Options that nothing reads, and that a run file may not have, unless another key has a value (None: any)."""

MOST_STEPS = 1_000_000
"""Of a run whose batch grows: they are counted one by one."""

AS_EVER = frozenset((
    "use-distributed-optimizer", "use-mcore-models", "transformer-impl", "use-flash-attn", "attention-backend",
    "bf16", "fp16", "profile", "use-pytorch-profiler", "cross-entropy-loss-fusion", "ckpt-format",
    "exit-signal-handler", "exit-duration-in-mins", "log-throughput",
    "distributed-backend", "no-masked-softmax-fusion", "accumulate-allreduce-grads-in-fp32", "dataloader-type",
    "group-query-attention", "num-query-groups", "use-rotary-position-embeddings", "disable-bias-linear",
    "num-layers-per-virtual-pipeline-stage", "recompute-activations", "train-samples", "lr-decay-samples",
    "lr-warmup-samples", "lr-wsd-decay-samples", "data-path", "train-data-path", "valid-data-path", "test-data-path",
    "vocab-file",
    "merge-file", "tokenizer-type", "tokenizer-model", "use-checkpoint-args", "auto-detect-ckpt-format",
    "no-create-attention-mask-in-dataloader", "log-params-norm", "log-num-zeros-in-grad", "log-timers-to-tensorboard",
    "log-memory-to-tensorboard", "log-validation-ppl-to-tensorboard", "log-learning-rate-to-tensorboard",
    "log-batch-size-to-tensorboard", "log-loss-scale-to-tensorboard", "ckpt-fully-parallel-load",
    "ckpt-assume-constant-structure", "use-dist-ckpt", "load", "position-embedding-type", "local-rank",
))  # fmt: skip
"""Options that are carried over in their own way, or that the trainer does without being asked."""

WHY_NOT = {
    "tensorboard-dir": "the trainer writes to `tensorboard` in the run directory",
    "wandb-save-dir": "the trainer writes to `wandb` in the run directory",
    "use-persistent-ckpt-worker": "a thread of each rank writes, which needs no worker",
    "step-batch-size-schedule": "the batch grows by training.rampup_batch_size alone",
    "make-vocab-size-divisible-by": "the vocabulary is padded to a multiple of 128; model.padded_vocab_size sets it",
    "num-experts": "the trainer has no mixture of experts",
    "expert-model-parallel-size": "the trainer has no mixture of experts",
    "multi-latent-attention": "the trainer has no latent attention",
    "optimizer": "the trainer's optimizer is AdamW",
}


def carry_training(job: Job, launch: Launch, carried: Carried) -> None:
    """Adds what the command line says."""
    for flag in launch.flags.values():
        if flag.name not in BELONGS_TO:
            _carry(flag, carried)
    _precision(launch, carried)
    _model(launch, carried)
    _samples(launch, carried)
    _data(launch, carried)
    _tokenizer(launch, carried)
    _checkpoints(launch, carried)
    _profile(launch, carried)
    _belonging(launch, carried)
    for path, value in DEFAULTS.items():
        is_given = carried.get(path) is not None or any(KEYS.get(name) == path for name in launch.flags)
        if not is_given and not (path == "data.split" and not carried.get("data.datasets")):
            carried.put(path, value)
    warmup = {"lr-warmup-iters", "lr-warmup-fraction", "lr-warmup-samples"} & launch.flags.keys()
    if not warmup:
        carried.put("optimizer.lr_warmup_iters", 0)
    for word in launch.holders:
        carried.leave(word.line, word.text, "only the job knows the options in it")


def _carry(flag: Flag, carried: Carried) -> None:
    """An option whose value is taken as it is, or why it is not."""
    if flag.name in AS_EVER:
        return
    path = KEYS.get(flag.name)
    shown = () if SECRET.search(flag.name.replace("-", "_")) else flag.values[:3]
    what = " ".join([f"--{flag.name}", *(word.text for word in shown)])
    if path is None:
        if flag.name in REMOVED:
            why = f"Megatron-LM stops at it; {REMOVED[flag.name]}"
        elif flag.name in NOT_MEGATRON:
            why = f"Megatron-LM does not have it: {NOT_MEGATRON[flag.name]}"
        elif flag.name not in options():
            why = "Megatron-LM does not have it"
        else:
            why = WHY_NOT.get(flag.name, "a run file has no key for it")
        carried.leave(flag.line, what, why)
        return
    if not flag.word.certain:
        carried.leave(flag.line, what, "it is only given under a condition")
        return
    value = _typed(path, flag)
    if value is None:
        word = flag.value
        why = (
            unknown(word) if word and not (word.known and word.certain) else f"{path} cannot have this value"
        )
        carried.leave(flag.line, what, why)
    else:
        carried.put(path, value)


def _belonging(launch: Launch, carried: Carried) -> None:
    """Options that belong to what is carried by now, and Megatron-LM's defaults where they are left out."""
    defaults = {**DELAYED_SCALING} if carried.get("training.fp8") else {}
    for name, (path, value) in BELONGS_TO.items():
        is_read = carried.get(path) is not None if value is None else carried.get(path) == value
        flag = launch.flags.get(name)
        if flag is None:
            if is_read and KEYS[name] in defaults:
                carried.put(KEYS[name], defaults[KEYS[name]])
        elif is_read:
            _carry(flag, carried)
        else:
            what = " ".join([f"--{name}", *(word.text for word in flag.values[:3])])
            carried.leave(flag.line, what, f"it belongs to {path}{f' = {value}' if value else ''}")


def _typed(path: str, flag: Flag) -> object:
    """The value of an option in the type of its key; None when it is not known, or does not fit."""
    kind = _kind(path)
    if kind is bool:
        return True
    if typing.get_origin(kind) is tuple:
        return _numbers(flag)
    word = flag.value
    if word is None or not (word.known and word.certain):
        return None
    text = word.text
    if typing.get_origin(kind) is Literal:
        return text if text in typing.get_args(kind) else None
    if kind is int:
        return int(text) if re.fullmatch(r"\d{1,15}", text, re.ASCII) else None
    if kind is float:
        is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", text, re.ASCII)
        return float(text) if is_number else None
    return text or None


def _numbers(flag: Flag) -> list[int] | None:
    """The whole numbers after an option; None when one is not known, or none."""
    if not all(word.known and word.certain for word in flag.values):
        return None
    numbers = [int(word.text) for word in flag.values if re.fullmatch(r"\d{1,15}", word.text, re.ASCII)]
    return numbers if numbers and len(numbers) == len(flag.values) else None


def _kind(path: str) -> Any:
    """The plain type of a key of the run file."""
    section, key = path.split(".")
    cls = inner_class(typing.get_type_hints(RunConfig, include_extras=True)[section])
    hint: Any = typing.get_type_hints(cls, include_extras=True)[key]
    while True:
        if typing.get_origin(hint) is Annotated:
            hint = typing.get_args(hint)[0]
        elif typing.get_origin(hint) in (Union, types.UnionType):
            [hint] = [inner for inner in typing.get_args(hint) if inner is not type(None)]
        else:
            return hint


def _precision(launch: Launch, carried: Carried) -> None:
    for precision in ("bf16", "fp16"):
        if precision in launch.flags:
            carried.put("training.precision", precision)


def _model(launch: Launch, carried: Carried) -> None:
    if "group-query-attention" in launch.flags and (groups := whole(launch, "num-query-groups")):
        carried.put("model.num_query_groups", groups)
    if "use-rotary-position-embeddings" in launch.flags:
        carried.put("model.position_embedding_type", "rope")
    if flag := launch.flags.get("position-embedding-type"):
        value = _typed("model.position_embedding_type", flag)
        if value is not None:
            carried.put("model.position_embedding_type", value)
        else:
            text = flag.value.text if flag.value else ""
            carried.leave(
                flag.line, f"--position-embedding-type {text}", "the trainer has learned_absolute and rope"
            )
    if "disable-bias-linear" in launch.flags:
        carried.put("model.add_bias_linear", False)
    if "recompute-activations" in launch.flags:
        carried.put("training.recompute_granularity", "selective")
    flag = launch.flags.get("num-layers-per-virtual-pipeline-stage")
    if flag is None:
        return
    per_stage, layers = whole(launch, flag.name), carried.get("model.num_layers")
    stages = carried.get("parallelism.pipeline_model_parallel_size") or 1
    if per_stage and layers and (chunks := virtual_stages(layers, stages, per_stage)):
        carried.put("parallelism.virtual_pipeline_model_parallel_size", chunks)
    else:
        text = flag.value.text if flag.value else ""
        carried.leave(flag.line, f"--{flag.name} {text}", "it does not divide the layers of a stage")


def _samples(launch: Launch, carried: Carried) -> None:
    """Lengths in samples become iterations."""
    batch = carried.get("training.global_batch_size")
    for name, path in (
        ("train-samples", "training.train_iters"),
        ("lr-decay-samples", "optimizer.lr_decay_iters"),
        ("lr-warmup-samples", "optimizer.lr_warmup_iters"),
        ("lr-wsd-decay-samples", "optimizer.lr_wsd_decay_iters"),
    ):
        flag = launch.flags.get(name)
        samples = whole(launch, name)
        if flag is None:
            continue
        if samples is None or not batch:
            carried.leave(flag.line, f"--{name}", "it takes the global batch to count iterations")
        elif name != "lr-wsd-decay-samples":
            carried.put(path, _steps(samples, batch, carried.get("training.rampup_batch_size")))
        elif carried.get("optimizer.lr_decay_style") == "WSD":
            carried.put(path, max(1, samples // batch))  # the last ones, which a growing batch has reached
        else:
            carried.leave(flag.line, f"--{name}", "it belongs to optimizer.lr_decay_style = WSD")


def _steps(samples: int, batch: int, rampup: list[int] | None) -> int:
    if rampup is None or len(rampup) != 3 or 0 in rampup:  # validate says what is wrong with it
        return samples // batch
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=batch, train_iters=MOST_STEPS, rampup_batch_size=tuple(rampup)
    )
    return steps_within(training, samples, MOST_STEPS)


def _profile(launch: Launch, carried: Carried) -> None:
    if flag := launch.flags.get("profile"):
        for path, value in PROFILE.items():
            carried.put(path, value)
        if "use-pytorch-profiler" not in launch.flags:
            carried.leave(flag.line, "nsys", "logging.profile_step_start is for torch's profiler")


def _data(launch: Launch, carried: Carried) -> None:
    names = (
        ("data-path", "datasets"),
        ("train-data-path", "train"),
        ("valid-data-path", "valid"),
        ("test-data-path", "test"),
    )
    for name, key in names:
        flag = launch.flags.get(name)
        if flag is None:
            continue
        if not flag.values or not all(word.known and word.certain for word in flag.values):
            word = next((word for word in flag.values if not (word.known and word.certain)), None)
            why = unknown(word) if word else "it names no data"
            carried.leave(flag.line, f"--{name}", f"{why}; write data.{key}")
            continue
        datasets = _blend(flag.values)
        if datasets is None:
            carried.leave(flag.line, f"--{name}", "it is neither one path nor pairs of weight and path")
        else:
            carried.put(f"data.{key}", datasets)


def _blend(words: tuple[Word, ...]) -> list[dict[str, object]] | None:
    """A blend: one path, paths alone, or pairs of a weight and a path."""
    number = r"\d+\.?\d*([eE][+-]?\d+)?|\.\d+"
    texts = [word.text for word in words]
    if not any(re.fullmatch(number, text) for text in texts):
        return [{"prefix": text} for text in texts]
    if len(texts) % 2 or not all(re.fullmatch(number, text) for text in texts[::2]):
        return None
    return [
        {"prefix": prefix, "weight": float(weight)}
        for weight, prefix in zip(texts[::2], texts[1::2], strict=True)
    ]


def _tokenizer(launch: Launch, carried: Carried) -> None:
    kind = launch.flags.get("tokenizer-type")
    name = kind.value.text if kind and kind.value else "GPT2BPETokenizer"
    line = kind.line if kind else launch.line
    if name == "GPT2BPETokenizer":
        _gpt2(launch, carried)
    elif name == "HuggingFaceTokenizer":
        flag = launch.flags.get("tokenizer-model")
        word = flag.value if flag else None
        if word and word.known and word.certain and word.text.startswith("/"):
            path = word.text if word.text.endswith(".json") else f"{word.text.rstrip('/')}/tokenizer.json"
            carried.put("data.tokenizer", {"kind": "huggingface", "tokenizer_file": path})
        else:
            carried.leave(
                line, f"--tokenizer-type {name}", "data.tokenizer wants the path of a tokenizer.json"
            )
    elif name == "NullTokenizer":
        carried.put("data.tokenizer", {"kind": "bytes"})
        carried.leave(
            line, f"--tokenizer-type {name}", "data.tokenizer is bytes in its place; model.vocab_size counts"
        )
    else:
        carried.leave(line, f"--tokenizer-type {name}", "data.tokenizer knows gpt2, huggingface and bytes")


def _gpt2(launch: Launch, carried: Carried) -> None:
    files: dict[str, str] = {}
    for name, key in (("vocab-file", "vocab_file"), ("merge-file", "merges_file")):
        flag = launch.flags.get(name)
        word = flag.value if flag else None
        if word and word.known and word.certain:
            files[key] = word.text
        elif flag and word:
            carried.leave(flag.line, f"--{name} {word.text}", f"{unknown(word)}; GPT-2's own is used")
    if files.get("merges_file", "").endswith(".json"):
        carried.leave(
            launch.flags["merge-file"].line,
            f"--merge-file {files['merges_file']}",
            "it is a vocabulary; GPT-2's own files are used",
        )
    elif len(files) == 2:
        carried.put("data.tokenizer", {"kind": "gpt2", **files})


def _checkpoints(launch: Launch, carried: Carried) -> None:
    """--load of the directory that is saved to is what the trainer does anyway."""
    flag, saved = launch.flags.get("load"), launch.flags.get("save")
    word = flag.value if flag else None
    _padded_vocabulary(saved, carried)
    if saved and (place := carried.get("checkpoint.save")):
        why = f"checkpoint.save is the script's {place}: the run goes on from what is there, and writes there"
        carried.leave(saved.line, "a checkpoint directory of the run's own", why)
    if flag is None or word is None or (saved and saved.value and saved.value.text == word.text):
        return
    if word.known and word.certain:
        carried.put("checkpoint.load", word.text)
    else:
        carried.leave(flag.line, f"--load {word.text}", unknown(word))


def _padded_vocabulary(saved: Flag | None, carried: Carried) -> None:
    """Megatron-LM's embedding has another size with tensor parallelism, and so have its checkpoints."""
    tokenizer = carried.get("data.tokenizer") or {"kind": "gpt2"}
    size = carried.get("model.vocab_size") or (GPT2_VOCAB_SIZE if tokenizer["kind"] == "gpt2" else None)
    tensor = carried.get("parallelism.tensor_model_parallel_size") or 1
    if saved is None or size is None:
        return
    padded = -(-size // (VOCAB_MULTIPLE * tensor)) * VOCAB_MULTIPLE * tensor
    if padded != pad_vocab_size(size):
        why = f"its embedding has {padded} rows: to go on from it, set model.padded_vocab_size: {padded}"
        carried.leave(saved.line, "a checkpoint of Megatron-LM's", why)
