"""Evaluation of checkpoints: the settings, the resolved configuration of a job, and the files with its results.

`python -m trainer.evaluate --config evaluation.json` reads EvaluationConfig and writes one result file per checkpoint.
Retention keeps a checkpoint whose iteration is a multiple of `every` until its result file exists.
"""

from __future__ import annotations

import json
import re
from dataclasses import field
from pathlib import Path
from typing import Literal

from trainer.contract.config import ConfigError, Count, NonNegative, from_dict
from trainer.contract.config.path import FilePath, TaskName
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.record import config_section

DIRECTORY = "evaluation"
"""Directory of the result files in the run directory."""

FORMAT = 1
"""Format of the result files. Readers refuse files with a later format."""


@config_section
class EvaluationData:
    """Tokenized text for perplexity."""

    name: str
    """Name in results, such as wikitext."""
    prefix: FilePath
    """Path of the .bin/.idx pair without the suffix."""


@config_section
class EvaluationSettings:
    """Perplexity of texts and tasks of lm-eval, computed for the checkpoints of a run."""

    every: Count | None = None
    """Queue an evaluation job for each checkpoint whose iteration is a multiple of this number, which must be a
    multiple of checkpoint.save_interval. Retention keeps these checkpoints until they are evaluated. Default: none."""
    data: tuple[EvaluationData, ...] = ()
    """Tokenized texts for perplexity."""
    tasks: tuple[TaskName, ...] = ()
    """Tasks of EleutherAI's lm-eval: names such as hellaswag, or paths of task files."""
    hf_home: FilePath | None = None
    """Directory with the datasets of tasks (HF_HOME of the job), which compute nodes cannot download. Default: a
    directory on the node's scratch, which is empty."""
    num_fewshot: NonNegative | None = None
    """Number of examples before each question. Default: each task's own."""
    limit: Count | None = None
    """Number of documents per task and of sequences per text, for a quick look. Default: all."""
    batch_size: Count = 16
    """Number of sequences that each model replica computes together."""
    tensor_model_parallel_size: Count = 1
    """Tensor-parallel size of the model during evaluation. Ranks beyond TP x PP hold further replicas."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline-parallel size of the model during evaluation."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Data type of the weights. Default: the training's."""


@config_section
class EvaluationConfig:
    """Resolved configuration of an evaluation job."""

    name: str
    """Name of the run."""
    run_dir: str
    """Absolute path of the run directory. Results are written to `evaluation` in it."""
    device: Literal["cuda", "cpu"]
    """Device that the ranks compute on."""
    world_size: Count
    """Number of ranks: a multiple of TP x PP."""
    checkpoint: str
    """An `iter_...` directory, or a directory of checkpoints. In a directory, the job evaluates all complete
    checkpoints that are due and have no result; if `every` is not set, the newest one."""
    tokenizer: str | None = None
    """Tokenizer for tasks: gpt2, bytes, a tokenizer.json or a directory with tokenizer files."""
    eod_token: str | None = None
    """Token at the end of a document. Default: the tokenizer's."""
    settings: EvaluationSettings
    """Texts, tasks and layout."""
    tensorboard: bool = True
    """Add the results to TensorBoard's event files in the run directory, at the checkpoint's iteration."""
    wandb_project: str | None = None
    """Weights & Biases project that the results are added to; null for none."""
    wandb_entity: str | None = None
    """Weights & Biases team or user. Default: your default entity."""


@config_section
class TextResult:
    """Loss of a model on a tokenized text."""

    name: str
    prefix: str
    loss: float | None
    """Mean cross-entropy in nats per token; None if it is not finite."""
    perplexity: float | None
    """exp(loss); None if it is not finite."""
    tokens: int
    """Number of predicted tokens."""
    sequences: int
    """Number of windows that the text was cut into."""
    seq_length: int
    """Length of a window in tokens."""
    separate_documents: bool = False
    """True if each document was predicted from its own tokens only, as in a training with data.reset_attention_mask or
    data.sft."""
    answers_only: bool = False
    """True for chats, of which only the answers are predicted."""
    seconds: float


@config_section
class Metric:
    """A metric of a task. lm-eval writes its name and its filter as `acc,none`."""

    name: str
    """Name in lm-eval, such as acc or exact_match."""
    filter: str
    """lm-eval's filter of the answers, such as none or strict-match."""
    value: float | None
    """None if it is not finite."""
    stderr: float | None
    """Standard error; None if lm-eval computes none."""
    higher_is_better: bool | None


@config_section
class TaskResult:
    """Metrics of a task of lm-eval, or of a group of tasks."""

    name: str
    is_group: bool
    """True for a group, such as mmlu. Its tasks have results of their own."""
    version: str | None
    num_fewshot: int | None
    """Number of examples before each question; None for a group whose tasks differ."""
    documents: int
    """Number of questions."""
    metrics: tuple[Metric, ...]


@config_section
class EvaluationResult:
    """Contents of a result file."""

    format: int
    name: str
    """Name of the run."""
    iteration: int
    checkpoint: str
    """Path of the checkpoint."""
    checkpoint_sha256: str
    """SHA-256 of the checkpoint's file COMPLETE, which contains the hashes of all other files."""
    time: float
    """End of the evaluation (Unix seconds)."""
    seconds: float
    """Duration, including the time to load the weights."""
    world_size: int
    device: str
    precision: str
    """Data type of the weights during evaluation."""
    tokenizer: str | None
    settings: EvaluationSettings
    versions: dict[str, str]
    """Version of each library."""
    data: tuple[TextResult, ...] = ()
    tasks: tuple[TaskResult, ...] = ()
    task_files: dict[str, str] = field(default_factory=dict)
    """SHA-256 of each task file and of what it includes and runs, by path."""
    samples: str | None = None
    """Name of the file with the answers to each question, next to the result file; None without tasks."""


def read_result(path: Path) -> EvaluationResult:
    """Read a result file.

    Raises:
        OSError: it cannot be read.
        ConfigError: it is not JSON, or not a result file of this version or an earlier one.
    """
    try:
        document = json.loads(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error})", where=path) from error
    written = document.get("format") if isinstance(document, dict) else None
    if isinstance(written, int) and written > FORMAT:
        raise ConfigError(f"{path} was written by a later version of the trainer. Use that version")
    return from_dict(EvaluationResult, document, str(path))


def is_task_file(task: str) -> bool:
    """True if a task is the path of a task file, and not the name of a task."""
    return task.endswith((".yaml", ".yml"))


def result_file(run_dir: Path, iteration: int) -> Path:
    """Path of the results of a checkpoint, such as RUN_DIR/evaluation/iter_0000100.json."""
    return run_dir / DIRECTORY / f"iter_{iteration:07d}.json"


def samples_file(run_dir: Path, iteration: int) -> Path:
    """Path of the answers to each question of the tasks, such as RUN_DIR/evaluation/iter_0000100.samples.jsonl."""
    return result_file(run_dir, iteration).with_suffix(".samples.jsonl")


def evaluated(run_dir: Path) -> set[int]:
    """Iterations that have a result file.

    Raises:
        OSError: the directory cannot be read.
    """
    try:
        names = [path.name for path in (run_dir / DIRECTORY).iterdir()]
    except FileNotFoundError:
        return set()
    return {int(match[1]) for name in names if (match := re.fullmatch(r"iter_(\d{7,})\.json", name))}


def is_due(iteration: int, every: int | None) -> bool:
    """True if a checkpoint of this iteration must be evaluated."""
    return every is not None and iteration > 0 and iteration % every == 0
