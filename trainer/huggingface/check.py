"""Compares the logits of an exported model in transformers with the logits of the trainer's model, in fp32 on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from pathlib import Path

import torch

from trainer.contract.config import (
    BlendConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.distributed import device
from trainer.huggingface.source import Source

TOLERANCE = 1e-5
"""Maximum difference of two logits, relative to the largest one."""

NUM_PROMPTS, PROMPT_LENGTH = 4, 64


def compare(source: Source, directory: Path) -> str:
    """Compare the logits of 4 prompts of random tokens. Returns a line with the result.

    Weights that were rounded for the export are rounded in the trainer's model too.

    Raises:
        TrainerError: transformers is not installed, or the logits differ.
    """
    if importlib.util.find_spec("transformers") is None:
        raise TrainerError("--check needs transformers. Install it with: pip install transformers")
    length = min(PROMPT_LENGTH, source.model.max_position_embeddings or PROMPT_LENGTH)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, source.model.vocab_size or 1, (NUM_PROMPTS, length), generator=generator)
    theirs, dtype = _transformers_logits(directory, prompts)
    ours = trainer_logits(source, prompts, dtype)[..., : theirs.shape[-1]]
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    if not error <= TOLERANCE:
        raise TrainerError(
            f"the logits of the export differ from the checkpoint's by {error:.1e} of the largest one, more than "
            f"{TOLERANCE:.0e}. Nothing was written. Please report this with the model section of the checkpoint"
        )
    return f"checked: the logits of {NUM_PROMPTS} prompts differ from the checkpoint's by at most {error:.1e}"


def trainer_logits(source: Source, prompts: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [prompt, position, padded vocabulary] of the trainer's model in fp32, with weights rounded to `dtype`."""
    device.prepare("cpu")
    with warnings.catch_warnings():  # megatron.core and torch warn of what concerns their own code
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            return _logits(source, prompts, dtype)
        finally:
            torch.distributed.destroy_process_group()


def _logits(source: Source, prompts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model

    import trainer.checkpoint.unpickling  # noqa: F401  # before Core reads files
    from trainer.model import kernels
    from trainer.model.build import build_model

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        config = _config(source)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        [wrapped] = build_model(config, groups, kernels.choose(config))
        model = unwrap_model(wrapped)
        sharded = {"model": model.sharded_state_dict()}
        loaded = dist_checkpointing.load(sharded, str(source.path), strict=StrictHandling.IGNORE_ALL)
        absent = model.load_state_dict(loaded["model"], strict=False).missing_keys
        assert all("_extra_state" in name for name in absent), absent
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
            positions = torch.arange(prompts.shape[1]).expand_as(prompts)
            logits: torch.Tensor = model.eval()(prompts, positions, None)
        return logits
    finally:
        parallel_state.destroy_model_parallel()


def _config(source: Source) -> TrainerConfig:
    return resolve(
        TrainerConfig(
            name="check",
            run_dir="",
            device="cpu",
            world_size=1,
            model=dataclasses.replace(
                source.model, attention_dropout=0.0, hidden_dropout=0.0, mtp_num_layers=None
            ),
            parallelism=ParallelismConfig(),
            training=TrainingConfig(micro_batch_size=1, global_batch_size=1, train_iters=1, precision="fp32"),
            optimizer=OptimizerConfig(lr=1.0, lr_warmup_iters=0),
            data=BlendConfig(mock=True),
        )
    )


def _transformers_logits(directory: Path, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.dtype]:
    """Logits in fp32, and the data type of the exported weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # transformers lists the tensors of MTP layers, which it does not use
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
        dtype = model.dtype
        model = model.float().eval()
        with torch.no_grad():
            return model(prompts).logits, dtype
