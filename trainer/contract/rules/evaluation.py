"""Rules for the evaluation of checkpoints. All are hpcgen's, except the rules for the layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from trainer.contract.config import ParallelismConfig
from trainer.contract.evaluation import is_task_file
from trainer.contract.problem import Problem
from trainer.contract.rules import forward
from trainer.contract.rules.checkpoint import multiples_are_saved
from trainer.contract.rules.facts import Facts, Rule, divisors

TP = "evaluation.tensor_model_parallel_size"
PP = "evaluation.pipeline_model_parallel_size"


def layout_fits_model(facts: Facts) -> Iterator[Problem]:
    """The layout of the evaluation divides the model (sources: forward.RULES)."""
    layout = ParallelismConfig(
        tensor_model_parallel_size=facts.evaluation.tensor_model_parallel_size,
        pipeline_model_parallel_size=facts.evaluation.pipeline_model_parallel_size,
    )
    of_evaluation = facts.changed(parallelism=layout)
    seen = set()
    for rule in forward.RULES:
        for violation in rule(of_evaluation):
            path = violation.path.replace("parallelism.", "evaluation.")
            if path not in seen:
                seen.add(path)
                yield dataclasses.replace(violation, path=path, hint="")


def layout_divides_ranks(facts: Facts) -> Iterator[Problem]:
    """world_size % (TP x PP) == 0 (megatron/core/parallel_state.py, initialize_model_parallel)."""
    world = facts.evaluation_world
    tensor, pipeline = (
        facts.evaluation.tensor_model_parallel_size,
        facts.evaluation.pipeline_model_parallel_size,
    )
    if world.size % (tensor * pipeline) == 0:
        return
    is_pipeline = world.size % pipeline != 0
    own, other = (pipeline, tensor) if is_pipeline else (tensor, pipeline)
    yield Problem(
        path=PP if is_pipeline else TP,
        reason=f"results in TP x PP = {tensor} x {pipeline} = {tensor * pipeline}, which does not divide {world} of "
        f"the evaluation job ({world.size} / {tensor * pipeline})",
        candidates=[size for size in divisors(world.size, near=own) if world.size % (size * other) == 0],
        hint=f"change {world.path}",
    )


def evaluated_checkpoints_are_written(facts: Facts) -> Iterator[Problem]:
    """every % save_interval == 0."""
    if facts.evaluation.every is not None:
        yield from multiples_are_saved(facts, "evaluation.every", facts.evaluation.every, "selects")


def evaluation_has_work(facts: Facts) -> Iterator[Problem]:
    """every needs data or tasks."""
    evaluation = facts.evaluation
    if evaluation.every is not None and not evaluation.data and not evaluation.tasks:
        yield Problem(
            path="evaluation.every",
            reason="queues jobs with nothing to compute, because evaluation.data and evaluation.tasks are empty",
            candidates=[None],
            hint="set evaluation.data or evaluation.tasks",
            about=("evaluation.data", "evaluation.tasks"),
        )


def job_has_work(facts: Facts) -> Iterator[Problem]:
    """An evaluation job needs data or tasks. Runs without such a job need neither."""
    if not facts.evaluation.data and not facts.evaluation.tasks:
        yield Problem(
            path="evaluation",
            reason="has neither data nor tasks, so stage evaluate has nothing to compute",
            hint="set evaluation.data or evaluation.tasks",
            about=("evaluation.data", "evaluation.tasks"),
        )


def names_are_unique(facts: Facts) -> Iterator[Problem]:
    """Results are stored by the name of the text or task."""
    names = [text.name for text in facts.evaluation.data]
    yield from _duplicates(names, "evaluation.data[{}].name")
    yield from _duplicates(facts.evaluation.tasks, "evaluation.tasks[{}]")


def _duplicates(names: Sequence[str], path: str) -> Iterator[Problem]:
    for index, name in enumerate(names):
        if name in names[:index]:
            first = path.format(names.index(name))
            yield Problem(path=path.format(index), reason=f"is a duplicate of {first}", hint="remove it")


def final_checkpoint_is_evaluated(facts: Facts) -> Iterator[Problem]:
    """train_iters % every == 0."""
    every, last = facts.evaluation.every, facts.training.train_iters
    if every is None or last % every == 0:
        return
    yield Problem(
        path="evaluation.every",
        reason=f"does not divide training.train_iters = {last}, so training does not queue an evaluation of the final "
        "checkpoint",
        candidates=[size for size in divisors(last, near=every) if size > 1],
        offers=2,
        about=("training.train_iters",),
    )


def tasks_have_data(facts: Facts) -> Iterator[Problem]:
    """Tasks that lm-eval knows by name have datasets on the Hugging Face Hub."""
    named = [task for task in facts.evaluation.tasks if not is_task_file(task)]
    if named and facts.evaluation.hf_home is None:
        yield Problem(
            path="evaluation.hf_home",
            reason=f"is null, so jobs on the cluster find no dataset for evaluation.tasks ({', '.join(named)})",
            hint="set it to a directory that python -m trainer.evaluate --download has filled",
            about=("evaluation.data", "evaluation.tasks"),
        )


OF_JOB: tuple[Rule, ...] = (layout_divides_ranks, names_are_unique)
"""Rules of the settings of a job that evaluates existing checkpoints."""

RULES: tuple[Rule, ...] = (
    layout_fits_model,
    *OF_JOB,
    evaluated_checkpoints_are_written,
    evaluation_has_work,
)
WARNINGS: tuple[Rule, ...] = (final_checkpoint_is_evaluated, tasks_have_data)

OF_MODEL: tuple[Rule, ...] = ()
