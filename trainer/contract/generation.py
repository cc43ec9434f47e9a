"""Text generation as a job: the run file's section."""

from __future__ import annotations

from typing import Literal

from trainer.contract.config.choice import Choice
from trainer.contract.config.path import FilePath
from trainer.contract.config.values import Count
from trainer.contract.record import config_section

DIRECTORY = "generation"
"""Directory of the results in the run directory."""


@config_section
class GenerationSettings(Choice):
    """Continues the prompts of a file with the newest complete checkpoint of a run."""

    prompts: FilePath | None = None
    """JSON Lines file with a key `prompt` or `messages` in each line. Messages are rendered with the chat template of
    data.corpus.chat or else of data.tokenizer."""
    output: FilePath | None = None
    """JSON Lines file for the texts. It appears when all texts are done. Default: the name of the file with the
    prompts, in the directory `generation` of the run directory."""
    tensor_model_parallel_size: Count | None = None
    """Tensor-parallel size of the model during generation. Ranks beyond TP x PP hold further replicas, which share the
    prompts. Default: the training's."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline-parallel size of the model during generation."""
    precision: Literal["bf16", "fp16", "fp32"] | None = None
    """Data type of the weights. Default: the training's."""
