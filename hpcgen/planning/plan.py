"""The plan of a run: everything that is decided before anything is written or submitted."""

from __future__ import annotations

import itertools
import os.path
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from hpcgen.config import corpus as corpora
from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.stages import ARRAY_STAGES, STAGES, TRAINER_STAGES
from hpcgen.config.validation import describe
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning.allocation import allocation_problems, cluster_problems
from hpcgen.planning.array import array_warnings
from hpcgen.planning.container import container_problems, container_warnings
from hpcgen.planning.environment import all_environment_problems, environment_warnings
from hpcgen.planning.layout import Layout
from hpcgen.planning.paths import absolute_paths, manifest_of, plain_path_problems
from hpcgen.planning.resuming import (
    changed_hyperparameters,
    discarded_training,
    no_checkpoints,
    nothing_to_do,
    proof_of_checkpoints,
)
from hpcgen.planning.stage import StagePlan, make_stage
from hpcgen.planning.training import plan_training
from trainer.contract.config import TrainerConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the stages will do, and everything worth a warning."""

    run: Run
    config: RunConfig
    """The run file with absolute paths."""
    stages: dict[str, StagePlan]
    trainer: TrainerConfig | None
    """The trainer's resolved configuration; None when no stage is planned that reads it."""
    layout: Layout | None
    warnings: tuple[str, ...]


def plan(
    run: Run, stages: Sequence[str] = ("train",), *, exists: Callable[[str], bool] = os.path.exists
) -> Plan:
    """Plans `stages` of a run, by the names of hpcgen.config.stages.

    `exists` answers for the data files, which only the login node can see now.

    Raises:
        ConfigErrors: every mistake of the run file and every rule that the run breaks.
        HpcgenError: an unknown stage.
    """
    stages = [stages] if isinstance(stages, str) else stages
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise HpcgenError(f"{unknown[0]!r} is not a stage", f"use {', '.join(STAGES)}")
    ordered = [stage for stage in STAGES if stage in stages]
    config = absolute_paths(run.config, run.directory)
    problems = list(_section_problems(run, ordered))
    training = plan_training(run, config) if set(TRAINER_STAGES) & set(ordered) else None
    if training is not None:
        problems += training.errors
        if training.trainer is not None and "train" in ordered:
            problems += changed_hyperparameters(run.config, training.trainer)
            problems += discarded_training(training.trainer)
    errors = [*run.mistakes, *_described(run, problems)]
    planned: dict[str, StagePlan] = {}
    for name in ordered:
        trainer = training.trainer if training and name in TRAINER_STAGES else None
        lead_s = training.signal_lead_s if training and name == "train" else 0
        try:
            if name not in ARRAY_STAGES or config.data.corpus is not None:
                planned[name] = make_stage(name, run, config, trainer, lead_s)
        except HpcgenError as error:
            errors += error.mistakes
    missing, unsure = _missing_inputs(run, config, planned, exists)
    errors += missing
    if errors:
        raise ConfigErrors(list(dict.fromkeys(errors)))
    warnings: list[Problem] = []
    if any(stage.container for stage in planned.values()):
        warnings += container_warnings(run.config, run.cluster)
    for stage in planned.values():
        warnings += array_warnings(stage.name, config, run.cluster)
        warnings += environment_warnings(stage.name, run, stage.environment)
    if training is not None:
        warnings += training.warnings
        if training.trainer is not None and "train" in ordered:
            warnings += nothing_to_do(training.trainer)
    warnings = list(dict.fromkeys(warnings))
    return Plan(
        run=run,
        config=config,
        stages=planned,
        trainer=training.trainer if training else None,
        layout=training.layout if training else None,
        warnings=(*(_describe(run, problem) for problem in warnings), *unsure),
    )


def _described(run: Run, problems: Iterable[Problem]) -> Iterator[str]:
    """The problems as messages, without those that speak of a section which holds a mistake anyway."""
    for problem in problems:
        sections = re.findall(r"\b([a-z]+)[.\[]", f"{problem.path}. {problem.reason}")
        if run.unsure_sections.isdisjoint(sections):
            yield _describe(run, problem)


def _describe(run: Run, problem: Problem) -> str:
    if problem.file == "cluster":
        return describe(problem, run.cluster_document, run.cluster)
    return describe(problem, run.document, run.config)


def _section_problems(run: Run, stages: Sequence[str]) -> Iterator[Problem]:
    config, cluster, node_type = run.config, run.cluster, run.node_type
    yield from plain_path_problems(config)
    yield from all_environment_problems(run)
    yield from container_problems(config, cluster)
    yield from tokenizers.problems(config.data.tokenizer)
    yield from cluster_problems(cluster, node_type)
    for stage in stages:
        yield from allocation_problems(stage, config, cluster, node_type)
    if config.data.corpus is not None:
        yield from corpora.problems(config.data.corpus)
    elif needing := [stage for stage in stages if stage in ARRAY_STAGES]:
        hint = "say where the corpus comes from and where it goes"
        yield Problem("data.corpus", f"is missing, and stage {needing[0]} makes it", hint)


def _prefix_keys(config: RunConfig) -> dict[str, str]:
    """The files of the pairs that the run file names, each with the key that names it."""
    return {
        dataset.prefix + suffix: f"data.{field}[{index}].prefix"
        for field in ("datasets", "train", "valid", "test")
        for index, dataset in enumerate(getattr(config.data, field))
        for suffix in (".idx", ".bin")
    }


def _no_pair(key: str, path: str, stage: str) -> Problem:
    doubled = PurePosixPath(PurePosixPath(path).stem).suffix
    is_file = doubled in (".bin", ".idx")
    hint = (
        f"write it without {doubled}" if is_file else "write the path of the two files without .bin and .idx"
    )
    return Problem(key, f"names no pair: {path}: no such file, and stage {stage} needs it", hint)


def _missing_inputs(
    run: Run, config: RunConfig, stages: dict[str, StagePlan], exists: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Files that are not there: errors, or warnings where not even the top of the path can be seen from here."""
    absent: dict[str, str] = {}
    for stage in stages.values():
        absent.update({path: stage.name for path in stage.inputs if path not in absent and not exists(path)})
    corpus = config.data.corpus
    pairs = itertools.chain.from_iterable(corpora.blend(corpus).values()) if corpus else ()
    unmade = [
        path for pair in pairs for path in (f"{pair.prefix}.idx", f"{pair.prefix}.bin") if path in absent
    ]
    load, prefixes = config.checkpoint.load, _prefix_keys(config)
    errors, warnings = [], []
    for path, name in absent.items():
        if path in unmade:
            continue
        if not exists("/" + path.split("/")[1]):
            warnings.append(f"{path} cannot be seen from this machine: not checked")
        elif corpus and path == manifest_of(corpus):
            hint = "run hpcgen data plan with this run file first"
            errors.append(f"{path} is not there, and stage {name} works through what it lists; {hint}")
        elif load and path == proof_of_checkpoints(load):
            errors.append(_describe(run, no_checkpoints(load, exists)))
        elif path in prefixes:
            if path.endswith(".idx") or path.removesuffix(".bin") + ".idx" not in absent:
                errors.append(_describe(run, _no_pair(prefixes[path], path, name)))
        else:
            errors.append(f"{path}: no such file, and stage {name} needs it")
    if unmade and not {"tokenize", "prepare"} & stages.keys():
        more = f" and {len(unmade) - 1} more files" if len(unmade) > 1 else ""
        verb = "are" if more else "is"
        must = "the stage prepare (or tokenize) must run first"
        warnings.append(f"{unmade[0]}{more} {verb} not there yet: {must}")
    return errors, warnings
