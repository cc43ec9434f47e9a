"""Models in the test's own process, as its only rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.model.kernels import Kernels

ON_CPU = Kernels(None, "torch", "native", None, on_gpu=False)


def resolved(directory: Path, model: dict[str, Any], **training: Any) -> TrainerConfig:
    document = gpt_config("x", directory, model)
    document["training"] |= training
    return resolve(configuration.from_dict(TrainerConfig, document, "test"))
