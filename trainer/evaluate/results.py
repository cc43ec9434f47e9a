"""Writes the results of a checkpoint: a JSON file, and the answers to each question as JSON Lines."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer.contract.config import ConfigError
from trainer.contract.evaluation import (
    EvaluationResult,
    TaskResult,
    TextResult,
    evaluated,
    read_result,
    result_file,
    samples_file,
)
from trainer.contract.files.checkpoint_files import COMPLETE, Checkpoint
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.run_directory import publish
from trainer.contract.files.shared_files import refuse_foreign_link
from trainer.contract.wording import counted, duration
from trainer.metrics.console import Log


def record_sha256(checkpoint: Checkpoint) -> str:
    """SHA-256 of the record of a checkpoint. The record contains the hashes of the other files.

    Raises:
        OSError: the record cannot be read.
    """
    return sha256(read_bytes(checkpoint.path / COMPLETE))


def write_result(run_dir: Path, result: EvaluationResult, samples: Sequence[dict[str, Any]]) -> None:
    """Write the results. The result file comes last, since it marks the checkpoint as evaluated.

    Raises:
        OSError: a file cannot be written.
    """
    path = result_file(run_dir, result.iteration)
    refuse_foreign_link(path.parent, run_dir)
    path.parent.mkdir(exist_ok=True)
    if result.samples is not None:
        lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
        publish(samples_file(run_dir, result.iteration), "".join(f"{line}\n" for line in lines))
    publish(path, json.dumps(dataclasses.asdict(result), indent=1, ensure_ascii=False) + "\n")


def all_results(run_dir: Path, log: Log) -> list[EvaluationResult]:
    """Results of all checkpoints of a run, oldest first. Logs a line for each damaged file.

    Raises:
        OSError: a result file cannot be read.
    """
    found = []
    for iteration in sorted(evaluated(run_dir)):
        try:
            found.append(read_result(result_file(run_dir, iteration)))
        except ConfigError as error:
            log.line(f"not drawn: {error}")
    return found


def numbers(result: EvaluationResult) -> dict[str, float]:
    """The results as numbers by name, such as evaluation/wikitext/loss and evaluation/hellaswag/acc_norm."""
    found = {}
    for text in result.data:
        found[f"evaluation/{text.name}/loss"] = text.loss
        found[f"evaluation/{text.name}/perplexity"] = text.perplexity
    for task in result.tasks:
        for metric in task.metrics:
            suffix = "" if metric.filter == "none" else f",{metric.filter}"
            found[f"evaluation/{task.name}/{metric.name}{suffix}"] = metric.value
    return {name: value for name, value in found.items() if value is not None}


def summary(result: EvaluationResult) -> Iterable[str]:
    """Lines for the log."""
    limit = result.settings.limit
    part = f" on a part (evaluation.limit = {limit})" if limit else ""
    yield f"iteration {result.iteration}: evaluated{part} in {duration(result.seconds)}"
    for text in result.data:
        yield f"  {_text_line(text)}"
    for task in result.tasks:
        yield f"  {_task_line(task)}"


def _text_line(text: TextResult) -> str:
    kind = "token of answers" if text.answers_only else "token"
    kinds = "tokens of answers" if text.answers_only else "tokens"
    separate = ", separate documents" if text.separate_documents and not text.answers_only else ""
    tokens = f"{counted(text.tokens, kind, kinds)}{separate}"
    if text.loss is None or text.perplexity is None:
        return f"{text.name}: the loss is not finite ({tokens})"
    return f"{text.name}: loss {text.loss:.4f}, perplexity {text.perplexity:.3f} ({tokens})"


def _task_line(task: TaskResult) -> str:
    values = []
    for metric in task.metrics:
        label = metric.name if metric.filter == "none" else f"{metric.name} ({metric.filter})"
        error = "" if metric.stderr is None else f" ± {metric.stderr:.4f}"
        values.append(f"{label} not finite" if metric.value is None else f"{label} {metric.value:.4f}{error}")
    shots = "" if task.num_fewshot is None else f", {task.num_fewshot}-shot"
    return f"{task.name}: {', '.join(values)} ({counted(task.documents, 'document')}{shots})"
