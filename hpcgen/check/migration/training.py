"""Converts Megatron-LM's command line into sections of a run file: model, parallelism, training, optimizer."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TypeVar

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Flag, Launch
from hpcgen.check.lint.megatron import KEYS, counted_as_layers, virtual_stages
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.data import (
    carry_checkpoints,
    carry_data,
    carry_documents,
    carry_tokenizer,
    list_relative_paths,
)
from hpcgen.check.migration.experts import carry_experts
from hpcgen.check.migration.leftover import Carried, is_sure
from hpcgen.check.migration.model import carry_model
from hpcgen.check.migration.options import carry_without_key, without_effect
from hpcgen.check.migration.values import Flags, carry_as, decides, integer, num_values, shown, why_not
from hpcgen.config.megatron_options import OptionRow, row_of, rows
from trainer.contract.config import (
    BlendConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
    from_dict,
)
from trainer.contract.model.batch_size import steps_within
from trainer.contract.model.pipeline import layout_rows
from trainer.contract.rules import cuda_graphs
from trainer.contract.rules.facts import Facts, World

S = TypeVar("S")
GRAPH_OPTION = "cuda-graph-impl"
CUDA_GRAPHS = KEYS[GRAPH_OPTION]


def carry_training(job: Job, launch: Launch, carried: Carried) -> None:
    """Converts the command line. Every option is carried over, listed or refused."""
    flags = _certain(launch, carried)
    for flag in flags.values():
        row = row_of(flag.name)
        if row and row.takes == "0" and flag.values:
            carried.refuse(flag.line, shown(flag), "it takes no value", *row.keys)
        if not (row and (row.carried_by or row.needs)):
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
    _dependent(launch, flags, carried)
    _virtual_stages_of_layout(carried)
    _constant_rate(flags, carried)
    _mean_loss(flags, carried)
    _warmup(launch, flags, carried)
    carry_graphs(flags, carried)
    _holders(job, launch, carried)
    list_relative_paths(launch, carried)


def _certain(launch: Launch, carried: Carried) -> Flags:
    """The options that are certainly given. Others are listed, or refused if the results depend on them."""
    for flag in launch.flags.values():
        if not flag.word.certain:
            why = "it depends on a condition that is only known in the job"
            if decides(flag.name):
                carried.refuse(flag.line, shown(flag), why, *_keys(flag.name))
            else:
                carried.leave(flag.line, shown(flag), why)
    return {name: flag for name, flag in launch.flags.items() if flag.word.certain}


def _keys(name: str) -> tuple[str, ...]:
    """The keys that correspond to an option."""
    row = row_of(name)
    return row.keys if row else ()


def _carry(flag: Flag, carried: Carried) -> None:
    """Carries over an option whose value needs no conversion."""
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
    for name in () if has_fraction else ("lr-decay-iters", "lr-decay-samples"):
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


def _dependent(launch: Launch, flags: Flags, carried: Carried) -> None:
    """Options that have an effect only together with others, and Megatron-LM's defaults for missing options."""
    for row in rows().values():
        if row.carried_by or not (row.needs or row.default is not None):
            continue
        flag, why = flags.get(row.name), without_effect(row, flags, carried)
        if flag is None:
            if why is None and not _has_value(row, launch, carried):
                carried.put(row.key, row.default)
        elif why is not None:
            carried.leave(flag.line, shown(flag), why)
        elif row.needs:
            _carry(flag, carried)


def _has_value(row: OptionRow, launch: Launch, carried: Carried) -> bool:
    """True if the key of an option has a value, or needs none because its default is also Megatron-LM's."""
    is_unread = row.name == "split" and not carried.get("data.datasets")
    return row.default is None or is_unread or row.name in launch.flags or carried.get(row.key) is not None


def _precision(flags: Flags, carried: Carried) -> None:
    for precision in ("bf16", "fp16"):
        if precision in flags:
            carried.put("training.precision", precision)
    if carried.get("training.precision") is None:
        carried.put("training.precision", "fp32")


def _layout(job: Job, launch: Launch, flags: Flags, carried: Carried) -> None:
    """Parallel sizes, recomputation, and the global batch derived from them."""
    stages = carried.get("parallelism.pipeline_model_parallel_size") or 1
    tensor = carried.get("parallelism.tensor_model_parallel_size") or 1
    if flag := flags.get("recompute-activations"):
        carried.put("training.recompute_granularity", "selective")
    flag = flags.get("sequence-parallel")
    if flag and tensor == 1:
        carried.drop("parallelism.sequence_parallel")
        carried.leave(flag.line, shown(flag), "Megatron-LM disables it if --tensor-model-parallel-size is 1")
    _exchange(flags, carried)
    if flag := flags.get("num-layers-per-virtual-pipeline-stage"):
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
    if (carried.get("parallelism.context_parallel_size") or 1) == 1:
        carried.leave(flag.line, shown(flag), "it only applies with --context-parallel-size")
    elif len(flag.values) > 1:
        carried.leave(flag.line, shown(flag), "the trainer exchanges keys and values alike in all layers")
    else:
        carry_as(KEYS[flag.name], flag, carried)


def _virtual_stages_of_layout(carried: Carried) -> None:
    """The virtual stages of a pipeline layout (arguments.py, validate_args)."""
    layout = carried.get("parallelism.pipeline_model_parallel_layout")
    stages = carried.get("parallelism.pipeline_model_parallel_size") or 1
    if not layout or stages == 1:
        return
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
        if samples is None:
            carried.refuse(flag.line, shown(flag), why_not(path, flag), *_keys(name))
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
    if flag := flags.get("profile"):
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
        takes = _takes(flag.name)
        if takes is not None:
            found += [word for word in flag.values[takes:] if not word.known]
    return found


def _takes(name: str) -> int | None:
    """Number of values that an option takes; None for any number."""
    row = row_of(name)
    if row and row.takes:
        return None if row.takes == "*" else int(row.takes)
    return num_values(KEYS.get(name))


def carry_graphs(flags: Flags, carried: Carried) -> None:
    """Converts --cuda-graph-impl, after all options that it depends on.

    Graphs do not change results, so they are left out where the trainer records none.
    """
    if (flag := flags.get(GRAPH_OPTION)) is None:
        return
    if is_sure(flag.value) and flag.value and flag.value.text == "local":
        carried.leave(flag.line, shown(flag), "the trainer records graphs with transformer_engine")
        return
    carry_as(CUDA_GRAPHS, flag, carried)
    if not carried.is_chosen(CUDA_GRAPHS) and (why := _graph_problem(carried)):
        carried.drop(CUDA_GRAPHS)
        carried.leave(flag.line, shown(flag), why)


def _graph_problem(carried: Carried) -> str:
    """Why the trainer cannot record the layers of this run. Empty if it can, or if a value is missing or invalid."""

    def section(cls: type[S], name: str) -> S:
        values = {field.name: carried.get(f"{name}.{field.name}") for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        return from_dict(cls, {key: value for key, value in values.items() if value is not None}, name)

    try:
        facts = Facts(
            model=section(ModelConfig, "model"),
            parallelism=section(ParallelismConfig, "parallelism"),
            training=section(TrainingConfig, "training"),
            optimizer=OptimizerConfig(lr=1.0),
            data=BlendConfig(reset_attention_mask=bool(carried.get("data.reset_attention_mask"))),
            world=World(path="", count=1, ranks_each=1),
            gpus_per_node=1,
        )
    except ConfigError:
        return ""
    found = next((found for rule in cuda_graphs.RULES for found in rule(facts)), None)
    if found is None:
        return ""
    return f"{'it' if found.path == CUDA_GRAPHS else found.path} {found.reason}"
