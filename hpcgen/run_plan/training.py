"""The trainer's resolved configuration, and the problems of the run."""

from __future__ import annotations

import dataclasses
import math

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.document import Document, is_preset
from hpcgen.config.loader import Run
from hpcgen.config.presets import PRESETS
from hpcgen.config.profiles import is_set_by_site
from hpcgen.config.run import RunConfig
from hpcgen.errors import HpcgenError, Problem
from hpcgen.planning import checkpointing
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.functions import function_problems
from hpcgen.planning.paths import chat_of, trainer_data
from hpcgen.planning.repairs import check
from hpcgen.planning.request import Setting, make_allocation, place_of
from hpcgen.planning.resources import may_be_slow, recomputation_is_needed
from hpcgen.run_plan.time_limit import time_problems, timing
from hpcgen.stages.evaluate import EVALUATE
from hpcgen.stages.train import TRAIN
from hpcgen.text import duration, size_text
from trainer.contract.config import AnswersConfig, BlendConfig, ModelConfig, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.model.layout import Layout
from trainer.contract.record import record
from trainer.contract.rules.facts import Facts, World

MUCH_SPACE_BYTES = 10e12
MUCH_LARGER = 1.25
"""Maximum ratio of model.vocab_size to the tokenizer's ids without a warning."""
LARGE_CHECKPOINT_GB = 100
WANDB_KEY = "WANDB_API_KEY"


@record(kw_only=True)
class Training:
    """The planned training. With errors, `trainer` and `layout` are None."""

    trainer: TrainerConfig | None = None
    layout: Layout | None = None
    signal_lead_s: int = 0
    errors: tuple[Problem, ...] = ()
    warnings: tuple[Problem, ...] = ()


def plan_training(run: Run, config: RunConfig, *, must_fit: bool) -> Training:
    """Checks all rules and resolves defaults. The paths in `config` must be absolute. With `must_fit`, an estimate of
    more memory than the devices have is an error.
    """
    allocation = make_allocation(TRAIN, config, run.cluster, run.node_type)
    facts, unknown = training_facts(run, config, allocation)
    nodes = place_of(TRAIN, "nodes", config, run.cluster)
    errors, warnings = check(facts, must_fit=must_fit)
    function_errors, function_warnings = function_problems(config)
    errors = [*(_in_file(problem, nodes) for problem in errors), *unknown, *function_errors]
    warnings = [_in_file(problem, nodes) for problem in warnings] + function_warnings
    if errors:
        return Training(errors=tuple(errors), warnings=tuple(warnings))
    warnings += recomputation_is_needed(facts)
    warnings = _with_faster_layouts(run, facts, allocation, warnings)
    return _planned(run, config, facts, allocation, warnings)


def _with_faster_layouts(
    run: Run, facts: Facts, allocation: Allocation, warnings: list[Problem]
) -> list[Problem]:
    """The warnings, in which those about speed name a faster layout if the time of a step can be predicted."""
    nvlink = run.node_type.nvlink
    nvlink_gb_s = nvlink.bandwidth_gb_s if nvlink else None
    peak_tflops = run.node_type.peak_tflops.get(facts.training.precision_of_layers)
    if not may_be_slow(facts, peak_tflops, nvlink_gb_s):
        return warnings
    from hpcgen.planning.layouts.advice import with_faster_layouts  # predictions, which few runs need

    return with_faster_layouts(run, facts, allocation, warnings, nvlink_gb_s)


def training_facts(run: Run, config: RunConfig, allocation: Allocation) -> tuple[Facts, tuple[Problem, ...]]:
    """The facts that the rules need, and the problems of those that are unknown. The paths in `config` are absolute."""
    model, vocabulary_problems = _with_vocabulary(config)
    data, eod_problems = _with_end_of_document(config)
    facts = Facts(
        model=model,
        parallelism=config.parallelism,
        training=config.training,
        optimizer=config.optimizer,
        data=data,
        checkpoint=config.checkpoint,
        logging=config.logging,
        lora=config.lora,
        evaluation=config.evaluation,
        answers=config.answers,
        world=World(
            path=place_of(TRAIN, "nodes", config, run.cluster).path,
            count=allocation.nodes,
            ranks_each=allocation.ntasks_per_node,
        ),
        evaluation_world=_evaluation_world(run, config),
        gpus_per_node=allocation.ntasks_per_node,
        nvlink_nodes=allocation.nvlink_nodes,
        device=run.node_type.device,
        device_memory_gib=run.node_type.gpu_memory_gib,
        set_by_user=_set_by_user(run.document),
    )
    return facts, (*vocabulary_problems, *eod_problems)


def _planned(
    run: Run, config: RunConfig, facts: Facts, allocation: Allocation, warnings: list[Problem]
) -> Training:
    """The training of a run without mistakes."""
    layout = facts.layout
    # an unknown vocabulary size means that the tokenizer is invalid; plan() reports it
    if layout is None or facts.resolved_model.padded_vocab_size is None:
        return Training(warnings=tuple(warnings))
    trainer = _trainer(run, config, facts, allocation)
    times = timing(run, trainer, allocation)
    time_errors, time_warnings = time_problems(times, run, config, allocation)
    return Training(
        trainer=trainer,
        layout=layout,
        signal_lead_s=times.lead_s,
        errors=tuple(time_errors),
        warnings=(
            *warnings,
            *time_warnings,
            *_batch_warning(config),
            *_vocabulary_warning(config, facts.model),
            *_fp8_warning(run, trainer),
            *_space_warning(trainer),
            *_storage_warning(run, trainer),
            *_segment_warning(run, config, allocation),
            *_wandb_warning(run, config),
        ),
    )


def _evaluation_world(run: Run, config: RunConfig) -> World:
    allocation = make_allocation(EVALUATE, config, run.cluster, run.node_type)
    path = place_of(EVALUATE, "nodes", config, run.cluster).path
    return World(path=path, count=allocation.nodes, ranks_each=allocation.ntasks_per_node)


def _set_by_user(document: Document) -> tuple[str, ...]:
    """The keys that --set sets, then those that the run file sets."""
    own = [(path, where) for path, where in document.origins.items() if not is_preset(where)]
    return tuple(path for path, _ in sorted(own, key=lambda item: not item[1].startswith("--set")))


def _in_file(problem: Problem, nodes: Setting) -> Problem:
    """Points a problem with the number of nodes at the file that sets it. The rules know only the run file."""
    return dataclasses.replace(problem, file=nodes.file) if problem.path == nodes.path else problem


def _trainer(run: Run, config: RunConfig, facts: Facts, allocation: Allocation) -> TrainerConfig:
    trainer = TrainerConfig(
        name=config.name,
        run_dir=config.paths.run_dir,
        device=run.node_type.device,
        world_size=allocation.num_tasks,
        peak_tflops=run.node_type.peak_tflops.get(config.training.precision_of_layers),
        model=facts.model,
        parallelism=config.parallelism,
        training=config.training,
        optimizer=config.optimizer,
        data=facts.data,
        checkpoint=config.checkpoint,
        logging=config.logging,
        answers=_answers(config),
        lora=config.lora,
        evaluation_every=config.evaluation.every,
    )
    return resolve(trainer)


def _answers(config: RunConfig) -> AnswersConfig | None:
    """The prompts with the run's tokenizer; None if there are none."""
    if config.answers.prompts is None:
        return None
    tokenizer, chat = config.data.tokenizer, chat_of(config)
    return AnswersConfig(
        **{field.name: getattr(config.answers, field.name) for field in dataclasses.fields(config.answers)},
        tokenizer=tokenizers.tokenizer_name(tokenizer),
        eod_token=tokenizer.eod_token,
        chat_template_file=chat.chat_template_file,
        chat_template=chat.chat_template,
        chat_date=chat.date,
    )


def _with_vocabulary(config: RunConfig) -> tuple[ModelConfig, list[Problem]]:
    """The model with its vocabulary size, from the tokenizer or from the run file, which must cover all its ids."""
    model, asked = config.model, config.model.vocab_size
    if any(tokenizers.problems(config.data.tokenizer)):
        return model, []  # already reported
    if asked is not None and (config.data.mock or config.data.dataset):
        return model, []  # the samples do not come from a tokenizer
    try:
        known = tokenizers.vocab_size(config.data.tokenizer)
    except HpcgenError as error:
        if asked is not None:
            return model, []
        return model, [_unknown("model.vocab_size", error)]
    if asked is not None and asked < known:
        reason = f"is less than the {known} ids of data.tokenizer ({config.data.tokenizer.kind})"
        hint = f"set data.tokenizer to the model's tokenizer, or use at least {known}"
        return model, [Problem("model.vocab_size", reason, hint, about=("data.tokenizer",))]
    return dataclasses.replace(model, vocab_size=asked or known), []


def _unknown(key: str, error: HpcgenError) -> Problem:
    """The problem of a key whose value would come from the tokenizer, which cannot be read."""
    mistake = error.mistakes[0]
    hint = ", or ".join(filter(None, (mistake.hint, f"set {key}")))
    return Problem(
        key, f"cannot be taken from data.tokenizer: {mistake.sentence}", hint, about=("data.tokenizer",)
    )


def _with_end_of_document(config: RunConfig) -> tuple[BlendConfig, list[Problem]]:
    """The samples with the ID of the tokenizer's end-of-document token, if a key needs it."""
    data = trainer_data(config)
    if not data.needs_eod or data.mock or any(tokenizers.problems(config.data.tokenizer)):
        return data, []
    is_own = config.data.corpus is not None and not (
        config.data.datasets or config.data.train or config.data.dataset
    )
    if data.eod_id is not None and not is_own:
        return data, []
    try:
        known = tokenizers.eod_id(config.data.tokenizer)
    except HpcgenError as error:
        if data.eod_id is not None:
            return data, []
        return data, [_unknown("data.eod_id", error)]
    if data.eod_id not in (None, known):
        reason = (
            f"differs from the token {known} of data.tokenizer, with which the documents of data.corpus end"
        )
        return data, [Problem("data.eod_id", reason, "remove it", about=("data.tokenizer", "data.corpus"))]
    return dataclasses.replace(data, eod_id=known), []


def _vocabulary_warning(config: RunConfig, model: ModelConfig) -> list[Problem]:
    """Warns about a vocabulary far larger than the tokenizer's, such as a Llama 3 preset with GPT-2's tokenizer.

    A few more rows than ids are normal: 50,257 ids are padded to 50,304 rows, and tokenizers reserve ids.
    """
    asked = config.model.vocab_size
    if (
        asked is None
        or config.data.mock
        or config.data.dataset
        or any(tokenizers.problems(config.data.tokenizer))
    ):
        return []
    try:
        known = tokenizers.vocab_size(config.data.tokenizer)
    except HpcgenError:
        return []
    if asked <= MUCH_LARGER * known:
        return []
    rows = (asked - known) * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    reason = (
        f"is much larger than the {known:,} ids of data.tokenizer ({config.data.tokenizer.kind}). "
        f"{rows:,} parameters would never be used"
    )
    hint = f"set data.tokenizer to the model's tokenizer, or set vocab_size to {known}"
    return [Problem("model.vocab_size", reason, hint, about=("data.tokenizer",))]


def _batch_warning(config: RunConfig) -> list[Problem]:
    if config.preset is None:
        return []
    usual = PRESETS[config.preset].sections["training"]["global_batch_size"]
    if config.training.global_batch_size <= 2 * usual:
        return []
    reason = f"is more than twice that of preset {config.preset} ({usual}), so each token contributes less to training"
    return [Problem("training.global_batch_size", reason)]


def _space_warning(trainer: TrainerConfig) -> list[Problem]:
    """Warns if all checkpoints are kept and need much space. The summary of `validate` has the amount."""
    # half of a slow step is a typical one: enough to decide whether to warn
    step_s = checkpointing.slow_step_s(trainer) / 2
    saves = checkpointing.num_saves(trainer.checkpoint, trainer.training.train_iters, step_s)
    size = checkpointing.checkpoint_bytes(trainer)
    if trainer.checkpoint.keep_last is not None or saves * size < MUCH_SPACE_BYTES:
        return []
    reason = f"keeps every checkpoint of the run, {size_text(size)} each"
    return [Problem("checkpoint.keep_last", reason, "set the number of newest checkpoints to keep")]


def _fp8_warning(run: Run, trainer: TrainerConfig) -> list[Problem]:
    if trainer.training.fp8 is None or "fp8" in run.node_type.peak_tflops:
        return []
    reason = f"may not be supported by the GPUs: peak_tflops of node type {run.cluster.node_type} has no fp8"
    hint = "set it to null for GPUs before Hopper, such as A100, or add the peak to the node type"
    return [Problem("training.fp8", reason, hint)]


def _wandb_warning(run: Run, config: RunConfig) -> list[Problem]:
    """Warns about Weights & Biases without its key. The trainer then logs offline."""
    if config.logging.wandb_project is None or WANDB_KEY in (*config.secrets, *run.cluster.secrets):
        return []
    reason = f"will be logged offline, because secrets does not contain {WANDB_KEY}"
    hint = f"add {WANDB_KEY} to secrets and export it where you submit, or upload later with wandb sync"
    return [Problem("logging.wandb_project", reason, hint)]


def _segment_warning(run: Run, config: RunConfig, allocation: Allocation) -> list[Problem]:
    """Warns about groups of ranks that are meant for NVLink between nodes, if Slurm may place their nodes anywhere."""
    axes = config.parallelism
    group = max(
        axes.tensor_model_parallel_size * axes.context_parallel_size,
        expert_tensor_parallel_size(axes) * axes.expert_model_parallel_size,
    )
    is_spread = group > allocation.ntasks_per_node and allocation.nvlink_nodes > 1
    has_option = any(option.startswith("--segment=") for option in allocation.settings.extra_directives or ())
    if not is_spread or allocation.segment or has_option:
        return []
    reason = (
        f"is not set. Groups of {group} ranks communicate over NVLink, but Slurm may place their nodes in several "
        "NVLink domains"
    )
    hint = (
        f"set it to at most {allocation.nvlink_nodes}, the domain_nodes of node type {run.cluster.node_type}"
    )
    return [place_of(TRAIN, "segment", config, run.cluster).problem(reason, hint)]


def _storage_warning(run: Run, trainer: TrainerConfig) -> list[Problem]:
    """Warns about a large checkpoint if the storage bandwidth, on which its timing depends, was not measured."""
    size_gb = checkpointing.checkpoint_bytes(trainer) / 1e9
    write_gb_s = run.cluster.storage_write_gb_s
    is_measured = write_gb_s is not None and is_set_by_site(run.cluster_document, "storage_write_gb_s")
    if size_gb < LARGE_CHECKPOINT_GB or is_measured:
        return []
    takes = duration(math.ceil(checkpointing.save_time_s(trainer, write_gb_s)))
    reason = (
        f"was not measured on your storage. It is assumed that saving {size_gb:,.0f} GB takes {takes}, "
        f"at {checkpointing.save_gb_s(trainer, write_gb_s):g} GB/s"
    )
    hint = "set the measured bandwidth in your profile. If it is lower, the time limit cuts off the last checkpoint"
    return [Problem("storage_write_gb_s", reason, hint, "cluster")]
