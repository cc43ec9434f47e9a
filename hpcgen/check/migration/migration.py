"""Converts a batch script into the sections of a run file, and reports what could not be carried over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from hpcgen.check.lint.job import Job
from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.megatron import OPTIONS
from hpcgen.check.lint.reader import read
from hpcgen.check.migration.account import (
    DIRECTORY,
    changes_of_directory,
    is_body,
    list_unclaimed,
    shown_words,
)
from hpcgen.check.migration.commands import list_commands, list_contexts, list_streams
from hpcgen.check.migration.data import DATA_KEYS
from hpcgen.check.migration.environment import carry_environment
from hpcgen.check.migration.leftover import Carried, Leftover, Sections
from hpcgen.check.migration.program import carry_program, work_of
from hpcgen.check.migration.resources import (
    carry_container,
    carry_directives,
    claim_usual_options,
    layout_of,
)
from hpcgen.check.migration.training import carry_training
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.fields import Name, constraint_problems
from hpcgen.config.node_type import NodeType
from hpcgen.errors import ConfigErrors, FilePlace, HpcgenError, Problem
from hpcgen.text import printable
from trainer.contract.config import ParallelismConfig
from trainer.contract.model.layout import fewest_ranks

NEEDED = (
    "model.num_layers", "model.hidden_size", "model.num_attention_heads", "model.seq_length",
    "training.micro_batch_size", "training.global_batch_size", "training.train_iters", "optimizer.lr",
)  # fmt: skip
"""Required keys of a run file without a sensible default."""

EXAMPLES = {
    "data.datasets": "data.datasets=[{prefix: PATH}]",
    "data.train": "data.train=[{prefix: PATH}]",
    "data.valid": "data.valid=[{prefix: PATH}]",
    "data.test": "data.test=[{prefix: PATH}]",
    "data.tokenizer.kind": "data.tokenizer.kind=gpt2",
    "data.tokenizer": "data.tokenizer={kind: huggingface, tokenizer_file: PATH}",
}
"""Keys whose value is not a single word -> how to set one with --set."""

PARALLEL_SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip

TIME = "1-00:00:00"


class Refusal(ConfigErrors):
    """Settings that affect the results and cannot be carried over, with everything that is only listed."""

    def __init__(self, mistakes: list[Problem], listed: tuple[Leftover, ...]) -> None:
        super().__init__(mistakes)
        self.listed = listed


@dataclass(frozen=True, kw_only=True)
class Migration:
    """The result of converting a script."""

    name: str | None
    """The job's name, if it is a valid name of a run."""
    sections: Sections
    """Sections of the run file, without its name, cluster and paths."""
    leftovers: tuple[Leftover, ...]
    """Parts of the script that are not in the sections, in the order of the script."""
    usual: tuple[str, ...] = ()
    """Options that request what the trainer does by default."""
    without_effect: tuple[str, ...] = ()
    """Options without a key that do not affect the results."""
    own: tuple[str, ...] = ()
    """Parts that hpcgen's script sets for itself in any case."""


def migrate(
    text: str,
    path: str,
    cluster: ClusterConfig,
    node_type: NodeType,
    chosen: Mapping[str, Any] = MappingProxyType({}),
    *,
    as_program: bool = False,
) -> Migration:
    """Converts a script. Values in `chosen` override the script's.

    Megatron-LM's training of a GPT becomes a run of hpcgen's trainer, unless `as_program` is true. Any other program
    becomes the section `program`.

    Raises:
        HpcgenError: the text is not a script, has a syntax error, or starts no program.
        Refusal: all settings that affect the results of the training and cannot be carried over.
    """
    script = read(text, path, trusts_defaults=True)
    if not script.is_shell:
        raise HpcgenError(
            f"is not a shell script: its interpreter is {script.interpreter}",
            "give a shell script",
            where=FilePlace(path),
        )
    if error := next(filter(None, (script.error, *script.text_errors)), None):
        raise HpcgenError(error.reason, "correct the script", where=FilePlace(path, error.line))
    job = Job(script)
    carried = Carried(chosen)
    launch, others = (None, ()) if as_program else _gpt_trainings(job)
    if launch is None:
        return _program(job, path, carried, cluster, node_type)
    carry_directives(job, launch, carried, node_type)
    carry_environment(job, launch, carried, cluster, node_type)
    carry_container(job, launch, carried, cluster)
    carry_training(job, launch, carried)
    for other in others:
        if _options(other) == _options(launch):
            carried.leave(other.line, other.program, "the run file already has this training")
        else:
            carried.refuse(other.line, other.program, ANOTHER)
    _needed(job, launch, carried, node_type)
    for command in changes_of_directory(job, launch):
        carried.leave(command.line, shown_words(command.words), DIRECTORY["train"])
    _list_rest(job, launch, carried, node_type, "train")
    return _migration(job, carried, path)


def _program(job: Job, path: str, carried: Carried, cluster: ClusterConfig, node_type: NodeType) -> Migration:
    """The migration of a script whose program becomes the section `program`."""
    launch = work_of(job)
    if launch is None:
        raise _no_program(job, path)
    carry_program(job, launch, carried, cluster, node_type)
    _time_limit(job, carried)
    _list_rest(job, launch, carried, node_type, "run")
    return _migration(job, carried, path)


def _list_rest(job: Job, launch: Launch, carried: Carried, node_type: NodeType, stage: str) -> None:
    """Lists everything that the run file does not have, so that nothing is lost in silence."""
    layout = layout_of(carried, launch, node_type, stage)
    claim_usual_options(job, launch, carried, layout)
    list_streams(job, launch, carried, stage)
    list_contexts(job, launch, carried)
    list_commands(job, launch, carried, stage)
    list_unclaimed(job, launch, carried, stage, str(layout))
    _defaults(job, carried)


def _no_program(job: Job, path: str) -> HpcgenError:
    for command in job.script.commands:
        if command.name == "sbatch" and command.here_document:
            return HpcgenError(
                "submits another script, which the shell completes first",
                "in a copy, replace sbatch and its options by cat, run the copy, and convert what it prints",
                where=FilePlace(path, command.line),
            )
    return HpcgenError(
        "starts no program that hpcgen finds",
        "if it computes the command in the job, write that command to a file and convert the file; "
        "otherwise, write a run file (hpcgen init --program)",
        where=FilePlace(path),
    )


def _migration(job: Job, carried: Carried, path: str) -> Migration:
    leftovers = sorted(set(carried.leftovers), key=lambda leftover: (leftover.line, leftover.what))
    is_program = "program" in carried.sections
    if refused := [leftover for leftover in leftovers if leftover.decides]:
        raise Refusal(
            [_refusal(path, leftover, is_program=is_program) for leftover in refused],
            tuple(leftover for leftover in leftovers if not leftover.decides),
        )
    return Migration(
        name=_name(job.script.options.get("job-name", "")),
        sections=carried.sections,
        leftovers=tuple(leftovers),
        usual=tuple(carried.usual),
        without_effect=tuple(carried.without_effect),
        own=tuple(dict.fromkeys(carried.own)),
    )


ANOTHER = (
    "a run file describes one training, and this one has other options; remove one from a copy of the script"
)


def _gpt_trainings(job: Job) -> tuple[Launch | None, tuple[Launch, ...]]:
    """The step with which Megatron-LM trains a GPT (None if there is none), and other training steps that may run."""
    may_run = [
        launch for launch in job.launches if not launch.command.dead and not is_body(launch.command, job)
    ]
    trainings = [launch for launch in may_run if launch.is_megatron and launch.flags]
    found = [launch for launch in trainings if re.search(r"(^|/)pretrain_gpt\w*\.py$", launch.program)]
    return (found[0], tuple(other for other in trainings if other is not found[0])) if found else (None, ())


def _options(launch: Launch) -> dict[str, tuple[str, ...]]:
    return {name: tuple(word.text for word in flag.values) for name, flag in launch.flags.items()}


def _refusal(path: str, leftover: Leftover, *, is_program: bool) -> Problem:
    if leftover.keys:
        hint = f"choose with --set '{EXAMPLES.get(leftover.keys[0], leftover.keys[0] + '=...')}'"
    elif is_program:
        hint = "change it in a copy of the script, and convert the copy"
    else:
        hint = "remove it from a copy of the script, or keep Megatron-LM with --program"
    reason = f"{printable(leftover.what)}: {printable(leftover.why)}"
    return Problem("", reason, hint, where=FilePlace(path, leftover.line))


def _needed(job: Job, launch: Launch, carried: Carried, node_type: NodeType) -> None:
    """Other values that a run file needs: refused, or filled in if the results do not depend on them."""
    refused = {key for leftover in carried.leftovers if leftover.decides for key in leftover.keys}
    for key in NEEDED:
        if carried.get(key) is None and key not in refused:
            carried.refuse(launch.line, f"--{OPTIONS[key]}", "the script does not set it", key)
    if not any(carried.get(key) for key in DATA_KEYS) and refused.isdisjoint(DATA_KEYS):
        carried.refuse(launch.line, "--data-path", "the script does not set the path of the data", *DATA_KEYS)
    if carried.get("slurm.train.nodes") is None:
        nodes = _fewest_nodes(carried, node_type)
        carried.put("slurm.train.nodes", nodes)
        why = f"the script does not set it; its parallel sizes need {nodes}"
        carried.leave(job.script.first_directive, "the number of nodes", why)
    _time_limit(job, carried)


def _time_limit(job: Job, carried: Carried) -> None:
    if carried.get("slurm.defaults.time") is None:
        carried.put("slurm.defaults.time", TIME)
        found = "sets none that a run file has" if "time" in job.script.options else "does not set it"
        why = f"the script {found}; {TIME} is filled in"
        carried.leave(job.script.first_directive, "the time limit", why)


def _defaults(job: Job, carried: Carried) -> None:
    """Variables that the submission environment may set. The script's defaults are carried over."""
    first: dict[str, int] = {}
    for item in job.script.assignments:
        if not (item.value and item.name in item.value.variables):
            first.setdefault(item.name, item.line)
    # on one line: [[ -z "${NAME:-}" ]] && NAME=value
    found = [use for use in job.script.uses if use.has_default and use.line <= first.get(use.name, use.line)]
    names = dict.fromkeys(use.name for use in found if re.fullmatch(r"(?!SLURM_)[A-Za-z_]\w*", use.name))
    if names:
        why = "the script's defaults are carried over, as if the environment does not set them"
        carried.leave(found[0].line, f"{', '.join(names)} from the environment", why)


def _fewest_nodes(carried: Carried, node_type: NodeType) -> int:
    """Number of nodes whose GPUs the parallel sizes divide."""
    sizes = {key: size for key in PARALLEL_SIZES if (size := carried.get(f"parallelism.{key}"))}
    return -(-fewest_ranks(ParallelismConfig(**sizes)) // (node_type.gpus_per_node or 1))


def _name(text: str) -> str | None:
    return text if text and not any(constraint_problems(Name, text)) else None
