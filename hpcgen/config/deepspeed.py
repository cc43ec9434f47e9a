"""The section `program.deepspeed`: DeepSpeed's configuration for a program of the user's own."""

from __future__ import annotations

from typing import Any

from hpcgen.config.fields import FilePath
from trainer.contract.config import Count, PositiveFloat
from trainer.contract.config.section import config_section


@config_section
class DeepSpeedConfig:
    """DeepSpeed's configuration. The job writes it to the file {DEEPSPEED_CONFIG}, which the command must name."""

    config: dict[str, Any]
    """DeepSpeed's own keys, as in its JSON file. Two of the three batch sizes are enough. Strings can contain
    variables of the job, such as {SCRATCH}; {{ and }} stand for braces."""
    model: FilePath | None = None
    """Hugging Face config.json of the model, or the directory that contains it, for the memory estimate."""
    parameters: PositiveFloat | None = None
    """Number of parameters of the model, for the memory estimate of a model without a config.json."""
    largest_layer_parameters: PositiveFloat | None = None
    """Number of parameters of the model's largest module, such as its embedding. Used with `parameters` and stage 3.
    Default: 0."""
    trainable_parameters: PositiveFloat | None = None
    """Number of trainable parameters, for the memory estimate of adapters such as LoRA. Default: all."""
    model_parallel_size: Count = 1
    """Number of ranks among which the program itself divides each copy of the model, such as the stages of a
    PipelineModule. The batch sizes count only the copies."""
