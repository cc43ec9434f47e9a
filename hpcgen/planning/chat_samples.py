"""Samples that the chats of a pair fill, computed like the trainer's. Needs numpy, of the extra data."""

from __future__ import annotations

import numpy

from trainer.contract.config import TrainerConfig
from trainer.contract.files.index_header import HEADER_SIZE, idx_path
from trainer.contract.files.loss_mask import mask_path
from trainer.contract.files.regular_file import open_regular
from trainer.packing.samples import ChatSamples, pack_chats


def packed_chats(prefix: str, num_chats: int, trainer: TrainerConfig) -> ChatSamples | None:
    """The samples of the first `num_chats` chats of a pair.

    None if none of them can be read, or if the loss mask is missing, too short or damaged: the trainer refuses such a
    pair.

    Raises:
        OSError: a file cannot be read.
    """
    if not num_chats:
        return None
    try:
        with open_regular(idx_path(prefix)) as file:
            lengths = numpy.asarray(numpy.memmap(file, "<i4", "r", HEADER_SIZE, (num_chats,)))
        with open_regular(mask_path(prefix)) as file:
            mask = numpy.memmap(file, numpy.uint8, "r", 0, (int(lengths.sum(dtype=numpy.int64)),))
        samples = pack_chats(lengths, mask, trainer.model.seq_length, packed=trainer.data.sft_packing)
    except (FileNotFoundError, ValueError):
        return None
    return samples if len(samples) else None
