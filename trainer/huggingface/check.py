"""Compares the logits of an exported model in transformers with the logits of the trainer's model, in fp32 on a CPU."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import torch

from trainer.contract.errors import TrainerError
from trainer.distributed import device
from trainer.distributed.loopback import single_process_group
from trainer.huggingface.source import Source

TOLERANCE = 1e-5
"""Maximum difference of two logits, relative to the largest one."""

NUM_PROMPTS, PROMPT_LENGTH = 4, 64


def compare(source: Source, directory: Path) -> str:
    """Compare the logits of 4 prompts of random tokens. Returns a line with the result.

    Weights that were rounded for the export are rounded in the trainer's model too. Rounded weights with adapters added
    differ from rounded weights next to adapters, so adapters are added in both models, and the trainer's model with
    added adapters is compared in fp32 with its own model next to adapters.

    Raises:
        TrainerError: transformers is not installed, or the logits differ.
    """
    _require("transformers")
    prompts = _prompts(source)
    theirs, dtype = _transformers_logits(directory, prompts)
    error = _difference(trainer_logits(source, prompts, dtype, merged=True), theirs)
    if source.base is not None:
        merged = trainer_logits(source, prompts, merged=True)
        error = max(error, _difference(trainer_logits(source, prompts), merged))
    return _judged(error)


def compare_adapter(source: Source, directory: Path, base: str | None, dtype: torch.dtype) -> str:
    """Compare the logits of adapters in PEFT, next to the model in the directory `base`, with the trainer's.

    Adapters that were rounded to `dtype` for the export are rounded in the trainer's model too.

    Raises:
        TrainerError: transformers or PEFT is not installed, there is no such directory, or the logits differ.
    """
    _require("transformers")
    _require("peft")
    if base is None or not Path(base).is_dir():
        named = "no base model is known" if base is None else f"{base} is not a directory"
        raise TrainerError(
            f"--check needs the base model as a Hugging Face directory, but {named}. Name it with --base-model"
        )
    prompts = _prompts(source)
    theirs, of_base = _transformers_logits(Path(base), prompts, directory)
    return _judged(_difference(trainer_logits(source, prompts, of_base, of_adapters=dtype), theirs))


def _require(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise TrainerError(f"--check needs {package}. Install it with: pip install {package}")


def _prompts(source: Source) -> torch.Tensor:
    """Prompts [prompt, position] of random tokens."""
    length = min(PROMPT_LENGTH, source.model.max_position_embeddings or PROMPT_LENGTH)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, source.model.vocab_size or 1, (NUM_PROMPTS, length), generator=generator)


def _difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """Maximum difference of two logits, relative to the largest one. `ours` may have padding of the vocabulary."""
    return float((ours[..., : theirs.shape[-1]] - theirs).abs().max() / theirs.abs().max())


def _judged(error: float) -> str:
    if not error <= TOLERANCE:
        raise TrainerError(
            f"the logits of the export differ from the checkpoint's by {error:.1e} of the largest one, more than "
            f"{TOLERANCE:.0e}. Nothing was written. Please report this with the model section of the checkpoint"
        )
    return f"checked: the logits of {NUM_PROMPTS} prompts differ from the checkpoint's by at most {error:.1e}"


def trainer_logits(
    source: Source,
    prompts: torch.Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    of_adapters: torch.dtype = torch.float32,
    merged: bool = False,
) -> torch.Tensor:
    """Logits [prompt, position, padded vocabulary] of the trainer's model in fp32, with weights rounded to `dtype`.

    Adapters stay separate from the weights and are rounded to `of_adapters`. With `merged`, they are added
    to the weights before these are rounded.
    """
    device.prepare("cpu")
    from trainer.huggingface.logits import logits  # imports megatron.core: after `device.prepare`

    with warnings.catch_warnings():  # megatron.core and torch warn of what concerns their own code
        warnings.simplefilter("ignore")
        with single_process_group():
            return logits(source, prompts, dtype, of_adapters, merged)


def _transformers_logits(
    directory: Path, prompts: torch.Tensor, adapter: Path | None = None
) -> tuple[torch.Tensor, torch.dtype]:
    """Logits in fp32, and the data type of the weights in `directory`, without those of the `adapter`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.set_verbosity_error()  # transformers lists the tensors of MTP layers, which it does not use
        model = AutoModelForCausalLM.from_pretrained(directory, dtype="auto", local_files_only=True)
        dtype = model.dtype
        model = model.float()
        if adapter is not None:
            from peft import PeftModel

            model = PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            return model.eval()(prompts).logits, dtype
