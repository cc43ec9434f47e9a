"""Compares the logits of an exported model in transformers with the logits of the trainer's model, in fp32 on a CPU."""

from __future__ import annotations

import dataclasses
import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import (
    BlendConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.distributed import device
from trainer.distributed.loopback import single_process_group
from trainer.huggingface.adapters import StoredAdapters
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

    Adapters are next to the weights and rounded to `of_adapters`. With `merged`, they are added to the weights before
    these are rounded.
    """
    device.prepare("cpu")
    with warnings.catch_warnings():  # megatron.core and torch warn of what concerns their own code
        warnings.simplefilter("ignore")
        with single_process_group():
            return _logits(source, prompts, dtype, of_adapters, merged)


def _logits(
    source: Source, prompts: torch.Tensor, dtype: torch.dtype, of_adapters: torch.dtype, merged: bool
) -> torch.Tensor:
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.utils import unwrap_model

    import trainer.checkpoint.unpickling  # noqa: F401  # before Core reads files
    from trainer.checkpoint import state as contents
    from trainer.lora.adapter import is_adapter
    from trainer.model import kernels
    from trainer.model.build import build_model

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        config = _config(source, LoraConfig() if merged else source.lora)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        [wrapped] = build_model(config, groups, kernels.choose(config))
        model = unwrap_model(wrapped)
        base = (source.base or source).path
        _load(model, base, contents.sharding(groups), lambda name: not is_adapter(name))
        with torch.no_grad():
            if source.base is not None and merged:
                _add_adapters(model, source)
            elif source.base is not None:
                _load(model, source.path, contents.sharding(groups, adapters=True), is_adapter)
            for name, parameter in model.named_parameters():
                parameter.copy_(parameter.to(of_adapters if is_adapter(name) else dtype))
            positions = torch.arange(prompts.shape[1]).expand_as(prompts)
            logits: torch.Tensor = model.eval()(prompts, positions, None)
        return logits
    finally:
        parallel_state.destroy_model_parallel()


def _load(
    model: torch.nn.Module, checkpoint: Path, sharding: dict[str, Any], is_part: Callable[[str], bool]
) -> None:
    """Load the weights that `is_part` chooses by their names."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    sharded = model.sharded_state_dict(metadata=sharding)
    weights = {name: value for name, value in sharded.items() if is_part(name)}
    loaded = dist_checkpointing.load({"model": weights}, str(checkpoint), strict=StrictHandling.IGNORE_ALL)
    absent = model.load_state_dict(loaded["model"], strict=False).missing_keys
    missing = [name for name in absent if "_extra_state" not in name and is_part(name)]
    assert not missing, missing


def _add_adapters(model: torch.nn.Module, source: Source) -> None:
    adapters = StoredAdapters(source.path, source.lora, source.model)
    for linear in adapters.linears:
        for expert, name in enumerate(linear.module_names):
            delta = adapters.delta(linear, None if linear.num_experts is None else expert)
            model.get_parameter(f"{name}.weight").add_(delta)


def _config(source: Source, lora: LoraConfig) -> TrainerConfig:
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
            lora=lora,
        )
    )


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
