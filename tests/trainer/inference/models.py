"""Models in this process with the weights of small models of transformers, and an alphabet as their tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel

from tests.trainer.families import FAMILIES, LENGTH, VOCAB, megatron_weights
from trainer.contract.config import TrainerConfig
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.distributed.rendezvous import Ranks
from trainer.inference.checkpoint import inference_config
from trainer.inference.groups import open_groups
from trainer.inference.model import Model
from trainer.inference.tokenizer import Tokenizer
from trainer.model import build
from trainer.model.core_config import transformer_config
from trainer.model.kernels import TORCH

ONE = Ranks(0, 0, 1, "test")

FIRST = 0x100
"""Code point of token 0, so that each token is one character."""

TOKENIZER = Tokenizer(
    name="alphabet",
    encode=lambda text: [ord(character) - FIRST for character in text],
    decode=lambda ids: "".join(chr(FIRST + index) for index in ids),
    size=VOCAB,
    eod_id=None,
)


def checkpoint(model: dict[str, Any]) -> Checkpoint:
    """A record without files."""
    record = {"model": model, "precision": "fp32"}
    return Checkpoint(
        path=Path("/none/iter_0000001"),
        iteration=1,
        record=record,
        flaw=None,
        is_cut_off=False,
        is_foreign=False,
        is_pinned=False,
    )


def family(name: str, length: int = LENGTH, device: Literal["cuda", "cpu"] = "cpu") -> tuple[Model, Any]:
    """Our model and transformers' model of a family with the same weights, for sequences of up to `length` tokens."""
    found = FAMILIES[name]
    positions = "n_positions" if "n_positions" in found.options else "max_position_embeddings"
    found = replace(
        found, options=found.options | {positions: length}, model=found.model | {"seq_length": length}
    )
    reference = found.build()
    config, chunk = build_chunk(found.model, device)
    weights = megatron_weights(reference)
    with torch.no_grad():
        for key, parameter in chunk.named_parameters():
            parameter.copy_(weights[key])
    return Model(config, chunk, open_groups(config, ONE)), reference


def build_chunk(
    model: dict[str, Any], device: Literal["cuda", "cpu"] = "cpu"
) -> tuple[TrainerConfig, GPTModel]:
    """The configuration of a single rank, and Core's model with undefined weights."""
    config = inference_config(checkpoint(model), device=device, precision=None)
    groups = open_groups(config, ONE)
    [chunk] = build.build_chunks(config, transformer_config(config, TORCH), groups, TORCH)
    return config, chunk


def random_prompts(number: int, longest: int = 16) -> list[str]:
    """Prompts of 1 to `longest` tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1 + index * (longest - 1) // max(1, number - 1) for index in range(number)]
    return [
        TOKENIZER.decode(torch.randint(VOCAB, (length,), generator=generator).tolist()) for length in lengths
    ]
