"""An evaluation job: evaluates one checkpoint after the other, and writes the results of each before the next one."""

from __future__ import annotations

import functools
import gc
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.contract.config import ParallelismConfig
from trainer.contract.errors import Exit
from trainer.contract.evaluation import (
    FORMAT,
    EvaluationConfig,
    EvaluationResult,
    TaskResult,
    samples_file,
)
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.wording import counted
from trainer.distributed import groups as process_groups
from trainer.distributed.loopback import on_loopback
from trainer.distributed.rendezvous import Ranks
from trainer.evaluate import boards
from trainer.evaluate.checks import Work, check_sizes, model_config, prepare
from trainer.evaluate.perplexity import measure, open_text
from trainer.evaluate.progress import Progress
from trainer.evaluate.replicas import Replicas
from trainer.evaluate.results import record_sha256, summary, write_result
from trainer.evaluate.tasks import Tasks
from trainer.faults.stopping import leave
from trainer.faults.storage import at_rank_0
from trainer.inference.loading import load_part
from trainer.inference.model import Model
from trainer.inference.tokenizer import load_tokenizer
from trainer.metrics.console import Log
from trainer.metrics.versions import distribution_version, versions

TIMEOUT_MINUTES = 60
"""Timeout of collectives. The other ranks wait while rank 0 loads tasks and computes metrics."""


class Termination:
    """Ends this process at SIGTERM, but not while it writes results."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._requested = self._is_writing = False
        self._done = 0
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Delay SIGTERM until the results of a checkpoint are written."""
        self._is_writing = True
        yield
        self._done += 1
        self._is_writing = False
        if self._requested:
            self._leave()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._requested = True
        if not self._is_writing:
            self._leave()

    def _leave(self) -> None:
        line = f"SIGTERM; {counted(self._done, 'checkpoint')} evaluated, the others are left to the next job"
        leave(Exit.TERMINATED, line if self._ranks.rank == 0 else None)


def evaluate(config: EvaluationConfig, ranks: Ranks) -> None:
    """Evaluate all checkpoints that the configuration names.

    Raises:
        ConfigError: all mistakes in the configuration.
        TrainerError: a checkpoint cannot be loaded, or a task fails.
        LostPeersError: another rank is gone.
    """
    check_sizes(config)
    log = Log(ranks.rank == 0, progress=False)
    termination = Termination(ranks)
    groups = _connect(config, ranks)
    where = "while the job was prepared"
    with process_groups.reporting_lost_peers(ranks, lambda: where):
        tasks: list[Tasks | None] = [None]

        def choose() -> list[Checkpoint]:
            work: Work = prepare(config, log.line)
            tasks[0] = work.tasks  # not sent to the other ranks, which do not run lm-eval
            return work.checkpoints

        checkpoints = at_rank_0(choose, Path(config.run_dir))
        log.line(_plan(config, checkpoints))
        for found in checkpoints:
            where = f"during the evaluation of {found.path}"
            result, samples = _evaluate(config, found, groups, ranks, tasks[0], log)
            record = functools.partial(_record, config, result, samples, log)
            with termination.writing():
                at_rank_0(record, Path(config.run_dir), "written")
        process_groups.finalize()


def _connect(config: EvaluationConfig, ranks: Ranks) -> ProcessGroupCollection:
    layout = ParallelismConfig(
        tensor_model_parallel_size=config.settings.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.settings.pipeline_model_parallel_size,
    )
    with on_loopback(ranks.world_size):
        return process_groups.connect(
            layout,
            ranks,
            os.environ,
            world_size=config.world_size,
            device=config.device,
            timeout_minutes=TIMEOUT_MINUTES,
        )


def _evaluate(
    config: EvaluationConfig,
    found: Checkpoint,
    groups: ProcessGroupCollection,
    ranks: Ranks,
    tasks: Tasks | None,
    log: Log,
) -> tuple[EvaluationResult, list[dict[str, Any]]]:
    """Results of a checkpoint, and the answers to each question. The answers of tasks are complete on rank 0 only."""
    started = time.monotonic()
    settings = config.settings
    gc.collect()  # the model of the previous checkpoint
    chosen = model_config(config, found)
    model = load_part(found, chosen, groups)
    log.line(f"iteration {found.iteration}: loaded {found.path} in {time.monotonic() - started:.1f} s")
    texts = []
    for index, data in enumerate(settings.data):
        where = f"evaluation.data[{index}]"
        text = open_text(data, where, chosen.model.seq_length, model.vocab_size, chosen.data, settings.limit)
        progress = Progress(log, data.name, int(text.lengths.sum()), "token")
        texts.append(measure(model, data, text, settings.batch_size, progress))
    if tasks and model.why_slow:
        log.line(f"tasks that generate text: {model.why_slow}")
    task_results, samples = _run_tasks(config, model, ranks, tasks, log)
    result = EvaluationResult(
        format=FORMAT,
        name=config.name,
        iteration=found.iteration,
        checkpoint=str(found.path),
        checkpoint_sha256=record_sha256(found),
        time=time.time(),
        seconds=time.monotonic() - started,
        world_size=config.world_size,
        device=config.device,
        precision=chosen.training.precision,
        tokenizer=config.tokenizer,
        settings=settings,
        versions=versions() | ({"lm-eval": distribution_version("lm-eval")} if settings.tasks else {}),
        data=tuple(texts),
        tasks=tuple(task_results),
        task_files=tasks.files if tasks is not None else {},
        samples=samples_file(Path(config.run_dir), found.iteration).name if settings.tasks else None,
    )
    return result, samples


def _run_tasks(
    config: EvaluationConfig, model: Model, ranks: Ranks, tasks: Tasks | None, log: Log
) -> tuple[list[TaskResult], list[dict[str, Any]]]:
    if not config.settings.tasks:
        return [], []
    assert config.tokenizer is not None  # see `checks`
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    tokenizer.check_fits(model.vocab_size)
    replicas = Replicas(model, tokenizer, config.settings.batch_size, log)
    if ranks.rank != 0:
        replicas.serve()
        return [], []
    from trainer.evaluate.harness import run_tasks  # imports lm-eval

    assert tasks is not None
    return run_tasks(replicas, tasks, config.settings)


def _record(
    config: EvaluationConfig, result: EvaluationResult, samples: list[dict[str, Any]], log: Log
) -> None:
    write_result(Path(config.run_dir), result, samples)
    for line in summary(result):
        log.line(line)
    boards.draw(config, result, log)


def _plan(config: EvaluationConfig, checkpoints: list[Checkpoint]) -> str:
    settings = config.settings
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    if not checkpoints:
        return f"{config.name}: each checkpoint of evaluation.every = {settings.every} has a result, nothing to do"
    named = ", ".join(str(found.iteration) for found in checkpoints)
    return (
        f"{config.name}: evaluates {counted(len(checkpoints), 'checkpoint')} (iterations {named}) on "
        f"{counted(config.world_size, 'rank')}: TP {tensor} x PP {pipeline} x "
        f"{counted(config.world_size // (tensor * pipeline), 'replica')}"
    )
