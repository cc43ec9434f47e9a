"""Models in the test's own process, as its only rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.model.experts import Router
from trainer.model.kernels import Kernels

ON_CPU = Kernels(None, "torch", "native", None, on_gpu=False)


def resolved(directory: Path, model: dict[str, Any], **training: Any) -> TrainerConfig:
    document = gpt_config("x", directory, model)
    document["training"] |= training
    return resolve(configuration.from_dict(TrainerConfig, document, "test"))


def small_router(process_groups: ProcessGroupCollection, **keys: Any) -> Router:
    """A router of four experts for tokens of 16 numbers. Its losses have the factors 0.1 and 0.01."""
    config = TransformerConfig(
        **{
            "num_layers": 1,
            "hidden_size": 16,
            "num_attention_heads": 1,
            "num_moe_experts": 4,
            "moe_aux_loss_coeff": 0.1,
            "moe_z_loss_coeff": 0.01,
            "add_bias_linear": False,
            "calculate_per_token_loss": True,
            "init_method": torch.nn.init.normal_,
            **keys,
        }
    )
    return Router(config=config, pg_collection=process_groups)
