"""Pairs of chats, and configurations of runs that learn them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy

from tests.trainer.runs import GPT, gpt_config
from trainer.contract.files.loss_mask import mask_path

Chat = tuple[Sequence[int], Sequence[int]]
"""Token IDs of a chat, and 1 for each that is learned."""


def write_chats(prefix: Path, chats: Sequence[Chat]) -> str:
    """Write a pair of chats and its loss mask. Returns the prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for tokens, _ in chats:
        builder.add_document(numpy.array(tokens, numpy.uint16), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    masks = [numpy.array(mask, numpy.uint8) for _, mask in chats]
    Path(mask_path(prefix)).write_bytes(numpy.concatenate(masks).tobytes())
    return str(prefix)


def random_chats(count: int, lengths: tuple[int, int] = (8, 40), seed: int = 0) -> list[Chat]:
    """Chats of one or two questions that count upwards, with answers that count downwards.

    The lengths include the first bound, and not the second. The last token of a chat is not learned, as the newline
    that some templates write after an answer.
    """
    random = numpy.random.default_rng(seed)
    return [_chat(random, int(random.integers(*lengths))) for _ in range(count)]


def _chat(random: numpy.random.Generator, length: int) -> Chat:
    parts = numpy.sort(
        random.choice(numpy.arange(1, length - 1), size=3 if length > 10 else 1, replace=False)
    )
    tokens, mask = numpy.zeros(length, int), numpy.zeros(length, int)
    for number, (first, end) in enumerate(zip([0, *parts], [*parts, length - 1], strict=True)):
        start, step = int(random.integers(100, 400)), 1 - 2 * (number % 2)
        tokens[first:end] = start + step * numpy.arange(end - first)
        mask[first:end] = number % 2
    return tokens.tolist(), mask.tolist()


def chat_config(prefix: str, run_dir: Path, model: dict[str, Any] = GPT, **data: Any) -> dict[str, Any]:
    """A run of some steps in fp32 on a CPU that learns the chats of one pair."""
    config = gpt_config(prefix, run_dir, model)
    config["data"] = {"train": [{"prefix": prefix}], "num_workers": 0, "sft": True, **data}
    return config
