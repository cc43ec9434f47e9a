"""Checkpoints that Megatron-LM wrote: their values that are not tensors, and their model for use without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron.core
from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from trainer.checkpoint import megatron_lm
from trainer.checkpoint.loading_errors import raise_environment_fault, refuse_code
from trainer.checkpoint.megatron_lm import GPT2_VOCABULARY, Resumed
from trainer.contract.config import ParallelismConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_files import COMMON


def read_foreign(path: Path, layout: ParallelismConfig, *, weights_only: bool) -> Resumed:
    """Read the values of Megatron-LM's checkpoint that are not in its tensors, for a run with this layout.

    Raises:
        TrainerError: these versions cannot read it, or the run cannot resume from it.
        OSError: the storage fails.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(path))
    except (Exception, CheckpointException) as error:
        refuse_code(error, path)
        if not (path / COMMON).exists():
            raise TrainerError(
                f"megatron-core {megatron.core.__version__} cannot read it, since it has no {COMMON}. Use the version "
                "of megatron-core that wrote it, 0.19 or later"
            ) from error
        raise_environment_fault(error, path)
        raise TrainerError(f"{COMMON} cannot be read ({type(error).__name__}: {error})") from error
    return megatron_lm.resumed(common, layout, weights_only=weights_only)


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
        raise TrainerError(str(error), where=path) from error
    if "model" not in resumed.sections:
        raise TrainerError(
            f"{path} does not describe its model: neither the trainer nor pretrain_gpt.py wrote it. Start a run from "
            "it with checkpoint.load and checkpoint.finetune: true, and use that run's checkpoints"
        )
    model = resumed.sections["model"]
    if resumed.tokenizer_type == "GPT2BPETokenizer":
        model = {"vocab_size": GPT2_VOCABULARY, **model}
    return model, resumed
