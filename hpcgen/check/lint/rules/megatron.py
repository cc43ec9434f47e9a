"""Megatron-LM's command line: unknown options, and values that contradict each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.megatron import (
    NEGATED,
    OPTIONS,
    change,
    counted_as_layers,
    in_options,
    integer,
    knows_layers,
    nearest_option,
    unknown_options,
    virtual_stages,
    word_of,
)
from hpcgen.check.lint.megatron_facts import facts
from hpcgen.check.lint.rule import Hit, rule
from hpcgen.config.megatron_options import in_group, of_kind, rows
from hpcgen.text import one_of
from trainer.contract.problem import Problem
from trainer.contract.rules import (
    batch,
    context_parallel,
    experts,
    latent_attention,
    model,
    parallelism,
    schedule,
)
from trainer.contract.rules import facts as planning
from trainer.contract.rules.facts import divisors

ARGUMENTS = "Megatron-LM, megatron/training/arguments.py"
MAX_MISTAKES = 2
"""Maximum number of unknown options that are reported. With more, the script is for a fork."""
BLACKWELL = ("b200", "gb200", "b300", "gb300")
FSDP = frozenset(row.name for row in in_group("FSDP"))


@rule(
    "megatron-option",
    "error",
    "an option that Megatron-LM does not have",
    source=f"{ARGUMENTS}, v2.0 to core 0.19",
)
def megatron_option(job: Job) -> Iterator[Hit]:
    """argparse ends the program at an unknown option, after the job has waited in the queue.

    Not reported if more than two options are unknown: the script is then for a fork of Megatron-LM.
    """
    for launch in job.megatron:
        if len(unknown_options(launch)) > MAX_MISTAKES or not launch.program.endswith("pretrain_gpt.py"):
            continue
        for name, flag in launch.flags.items():
            row = rows().get(name)
            if row and row.kind == "absent":
                yield Hit.at(flag.line, f"Megatron-LM has no --{name}", row.note)
            elif right := nearest_option(name):
                yield Hit.at(flag.line, f"Megatron-LM has no --{name}", f"did you mean --{right}?")


@rule(
    "megatron-removed-option",
    "note",
    "Megatron-LM has removed an option",
    source=f"{ARGUMENTS}, validate_args",
)
def megatron_removed_option(job: Job) -> Iterator[Hit]:
    """Megatron-LM stops at the option with a message that names its replacement.

    Removed in v2.0: --batch-size, --warmup and --model-parallel-size. Removed in core 0.4: the options of activation
    checkpointing.
    """
    for launch in job.megatron:
        for name, flag in launch.flags.items():
            row = rows().get(name)
            if row and row.kind == "removed":
                since = "core 0.4" if name.startswith("checkpoint-") else "v2.0"
                yield Hit.at(flag.line, f"since {since}, Megatron-LM stops at --{name}", row.note)


def _broken(job: Job, rules: Sequence[planning.Rule]) -> Iterator[tuple[Launch, Hit]]:
    """Violations of planning's rules in each command line, worded with its options."""
    for launch in job.megatron:
        known = facts(job, launch)
        for hit in _hits(launch, known, rules) if known else ():
            yield launch, hit


def _hits(launch: Launch, known: planning.Facts, rules: Sequence[planning.Rule]) -> Iterator[Hit]:
    """At most one hit per option, since one mistake violates several rules."""
    found: dict[str, Problem] = {}
    for check in rules:
        for violation in check(known):
            found.setdefault(violation.path, violation)
    for path, violation in found.items():
        name = OPTIONS.get(path, "")
        line = launch.flags[name].line if name in launch.flags else launch.line
        keys = (path, *violation.about)
        reason, hint = in_options(violation.reason, keys), in_options(violation.hint, keys)
        advice = ", or ".join(filter(None, (" and ".join(map(change, violation.settings)), hint)))
        fix = _fix(_valid_candidates(known, rules, violation), name, path, advice)
        yield Hit.at(line, f"{_subject(launch, path)} {reason}", fix)


def _valid_candidates(
    known: planning.Facts, rules: Sequence[planning.Rule], violation: Problem
) -> list[object]:
    """The candidates that satisfy every rule about the same value."""
    kept = []
    for value in violation.candidates:
        changed = known.with_value(violation.path, value)
        if not any(found.path == violation.path for check in rules for found in check(changed)):
            kept.append(value)
        if len(kept) == violation.offers:
            break
    return kept


def _subject(launch: Launch, path: str) -> str:
    """The option with its value that a violation is about."""
    if name := NEGATED.get(path):
        return f"a run without --{name}"
    if (name := OPTIONS.get(path)) is None:
        return "the job"
    return f"--{name} {_text(launch, name)}".rstrip() if name in launch.flags else f"a run without --{name}"


def _fix(values: Sequence[object], option: str, path: str, advice: str) -> str:
    """The fix: "use --OPTION 1, 2 or 4", "use 3 or 6 nodes, or <advice>"."""
    if any(value is True for value in values):
        return f"add --{option}"
    if negated := NEGATED.get(path):
        return f"add --{negated}, or {advice}"
    found = [value for value in values if value is not None]
    numbers = sorted(value for value in found if isinstance(value, int))
    texts = list(map(str, numbers if len(numbers) == len(found) else found))
    listed = one_of(texts) if texts else ""
    use = f"use --{option} {listed}" if option else f"use {listed} nodes"
    leave = f"remove --{option}" if None in values else ""
    return ", or ".join(filter(None, (use if listed else "", leave, advice))) or "use other values"


def _text(launch: Launch, name: str) -> str:
    word = word_of(launch, name)
    return word.text if word else ""


@rule("model-shape", "error", "the model's sizes contradict each other", source=f"{ARGUMENTS}, validate_args")
def model_shape(job: Job) -> Iterator[Hit]:
    """Heads must divide the hidden size, query groups must divide the heads, and positions must cover the sequence.

    A token cannot have more experts than there are, or than its groups have.
    """
    for _, hit in _broken(job, (*model.RULES, *experts.OF_MODEL)):
        yield hit


_LAYERS = (
    parallelism.pipeline_divides_layers,
    parallelism.uneven_pipeline_has_all_layers,
    parallelism.chunks_divide_stage,
)
# Megatron-LM turns sequence parallelism off without TP; it pads the vocabulary to a multiple of TP.
_SIZES = tuple(
    check for check in parallelism.RULES
    if check not in (
        *_LAYERS,
        parallelism.sequence_parallel_needs_tensor_parallel,
        parallelism.tensor_parallel_divides_vocabulary,
        parallelism.model_parallel_divides_world,
    )
)  # fmt: skip
_EXPERTS = (
    experts.expert_parallel_divides_experts,
    experts.expert_tensor_parallel_divides_experts,
    experts.tensor_parallel_divides_shared_experts,
    experts.expert_layout_divides_world,
    experts.experts_with_tensor_parallel_need_sequence_parallel,
    experts.expert_biases_need_undivided_experts,
)
_LATENT_ATTENTION = (latent_attention.latent_attention_needs_sequence_parallel,)


@rule(
    "parallel-sizes",
    "error",
    "the parallel sizes do not fit",
    source=f"{ARGUMENTS}, validate_args; Megatron-Core, parallel_state.py",
)
def parallel_sizes(job: Job) -> Iterator[Hit]:
    """TP must divide heads and ffn, PP the layers, TP x PP x CP the ranks, and 2 x CP the sequence length.

    EP must divide the experts, and EP x ETP x PP the ranks. Experts and latent
    attention with TP need --sequence-parallel.

    Megatron-LM reports it on every rank, after the job has waited in the queue and the container has started.
    """
    for launch in job.megatron:
        known = facts(job, launch)
        if known is None:
            continue
        knows = knows_layers(launch)
        hits = list(
            _hits(launch, known, (*_SIZES, *_EXPERTS, *_LATENT_ATTENTION, *(_LAYERS if knows else ())))
        )
        hits += _uneven_virtual_stages(launch, known) if knows else ()
        # a wrong size also makes the product wrong
        yield from hits or _hits(launch, known, (parallelism.model_parallel_divides_world,))


def _uneven_virtual_stages(launch: Launch, known: planning.Facts) -> Iterator[Hit]:
    """Checks --num-layers-per-virtual-pipeline-stage. A run file has the number of virtual stages instead."""
    option = "num-layers-per-virtual-pipeline-stage"
    per_stage, layers = integer(launch, option) or 0, integer(launch, "num-layers") or 0
    layers += counted_as_layers(launch)
    stages = known.parallelism.pipeline_model_parallel_size
    if min(per_stage, layers) < 1 or layers % stages or virtual_stages(layers, stages, per_stage):
        return
    each = layers // stages
    candidates = one_of([str(divisor) for divisor in sorted(divisors(each, near=per_stage))])
    yield Hit.at(
        launch.flags[option].line,
        f"--{option} {per_stage} does not divide the layers of a stage, --num-layers / "
        f"--pipeline-model-parallel-size = {layers} / {stages} = {each} ({each} / {per_stage})",
        f"use --{option} {candidates}",
    )


@rule(
    "batch-size",
    "error",
    "the global batch is not a multiple of the microbatches",
    source="Megatron-Core, num_microbatches_calculator.py",
)
def batch_size(job: Job) -> Iterator[Hit]:
    """The global batch must be a multiple of microbatch x DP, and with virtual stages, of microbatch x DP x PP."""
    for launch, hit in _broken(job, batch.RULES):
        # a schedule of batch sizes has other sizes for most of the run
        if not {"rampup-batch-size", "step-batch-size-schedule"} & launch.flags.keys():
            yield hit


@rule(
    "tensor-parallel-across-nodes",
    "warning",
    "every layer waits for the network",
    source="arXiv 2104.04473, section 3.2",
)
def tensor_parallel_across_nodes(job: Job) -> Iterator[Hit]:
    """Tensor parallelism exchanges activations in every layer, so its ranks should share a node's NVLink.

    Only reported for nodes with at least eight GPUs. Nodes with four may share NVLink with others (GB200 NVL72).
    """
    if (job.gpus_per_node or 0) < 8:
        return
    for launch, hit in _broken(job, (context_parallel.tensor_and_context_parallel_stay_in_node,)):
        if (integer(launch, "tensor-model-parallel-size") or 1) > (job.gpus_per_node or 0):
            yield hit


@rule(
    "learning-rate",
    "error",
    "the learning-rate options contradict each other",
    source=f"{ARGUMENTS}, validate_args; Megatron-Core, optimizer_param_scheduler.py",
)
def learning_rate(job: Job) -> Iterator[Hit]:
    """The minimum must not exceed the peak. The warm-up must be given once, and end before the decay."""
    for launch, hit in _broken(job, (schedule.min_lr_is_not_above_lr, schedule.warmup_is_given_once)):
        if "lr" in launch.flags:
            yield hit
    for launch, hit in _broken(job, (schedule.warmup_ends_before_decay,)):
        if "lr-warmup-iters" in launch.flags and {"lr-decay-iters", "train-iters"} & launch.flags.keys():
            yield hit


@rule(
    "decay-beyond-run",
    "warning",
    "the learning rate never decays",
    source="Megatron-Core, optimizer_param_scheduler.py",
)
def decay_beyond_run(job: Job) -> Iterator[Hit]:
    """The learning rate reaches its minimum at --lr-decay-iters. Far beyond the end of the run, it hardly decays."""
    for launch in job.like_megatron:
        decay, iterations = integer(launch, "lr-decay-iters"), integer(launch, "train-iters")
        if decay and iterations and decay > iterations:
            yield Hit.at(
                launch.flags["lr-decay-iters"].line,
                f"the learning rate decays over {decay} iterations, but the run ends after {iterations}",
                f"use --lr-decay-iters {iterations}, or remove it",
            )


@rule(
    "positions-fixed",
    "warning",
    "a longer sequence has no positions",
    source=f"{ARGUMENTS}, validate_args, max_position_embeddings",
)
def positions_fixed(job: Job) -> Iterator[Hit]:
    """The environment can change the sequence length, but not the number of positions."""
    for launch in job.megatron:
        sequence, positions = word_of(launch, "seq-length"), word_of(launch, "max-position-embeddings")
        if sequence and positions and sequence.assumed and positions.known and not positions.assumed:
            yield Hit.at(
                positions.line,
                f"--max-position-embeddings {positions.text} is fixed, but --seq-length is {sequence.source}",
                f"--max-position-embeddings {sequence.source}",
            )


def _names_gpu(job: Job, *models: str) -> bool:
    """True if a line of the script names one of the GPU models."""
    name = re.compile(rf"(?<![a-z0-9])({'|'.join(models)})(?![a-z0-9])", re.IGNORECASE)
    return any(name.search(line) for line in job.script.lines)


@rule("fp16", "note", "fp16 where bf16 is as fast", source="NVIDIA, Train With Mixed Precision, user guide")
def fp16(job: Job) -> Iterator[Hit]:
    """Since the A100, bf16 is as fast as fp16, has the range of fp32, and needs no loss scaling.

    Only reported if the script names such a GPU.
    """
    if not _names_gpu(job, "a100", "h100", "h200", "gh200", *BLACKWELL):
        return
    for launch in job.megatron:
        if "fp16" in launch.flags:
            yield Hit.at(
                launch.flags["fp16"].line,
                "fp16 needs loss scaling; bf16 does not, and is as fast here",
                "--bf16",
            )


@rule(
    "merge-file",
    "error",
    "the merges file is a vocabulary",
    source="Hugging Face, GPT2Tokenizer, merges_file",
)
def merge_file(job: Job) -> Iterator[Hit]:
    """--merge-file expects merges.txt. With vocab.json, the tokenizer reads JSON as merges and yields wrong tokens."""
    for launch in job.megatron:
        merges, vocabulary = word_of(launch, "merge-file"), word_of(launch, "vocab-file")
        if merges is None:
            continue
        same = vocabulary is not None and vocabulary.text == merges.text and not merges.text.startswith("$(")
        if same or merges.text.endswith(".json"):
            yield Hit.at(
                merges.line,
                f"--merge-file names {merges.text.rpartition('/')[2]}, a vocabulary",
                "use the path of merges.txt",
            )


@rule(
    "max-connections",
    "warning",
    "communication waits behind computation",
    source=f"{ARGUMENTS}, validate_args, 23.04 to core 0.19",
)
def max_connections(job: Job) -> Iterator[Hit]:
    """With tensor parallelism, CUDA_DEVICE_MAX_CONNECTIONS=1 schedules communication ahead of computation.

    Since 23.04, Megatron-LM refuses to start without it on GPUs before Blackwell. Not reported: scripts with options
    that this release removed, and scripts that source others.
    """
    exempt = {
        *FSDP, "overlap-moe-expert-parallel-comm", "no-async-tensor-model-parallel-allreduce", "data-impl",
        "DDP-impl", *(row.name for row in of_kind("removed")),
    }  # fmt: skip
    if _names_gpu(job, *BLACKWELL) or any(command.name in ("source", ".") for command in job.script.commands):
        return
    settings = job.script.settings("CUDA_DEVICE_MAX_CONNECTIONS")
    for launch in job.megatron:
        is_split = (integer(launch, "tensor-model-parallel-size") or 1) > 1
        if (
            not is_split
            or exempt & launch.flags.keys()
            or "CUDA_DEVICE_MAX_CONNECTIONS" in launch.environment
        ):
            continue
        if not settings:
            yield Hit.at(
                launch.line,
                "with tensor parallelism, Megatron-LM does not start without CUDA_DEVICE_MAX_CONNECTIONS=1",
                "export CUDA_DEVICE_MAX_CONNECTIONS=1 (not needed on Blackwell)",
            )
        for setting in settings:
            word = setting.value
            if word and word.known and not word.assumed and word.text != "1":
                yield Hit.at(
                    setting.line,
                    f"with tensor parallelism, Megatron-LM does not start with CUDA_DEVICE_MAX_CONNECTIONS={word.text}",
                    "use CUDA_DEVICE_MAX_CONNECTIONS=1 (not needed on Blackwell)",
                )


@rule(
    "activation-offload",
    "warning",
    "gradients can be wrong after each start",
    source="NVIDIA/Megatron-LM, issue 7398; Megatron-Core 0.16 and 0.19, fine_grained_activation_offload.py",
)
def activation_offload(job: Job) -> Iterator[Hit]:
    """With fine-grained offloading, the first backward pass may read a tensor before it has been copied.

    ChunkOffloadHandler.tensor_pop reloads it without waiting for the copy. Later steps load it ahead, and wait.
    """
    for launch in job.megatron:
        if flag := launch.flags.get("fine-grained-activation-offloading"):
            yield Hit.at(
                flag.line,
                "the first step after each start can compute wrong gradients with --fine-grained-activation-offloading",
                "use --recompute-granularity selective with --recompute-modules, or more context-parallel ranks",
            )


@rule("fsdp-connections", "error", "FSDP cannot overlap", source=f"{ARGUMENTS}, validate_args, core 0.16")
def fsdp_connections(job: Job) -> Iterator[Hit]:
    """With one connection, FSDP cannot overlap communication with computation. Megatron-LM refuses to start."""
    for launch in job.megatron:
        certain = any(launch.flags[name].word.certain for name in FSDP & launch.flags.keys())
        setting = job.exported("CUDA_DEVICE_MAX_CONNECTIONS")
        if certain and setting and job.exported_text("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            yield Hit.at(
                setting.line, "Megatron-LM refuses CUDA_DEVICE_MAX_CONNECTIONS=1 with FSDP", "remove it"
            )
