"""Converts Megatron-LM's command line into sections of a run file: model, parallelism, training, optimizer."""

from __future__ import annotations

import contextlib

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Flag, Launch
from hpcgen.check.lint.megatron import (
    KEYS,
    LATENT_WIDTHS,
    counted_as_layers,
    virtual_stages,
)
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.data import carry_checkpoints, carry_data, carry_tokenizer, list_relative_paths
from hpcgen.check.migration.documents import carry_documents
from hpcgen.check.migration.experts import COUNT, carry_experts
from hpcgen.check.migration.graphs import CUDA_GRAPH_IMPL, carry_graphs
from hpcgen.check.migration.leftover import Carried
from hpcgen.check.migration.model import carry_model
from hpcgen.check.migration.options import (
    EXPERT_OPTIONS,
    REPLACED,
    SPECIAL_KEYS,
    WITHOUT_VALUE,
    decides,
)
from hpcgen.check.migration.values import Flags, carry_as, integer, num_values, shown, why_not
from hpcgen.check.migration.without_key import carry_without_key
from trainer.contract.config import TrainingConfig
from trainer.contract.model.batch_size import steps_within
from trainer.contract.model.pipeline import layout_rows

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
"""Megatron-LM's defaults (arguments.py) that differ from a run file's. They are written to the run file."""

DELAYED_SCALING: dict[str, object] = {
    "training.fp8_recipe": "delayed",
    "training.fp8_amax_history_len": 1,
    "training.fp8_amax_compute_algo": "most_recent",
}
"""Megatron-LM's defaults for FP8. The recipe is first, because the others depend on it."""

PROFILE: dict[str, object] = {"logging.profile_step_start": 10, "logging.profile_step_end": 12}
"""Megatron-LM's defaults for --profile."""

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
    "recompute-modules": ("training.recompute_granularity", "selective"),
    **dict.fromkeys(("recompute-method", "recompute-num-layers"), ("training.recompute_granularity", "full")),
    "hierarchical-context-parallel-sizes": ("parallelism.cp_comm_type", "a2a+p2p"),
    "mtp-loss-scaling-factor": ("model.mtp_num_layers", None),
    "rotary-base": ("model.position_embedding_type", "rope"),
}
"""Options that are only read, and only allowed in a run file, if another key has this value (None: any)."""

EXCLUDED_BY = {
    **dict.fromkeys(
        ("initial-loss-scale", "min-loss-scale", "loss-scale-window", "hysteresis"), "optimizer.loss_scale"
    ),
    "cross-entropy-fusion-impl": "training.deterministic_mode",
}
"""Options without effect if another key is set. A run file would refuse both."""

UNREAD_WITHOUT_PIPELINE = frozenset((
    "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split", "pipeline-model-parallel-layout",
))  # fmt: skip
"""Options that Megatron-LM accepts with a single pipeline stage, where they have no effect."""

LISTS = frozenset(("data-path", "train-data-path", "valid-data-path", "test-data-path"))

SPECIAL = frozenset((
    *SPECIAL_KEYS, COUNT, *LATENT_WIDTHS, "load", "cp-comm-type", "profile", "use-pytorch-profiler",
    "recompute-activations", CUDA_GRAPH_IMPL,
))  # fmt: skip
"""Options that are converted by their own functions."""


def carry_training(job: Job, launch: Launch, carried: Carried) -> None:
    """Converts the command line. Every option is carried over, listed or refused."""
    flags = _certain(launch, carried)
    for name in sorted(WITHOUT_VALUE & flags.keys()):
        if flags[name].values:
            carried.refuse(flags[name].line, shown(flags[name]), "it takes no value", *_keys(name))
    for flag in flags.values():
        is_special = flag.name in BELONGS_TO or flag.name in SPECIAL or EXPERT_OPTIONS.match(flag.name)
        if not is_special:
            _carry(flag, carried)
    _precision(flags, carried)
    carry_model(flags, carried)
    carry_experts(flags, carried)
    _layout(job, launch, flags, carried)
    carry_data(flags, carried)
    carry_documents(flags, carried)
    carry_tokenizer(launch, flags, carried)
    carry_checkpoints(flags, carried)
    _profile(flags, carried)
    _schedule(flags, carried)
    _belonging(flags, carried)
    _constant_rate(flags, carried)
    _mean_loss(flags, carried)
    for path, value in DEFAULTS.items():
        is_given = carried.get(path) is not None or any(KEYS.get(name) == path for name in launch.flags)
        is_unread = (path == "data.split" and not carried.get("data.datasets")) or (
            path == "optimizer.min_lr" and carried.get("optimizer.lr_decay_style") == "constant"
        )
        if not is_given and not is_unread:
            carried.put(path, value)
    _warmup(launch, flags, carried)
    carry_graphs(flags, carried)
    _holders(job, launch, carried)
    list_relative_paths(launch, carried)
    for flag in launch.flags.values():
        if flag.name not in carried.seen:
            carried.refuse(flag.line, shown(flag), "nothing reads it here", *_keys(flag.name))


def _certain(launch: Launch, carried: Carried) -> Flags:
    """The options that are certainly given. Others are listed, or refused if the results depend on them."""
    for flag in launch.flags.values():
        if not flag.word.certain:
            carried.seen.add(flag.name)
            why = "it depends on a condition that is only known in the job"
            if decides(flag.name, KEYS.get(flag.name)):
                carried.refuse(flag.line, shown(flag), why, *_keys(flag.name))
            else:
                carried.leave(flag.line, shown(flag), why)
    return {name: flag for name, flag in launch.flags.items() if flag.word.certain}


def _keys(name: str) -> tuple[str, ...]:
    """The keys that correspond to an option."""
    key = KEYS.get(name) or REPLACED.get(name)
    return SPECIAL_KEYS.get(name) or ((key,) if key else ())


def _carry(flag: Flag, carried: Carried) -> None:
    """Carries over an option whose value needs no conversion."""
    carried.seen.add(flag.name)
    path = KEYS.get(flag.name)
    if path is None:
        carry_without_key(flag, carried)
    else:
        carry_as(path, flag, carried)


def _warmup(launch: Launch, flags: Flags, carried: Carried) -> None:
    """Megatron-LM's default is no warm-up, in which case a run file has no value to begin with.

    --lr-warmup-iters 0 is allowed next to --lr-warmup-fraction, which is then used.
    """
    key, fraction, init = (f"optimizer.lr_warmup_{name}" for name in ("iters", "fraction", "init"))
    given = [name for name in ("lr-warmup-iters", "lr-warmup-samples") if name in launch.flags]
    if not (
        given or "lr-warmup-fraction" in launch.flags or carried.is_chosen(key) or carried.is_chosen(fraction)
    ):
        carried.put(key, 0)
    if carried.get(key) != 0:
        return
    if carried.get(fraction) is not None:
        carried.drop(key)
        for name in given:
            flag = launch.flags[name]
            carried.leave(flag.line, shown(flag), "0 leaves the warm-up to --lr-warmup-fraction")
    elif unused := flags.get("lr-warmup-init"):
        carried.drop(init)
        carried.leave(unused.line, shown(unused), "it has no effect without a warm-up")


def _constant_rate(flags: Flags, carried: Carried) -> None:
    """The end of a decay, which a constant rate does not have."""
    if carried.get("optimizer.lr_decay_style") != "constant":
        return
    has_fraction = carried.get("optimizer.lr_warmup_fraction") is not None
    for name in ("min-lr", *(() if has_fraction else ("lr-decay-iters", "lr-decay-samples"))):
        if flag := flags.get(name):
            carried.drop(_keys(name)[0])
            carried.leave(flag.line, shown(flag), "it has no effect with optimizer.lr_decay_style = constant")


def _mean_loss(flags: Flags, carried: Carried) -> None:
    """The weights of tokens in the loss, which differ if microbatches have different numbers of tokens that count."""
    masked = flags.get("eod-mask-loss")
    if masked is not None and "calculate-per-token-loss" not in flags:
        why = (
            "the trainer averages over the tokens of the global batch, as Megatron-LM does with "
            "--calculate-per-token-loss, and not over the means of microbatches"
        )
        carried.leave(masked.line, "the mean of the loss", why)


def _belonging(flags: Flags, carried: Carried) -> None:
    """Options that depend on other keys, and Megatron-LM's defaults for those that are not given."""
    defaults = {**DELAYED_SCALING} if carried.get("training.fp8") else {}
    for name, (path, value) in BELONGS_TO.items():
        is_read = carried.get(path) is not None if value is None else carried.get(path) == value
        flag = flags.get(name)
        if flag is None:
            if is_read and KEYS[name] in defaults:
                carried.put(KEYS[name], defaults[KEYS[name]])
        elif is_read:
            _carry(flag, carried)
        else:
            carried.seen.add(name)
            carried.leave(
                flag.line, shown(flag), f"it only applies with {path}{f' = {value}' if value else ''}"
            )
    for name, path in EXCLUDED_BY.items():
        if (flag := flags.get(name)) and carried.get(path):
            carried.drop(KEYS[name])
            carried.leave(flag.line, shown(flag), f"it has no effect with {path}")


def _precision(flags: Flags, carried: Carried) -> None:
    for precision in ("bf16", "fp16"):
        if precision in flags:
            carried.seen.add(precision)
            carried.put("training.precision", precision)


def _layout(job: Job, launch: Launch, flags: Flags, carried: Carried) -> None:
    """Parallel sizes, recomputation, and the global batch derived from them."""
    stages = carried.get("parallelism.pipeline_model_parallel_size") or 1
    tensor = carried.get("parallelism.tensor_model_parallel_size") or 1
    if flag := flags.get("recompute-activations"):
        carried.seen.add(flag.name)
        carried.put("training.recompute_granularity", "selective")
    flag = flags.get("sequence-parallel")
    if flag and tensor == 1:
        carried.drop("parallelism.sequence_parallel")
        carried.leave(flag.line, shown(flag), "Megatron-LM disables it if --tensor-model-parallel-size is 1")
    _exchange(flags, carried)
    if stages == 1:
        for name in UNREAD_WITHOUT_PIPELINE & flags.keys():
            carried.drop(KEYS[name])
            carried.leave(flags[name].line, shown(flags[name]), "it has no effect without a pipeline")
    elif layout := carried.get("parallelism.pipeline_model_parallel_layout"):
        _virtual_stages_of(layout, stages, carried)
    if flag := flags.get("num-layers-per-virtual-pipeline-stage"):
        carried.seen.add(flag.name)
        key = "parallelism.virtual_pipeline_model_parallel_size"
        per_stage, layers = integer(flags, flag.name), carried.get("model.num_layers")
        counted = counted_as_layers(launch)
        if per_stage and layers and (chunks := virtual_stages(layers + counted, stages, per_stage)):
            carried.put(key, chunks)
        else:
            why = "it does not divide the layers of a stage" if per_stage else why_not(key, flag)
            carried.refuse(flag.line, shown(flag), why, key)
    world, micro_batch = job.world_size(launch), carried.get("training.micro_batch_size")
    if "global-batch-size" not in launch.flags and world and micro_batch:
        model_parallel = tensor * stages * (carried.get("parallelism.context_parallel_size") or 1)
        replicas, rest = divmod(world[0] * world[1], model_parallel)
        if replicas and not rest:
            carried.put("training.global_batch_size", micro_batch * replicas)


def _exchange(flags: Flags, carried: Carried) -> None:
    """--cp-comm-type, which takes one value for all layers or one for each layer."""
    if (flag := flags.get("cp-comm-type")) is None:
        return
    carried.seen.add(flag.name)
    if (carried.get("parallelism.context_parallel_size") or 1) == 1:
        carried.leave(flag.line, shown(flag), "it only applies with --context-parallel-size")
    elif len(flag.values) > 1:
        carried.leave(flag.line, shown(flag), "the trainer exchanges keys and values alike in all layers")
    else:
        carry_as(KEYS[flag.name], flag, carried)


def _virtual_stages_of(layout: str, stages: int, carried: Carried) -> None:
    """The virtual stages of a pipeline layout (arguments.py, validate_args)."""
    with contextlib.suppress(ValueError):  # too long; the rules report it
        if (chunks := len(layout_rows(layout)) // stages) > 1:
            carried.put("parallelism.virtual_pipeline_model_parallel_size", chunks)


def _schedule(flags: Flags, carried: Carried) -> None:
    """Converts lengths in samples to iterations."""
    batch, rampup = carried.get("training.global_batch_size"), carried.get("training.rampup_batch_size")
    for name, path in (
        ("train-samples", "training.train_iters"),
        ("lr-decay-samples", "optimizer.lr_decay_iters"),
        ("lr-warmup-samples", "optimizer.lr_warmup_iters"),
        ("lr-wsd-decay-samples", "optimizer.lr_wsd_decay_iters"),
    ):
        flag, samples = flags.get(name), integer(flags, name)
        if flag is None:
            continue
        carried.seen.add(name)
        if samples is None:
            carried.refuse(flag.line, shown(flag), why_not(path, flag), *SPECIAL_KEYS[name])
        elif not batch:
            carried.refuse(
                flag.line,
                shown(flag),
                "its conversion to iterations needs the global batch size",
                "training.global_batch_size",
            )
        elif name != "lr-wsd-decay-samples":
            carried.put(path, _steps(samples, batch, rampup))
        elif carried.get("optimizer.lr_decay_style") == "WSD":
            carried.put(path, max(1, samples // batch))  # the last iterations, after the ramp-up
        else:
            carried.leave(flag.line, shown(flag), "it only applies with optimizer.lr_decay_style = WSD")
    if (
        (flag := flags.get("rampup-batch-size"))
        and rampup
        and not carried.is_chosen("training.rampup_batch_size")
    ):
        why = (
            "during the ramp-up, the learning rate follows steps, but Megatron-LM's follows samples; "
            f"{list(rampup)} accepts that, and null disables the ramp-up"
        )
        carried.refuse(flag.line, shown(flag), why, "training.rampup_batch_size")


def _steps(samples: int, batch: int, rampup: list[int] | None) -> int:
    if rampup is None or len(rampup) != 3 or 0 in rampup:  # `validate` reports the mistake
        return samples // batch
    training = TrainingConfig(
        micro_batch_size=1, global_batch_size=batch, train_iters=1, rampup_batch_size=tuple(rampup)
    )
    return steps_within(training, samples, limit=samples)


def _profile(flags: Flags, carried: Carried) -> None:
    carried.seen |= {"profile", "use-pytorch-profiler"} & flags.keys()
    if flag := flags.get("profile"):
        for path, value in PROFILE.items():
            carried.put(path, value)
        if "use-pytorch-profiler" not in flags:
            carried.leave(flag.line, "nsys", "logging.profile_step_start uses torch's profiler")
    elif flag := flags.get("use-pytorch-profiler"):
        carried.leave(flag.line, shown(flag), "it only applies with --profile")


def _holders(job: Job, launch: Launch, carried: Carried) -> None:
    """Words that may contain options: taken as empty if set outside the script, otherwise refused."""
    assigned = {assignment.name for assignment in job.script.assignments}
    for word in _may_hold_options(launch):
        if word.variables and not assigned.intersection(word.variables) and "(" not in word.text:
            why = "it is set outside the script, and is assumed to be empty"
            carried.leave(word.line, word.text, why)
        else:
            why = "its options are only known in the job; write them into a copy of the script"
            carried.refuse(word.line, word.text if word.certain else word.source, why)


def _may_hold_options(launch: Launch) -> list[Word]:
    """Unknown words that are not values of an option."""
    found = list(launch.holders)
    for word in launch.arguments:
        if word.text.startswith("--"):
            break
        if not word.known and word not in found:
            found.append(word)
    for flag in launch.flags.values():
        takes = 0 if flag.name in WITHOUT_VALUE else num_values(KEYS.get(flag.name))
        takes = None if flag.name in LISTS else takes
        if takes is not None:
            found += [word for word in flag.values[takes:] if not word.known]
    return found
