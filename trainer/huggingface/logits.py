"""Logits of the trainer's model of a checkpoint, on a CPU. Imports megatron.core: after `device.prepare`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model

import trainer.checkpoint.unpickling  # noqa: F401  # before Core reads files
from trainer.checkpoint import state as contents
from trainer.contract.config import (
    BlendConfig,
    LoraConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve
from trainer.huggingface.adapters import StoredAdapters
from trainer.huggingface.source import Source
from trainer.lora.adapter import is_adapter
from trainer.model import kernels
from trainer.model.build import build_model


def logits(
    source: Source, prompts: torch.Tensor, dtype: torch.dtype, of_adapters: torch.dtype, merged: bool
) -> torch.Tensor:
    """Logits as `check.trainer_logits` returns them. torch.distributed must be initialized, with one rank."""
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
            found: torch.Tensor = model.eval()(prompts, positions, None)
        return found
    finally:
        parallel_state.destroy_model_parallel()


def _load(
    model: torch.nn.Module, checkpoint: Path, sharding: dict[str, Any], is_part: Callable[[str], bool]
) -> None:
    """Load the weights that `is_part` chooses by their names."""
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
