"""Checks an evaluation job before any weights are loaded, and reports all mistakes at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer.contract.config import BlendConfig, ConfigError, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.evaluation import EvaluationConfig, EvaluationData, evaluated, is_due
from trainer.contract.files.checkpoint_files import Checkpoint, iteration_of
from trainer.contract.problem import Problem
from trainer.contract.rules.engine import evaluation_problems
from trainer.contract.wording import counted
from trainer.data.index_files import LogLine
from trainer.data.recorded import require_as_recorded
from trainer.evaluate.perplexity import open_pair
from trainer.evaluate.tasks import KEY, Tasks, load_tasks
from trainer.inference.checkpoint import complete_checkpoints, find_checkpoint, inference_config
from trainer.inference.tokenizer import load_tokenizer

T = TypeVar("T")

MAX_VOCAB_SIZE = 2**31
"""More tokens than any model has. Used if no checkpoint tells the number."""


@dataclass(frozen=True)
class Work:
    """Checkpoints and tasks of a job."""

    checkpoints: list[Checkpoint]
    """Checkpoints to evaluate, newest first."""
    tasks: Tasks | None
    """None without tasks."""


def check_sizes(config: EvaluationConfig) -> None:
    """Check the settings by the rules of evaluations.

    Raises:
        ConfigError: the settings break rules.
    """
    if problems := evaluation_problems(config):
        raise ConfigError(*problems)


def model_config(config: EvaluationConfig, found: Checkpoint) -> TrainerConfig:
    """Configuration of the model of a checkpoint, in the layout of this job.

    Raises:
        TrainerError: the model cannot be split in this way.
    """
    settings = config.settings
    tensor, pipeline = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    return inference_config(
        found,
        device=config.device,
        precision=settings.precision,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        num_replicas=config.world_size // (tensor * pipeline),
    )


def prepare(config: EvaluationConfig, log: LogLine) -> Work:
    """Choose the checkpoints, load the tasks and check everything else. Only rank 0 calls this.

    Raises:
        ConfigError: all mistakes.
        TrainerError: a file cannot be read.
    """
    problems: list[Problem] = []

    def collect(function: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return function(*arguments)
        except TrainerError as error:
            if error.retry:
                raise
            problems.extend(error.mistakes)
            return None

    checkpoints = collect(_choose, config, log) or []
    # The checkpoints of a run have one model.
    model = collect(model_config, config, checkpoints[0]) if checkpoints else None
    vocab_size = model.model.num_tokens if model else MAX_VOCAB_SIZE
    settings = config.settings
    for index, data in enumerate(settings.data):
        training = model.data if model else BlendConfig()
        collect(_check_text, data, f"evaluation.data[{index}]", vocab_size, training)
    tasks = None
    if settings.tasks and (checkpoints or problems):
        collect(_check_tokenizer, config, vocab_size)
        tasks, unusable = load_tasks(settings.tasks)
        problems += unusable
    if problems:
        summary = [f"{counted(len(problems), 'mistake')}; nothing was evaluated"] if len(problems) > 1 else []
        raise ConfigError(*problems, *summary)
    return Work(checkpoints, tasks)


def _check_text(data: EvaluationData, where: str, vocab_size: int, training: BlendConfig) -> None:
    """Check that a text can be evaluated, and that its loss mask is the one that was made with it."""
    open_pair(data, where, vocab_size, training)
    require_as_recorded([data.prefix])


def _choose(config: EvaluationConfig, log: LogLine) -> list[Checkpoint]:
    path = Path(config.checkpoint)
    every = config.settings.every
    if every is None or iteration_of(path) is not None:
        found = find_checkpoint(path)
        if found.is_foreign:
            raise ConfigError(
                f"{found.path} was written by Megatron-LM. Results name the record of a checkpoint, which it does not "
                "have. Start a run from it with checkpoint.load, and evaluate the run's own checkpoints"
            )
        return [found]
    complete, flaws = complete_checkpoints(path)
    for flaw in flaws:
        log(f"not evaluated: {flaw}")
    done = evaluated(Path(config.run_dir))
    return [each for each in complete if is_due(each.iteration, every) and each.iteration not in done]


def _check_tokenizer(config: EvaluationConfig, vocab_size: int) -> None:
    if config.tokenizer is None:
        raise ConfigError(f"{KEY} needs a tokenizer: gpt2, bytes, or the path of a tokenizer.json")
    tokenizer = load_tokenizer(config.tokenizer, config.eod_token)
    tokenizer.check_fits(vocab_size)
    if tokenizer.eod_id is None:
        raise ConfigError(
            f"the tokenizer {tokenizer.name} names no end-of-document token, which {KEY} needs: it precedes a text "
            "without context and ends an answer. Set eod_token"
        )
