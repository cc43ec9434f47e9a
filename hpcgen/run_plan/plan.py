"""The plan of a run: all decisions made before anything is written or submitted."""

from __future__ import annotations

import operator
import os.path
from collections.abc import Collection, Iterator, Sequence
from importlib.util import find_spec

from hpcgen.config import corpus as corpora
from hpcgen.config import notify as notifications
from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.loader import Run
from hpcgen.config.run import TRAINER_SECTIONS, RunConfig
from hpcgen.config.stages import PREPARE, RUN
from hpcgen.config.validation import located
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.files import no_access
from hpcgen.planning.allocation_warnings import allocation_warnings
from hpcgen.planning.container import (
    container_problems,
    container_warnings,
    missing_file_warnings,
    missing_package_warnings,
)
from hpcgen.planning.environment import (
    all_environment_problems,
    environment_warnings,
    excluded_variables,
    uses_gpus,
)
from hpcgen.planning.held_out import trained_texts
from hpcgen.planning.inputs import Exists, Input, missing_script_warnings, tokenizer_file
from hpcgen.planning.kind import Stage
from hpcgen.planning.paths import (
    absolute_paths,
    manifest_of,
    run_dir_problems,
    scratch_warnings,
    sft_problems,
)
from hpcgen.planning.request import allocation_problems, cluster_problems
from hpcgen.run_plan.stage import StagePlan, make_stage
from hpcgen.run_plan.training import Training, plan_training
from hpcgen.stages import STAGES
from hpcgen.stages.train import TRAIN
from hpcgen.text import counted
from trainer.contract.config import TrainerConfig
from trainer.contract.model.layout import Layout
from trainer.contract.record import record


@record(kw_only=True)
class Plan:
    """The plans of the stages, and all warnings."""

    run: Run
    config: RunConfig
    """The run file with absolute paths."""
    stages: dict[str, StagePlan]
    trainer: TrainerConfig | None
    """The trainer's resolved configuration; None if no planned stage reads it."""
    layout: Layout | None
    warnings: tuple[str, ...]
    unchecked: tuple[str, ...] = ()
    """The warnings about files that only the cluster has or that are not made yet, which are no mistakes."""

    @property
    def training(self) -> StagePlan | None:
        """The planned stage that trains."""
        return next((stage for stage in self.stages.values() if stage.kind.trains), None)

    @property
    def prefixes(self) -> frozenset[str]:
        """Prefixes of the pairs that the stages read."""
        return frozenset().union(*(stage.prefixes for stage in self.stages.values()))


def plan(run: Run, stages: Collection[str] = (), *, exists: Exists = os.path.exists) -> Plan:
    """Plans `stages` of a run, given by their names. Default: see `main_stage`.

    `exists` checks for data files on the login node.

    Raises:
        ConfigErrors: the run lacks keys that a stage needs, or breaks rules. Lists all mistakes.
        HpcgenError: a stage is unknown.
    """
    stages = [stages] if isinstance(stages, str) else stages or [main_stage(run)]
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise HpcgenError(f"unknown stage {unknown[0]!r}", f"use {', '.join(STAGES)}")
    # jobs are queued in the order of the table, whatever the order of the words
    ordered = [STAGES[name] for name in STAGES if name in stages]
    config = absolute_paths(run.config, run.directory)
    checked = _with_queued(ordered, config)
    reads_trainer_config = any(stage.reads_trainer_config for stage in ordered) and not _has_program(run)
    # a run file without its sections has no training to plan; _missing_keys reports them
    must_fit = config.memory_check == "error" and any(stage.trains for stage in checked)
    has_training = reads_trainer_config and not run.omitted
    training = plan_training(run, config, must_fit=must_fit) if has_training else None
    trainer = training.trainer if training else None
    problems = (*_missing_keys(run, checked), *_problems(run, config, checked, training))
    errors = [located_in(run, problem) for problem in problems]
    planned, refused = _planned_stages(ordered, run, config, training)
    missing, lacking, unsure = _missing_inputs(run, config, planned, exists)
    errors += [*refused, *missing]
    if errors:
        raise ConfigErrors(errors)
    warnings = [
        *_stage_warnings(run, config, planned, exists),
        *(training.warnings if training else ()),
        *lacking,
    ]
    for stage in checked:
        warnings += missing_package_warnings(stage.packages(config), run.config, run.cluster, exists)
    if trainer is not None:
        warnings += trained_texts(config, trainer, exists)
    for stage in ordered:
        warnings += stage.warnings(run, config, trainer)
    unchecked = tuple(map(str, unsure))
    return Plan(
        run=run,
        config=config,
        stages=planned,
        trainer=trainer,
        layout=training.layout if training else None,
        warnings=(
            # several stages may warn about the same setting
            *(str(located_in(run, problem)) for problem in dict.fromkeys(warnings)),
            *_unchecked_pairs(config, planned, exists),
            *unchecked,
        ),
        unchecked=unchecked,
    )


def _planned_stages(
    stages: Sequence[Stage], run: Run, config: RunConfig, training: Training | None
) -> tuple[dict[str, StagePlan], list[Problem]]:
    """The plans of stages, and the mistakes of all stages that cannot be planned, which one round shows."""
    planned, errors = dict[str, StagePlan](), list[Problem]()
    trainer = training.trainer if training else None
    for stage in stages:
        lead_s = training.signal_lead_s if training and stage.trains else 0
        try:
            # without a corpus, an array has no tasks; _missing_keys reports it
            if not stage.is_array or config.data.corpus is not None:
                planned[stage.name] = make_stage(stage, run, config, trainer, lead_s)
        except HpcgenError as error:
            errors += error.mistakes
    return planned, errors


def _with_queued(stages: Sequence[Stage], config: RunConfig) -> list[Stage]:
    """The stages, and those that their jobs queue, which follow the same rules."""
    queued = (stage.queued_stage(config) for stage in stages)
    return list(dict.fromkeys((*stages, *(stage for stage in queued if stage is not None))))


def _problems(
    run: Run, config: RunConfig, stages: Sequence[Stage], training: Training | None
) -> Iterator[Problem]:
    """Yields the broken rules. Skips the rules of a stage if the run file omits a section that the stage needs."""
    yield from _section_problems(run, stages)
    yield from training.errors if training else ()
    for stage in stages:
        if not any(section in stage.needs for section in run.omitted):
            yield from stage.problems(run, config, training.trainer if training else None)


def _stage_warnings(
    run: Run, config: RunConfig, stages: dict[str, StagePlan], exists: Exists
) -> Iterator[Problem]:
    """Yields warnings about the site's files, containers, files, arrays and variables."""
    if any(uses_gpus(stage.kind, run) for stage in stages.values()):
        yield from run.doubts
        yield from excluded_variables(run)
    yield from scratch_warnings(config, run.cluster, is_set=run.cluster_document.get("scratch") is not None)
    if any(stage.container for stage in stages.values()):
        runs_trainer = not all(stage.kind.runs_user_program for stage in stages.values())
        yield from container_warnings(run.config, run.cluster, runs_trainer=runs_trainer)
    if any(stage.kind.in_container for stage in stages.values()):
        yield from missing_file_warnings(run.config, run.cluster, exists)
    for stage in stages.values():
        if stage.kind.runs_user_program and config.program is not None:
            yield from missing_script_warnings(config.program, stage.container, exists)
        yield from allocation_warnings(stage.kind, config, run.cluster, run.node_type)
        yield from environment_warnings(stage.kind, run, stage.environment)


def _unchecked_pairs(config: RunConfig, stages: dict[str, StagePlan], exists: Exists) -> Iterator[str]:
    """Yields a warning if pairs that the stages read cannot be compared with the corpus's manifest."""
    corpus = config.data.corpus
    if corpus is None or not exists(manifest_of(corpus)) or find_spec("msgspec") is not None:
        return
    if any(stage.kind.makes_pairs for stage in stages.values()):
        return
    pairs = {pair.prefix for pairs in corpora.blend(corpus).values() for pair in pairs}
    if any(not pairs.isdisjoint(stage.prefixes) for stage in stages.values()):
        yield (
            "the pairs were not compared with the manifest, which needs msgspec. "
            "Install it with: pip install 'hpcgen[data]'"
        )


def located_in(run: Run, problem: Problem) -> Problem:
    """The problem with the file and line of its key, and its value."""
    if problem.file == "cluster":
        return located(problem, run.cluster_document, run.cluster)
    return located(problem, run.document, run.config)


def _section_problems(run: Run, stages: Sequence[Stage]) -> Iterator[Problem]:
    config, cluster, node_type = run.config, run.cluster, run.node_type
    yield from run_dir_problems(config)
    yield from all_environment_problems(run)
    yield from container_problems(config, cluster)
    yield from tokenizers.problems(config.data.tokenizer)
    yield from cluster_problems(cluster, node_type)
    for stage in stages:
        yield from allocation_problems(stage, config, cluster, node_type)
    if config.notify is not None:
        yield from notifications.problems(config.notify)
    if config.data.corpus is not None:
        yield from corpora.problems(config.data.corpus, config.data.tokenizer)
        yield from sft_problems(config, run.document.get("data.sft"))


def _missing_keys(run: Run, stages: Sequence[Stage]) -> Iterator[Problem]:
    """Yields the keys that the run file lacks, each with the first stage that needs it."""
    found = set[str]()
    for stage in stages:
        missing = [
            key for key in stage.needs if key in run.omitted or operator.attrgetter(key)(run.config) is None
        ]
        if _has_program(run) and any(key.partition(".")[0] in TRAINER_SECTIONS for key in missing):
            reason = f"replaces hpcgen's trainer, so there is no model for stage {stage.name}"
            yield Problem("program", reason, f"use stage {RUN}, or remove program")
            continue
        for key in missing:
            if key not in found:
                reason = f"is missing, but stage {stage.name} needs it"
                yield Problem(key, reason, stage.needs[key], is_missing=True)
        found.update(missing)


def _has_program(run: Run) -> bool:
    """True if the run file describes a program of the user, and therefore no model."""
    return run.document.get("program") is not None


def main_stage(run: Run) -> str:
    """The stage that a run file is for: run if it describes a program, prepare if it describes only a corpus, or else
    train."""
    if _has_program(run):
        return RUN
    trains = any(run.document.get(section) is not None for section in TRAINER_SECTIONS)
    return PREPARE if run.document.get("data.corpus") is not None and not trains else TRAIN.name


def _missing_inputs(
    run: Run, config: RunConfig, stages: dict[str, StagePlan], exists: Exists
) -> tuple[list[Problem], list[Problem], list[Problem]]:
    """Missing input files: errors, warnings, and those that `Plan.unchecked` describes."""
    absent: dict[str, tuple[Input, str]] = {}
    for stage in (*stages.values(), *(stage.queued for stage in stages.values() if stage.queued)):
        for item in stage.inputs:
            if item.path not in absent and not exists(item.path):
                absent[item.path] = item, stage.name
    errors, warnings, unsure, reported = [], [], [], set[str]()
    for path, (item, name) in absent.items():
        if item.is_made:  # one warning below is about all of these files
            continue
        if not _is_seen(path, exists):
            reason = f"was not checked, because this machine has no /{path.split('/')[1]}"
            unsure.append(Problem("", reason, subject=path))
        elif closed := no_access(path):
            errors.append(Problem("", f"{closed}. Stage {name} needs it"))
        elif not item.key:  # no line of the run file names it
            errors.append(item.missing(name, exists))
        elif item.key not in reported:  # both files of a pair have the same key
            errors.append(located_in(run, item.missing(name, exists)))
            reported.add(item.key)
    unmade = [path for path, (item, _) in absent.items() if item.is_made]
    if unmade and not any(stage.kind.makes_pairs for stage in stages.values()):
        unsure.append(_unmade_pairs(config, unmade, exists))
        # training does not read the tokenizer's file, but the stage that this warning suggests does
        warnings += [
            item.missing("prepare", exists)
            for item in tokenizer_file(config)
            if _is_seen(item.path, exists) and not exists(item.path)
        ]
    return errors, warnings, unsure


def _is_seen(path: str, exists: Exists) -> bool:
    """False for a path on storage that only the compute nodes may mount."""
    return exists("/" + path.split("/")[1])


def _unmade_pairs(config: RunConfig, paths: Sequence[str], exists: Exists) -> Problem:
    """The warning about all pairs that the data stages still have to make."""
    more = f" and {counted(len(paths) - 1, 'more file')}" if len(paths) > 1 else ""
    corpus = config.data.corpus
    plan_first = "hpcgen data plan and then " if corpus and not exists(manifest_of(corpus)) else ""
    reason = f"{'do' if more else 'does'} not exist yet. Run {plan_first}the stage prepare (or tokenize)"
    return Problem("", reason, subject=f"{paths[0]}{more}")
