"""Section `export` of the run file."""

from __future__ import annotations

from typing import Literal, TypeAlias

from trainer.contract.config.path import FilePath
from trainer.contract.record import config_section

FamilyName: TypeAlias = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"
]
"""The families of trainer.contract.families.huggingface, by `model_type`."""


@config_section
class ExportConfig:
    """Export of the newest complete checkpoint as a Hugging Face directory. Adapters are merged into their model."""

    directory: FilePath | None = None
    """New directory to write."""
    dtype: Literal["bf16", "fp16", "fp32"] | None = None
    """Data type of the weights. Default: the checkpoint's."""
    family: FamilyName | None = None
    """Model family. Default: the first that can express the model."""
    adapter: bool = False
    """Write only the adapters, as a directory of PEFT."""
