"""The model of a checkpoint that Megatron-LM wrote, for use without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.checkpoint.loading import read_foreign
from trainer.checkpoint.megatron_lm import GPT2_VOCABULARY, Resumed
from trainer.contract.config import ParallelismConfig
from trainer.contract.errors import TrainerError


def read_model(path: Path) -> tuple[dict[str, Any], Resumed]:
    """Read the section `model` of the checkpoint `path` from its arguments, and their other values.

    `vocab_size` is missing if the arguments do not say how many rows of the embedding are padding.

    Raises:
        TrainerError: this version cannot read it, it has no arguments, or its model is not supported.
        OSError: the storage fails.
    """
    try:
        resumed = read_foreign(path, ParallelismConfig(), weights_only=True)
    except TrainerError as error:
        raise TrainerError(f"{path}: {error}") from error
    if "model" not in resumed.sections:
        raise TrainerError(
            f"{path} does not describe its model: neither the trainer nor pretrain_gpt.py wrote it. Start a run from "
            "it with checkpoint.load and checkpoint.finetune: true, and use that run's checkpoints"
        )
    model = resumed.sections["model"]
    if resumed.tokenizer_type == "GPT2BPETokenizer":
        model = {"vocab_size": GPT2_VOCABULARY, **model}
    return model, resumed
