"""The loss mask of a pair of chats: PREFIX.mask, next to PREFIX.bin and PREFIX.idx.

The file has one byte for each token of the .bin, in its order and without a header: LEARNED if the token belongs to an
answer of the assistant, which includes the token that ends the answer, else 0.
"""

from __future__ import annotations

import os

from trainer.contract.problem import FilePlace, Problem

SUFFIX = ".mask"
LEARNED = 1
"""Value of a token that counts in the loss as a label."""


def mask_path(prefix: str | os.PathLike[str]) -> str:
    """Path of the mask of the pair at `prefix`."""
    return os.fspath(prefix) + SUFFIX


def has_mask(prefix: str | os.PathLike[str]) -> bool:
    """Returns whether the pair at `prefix` has a mask, so that its documents are chats."""
    return os.path.lexists(mask_path(prefix))


def can_learn(mask: bytes, seq_length: int) -> bool:
    """Returns whether a run learns something of a chat, given its part of the mask and the run's sequence length.

    A sample holds seq_length inputs and their labels, so up to seq_length + 1 tokens. A longer chat ends after its last
    answer that fits (`trainer.packing.samples.kept_tokens`, for many chats).
    """
    end = len(mask)
    if end > seq_length + 1:
        end = mask.rfind(bytes((LEARNED, 0)), 0, seq_length + 2) + 1
    return LEARNED in mask[1:end]


def kind_problem(prefix: str | os.PathLike[str], *, sft: bool, key: str) -> Problem | None:
    """The problem of a pair of chats in a run on texts, or of texts in a run on chats. `key` has the value `sft`."""
    path = mask_path(prefix)
    if has_mask(prefix) == sft:
        return None
    if sft:
        reason = f"has no loss mask, {path}, so its documents are no chats, but {key} is true"
        hint = f"remove {key} to learn every token, or make the pair from chats (data.corpus.chat)"
    else:
        reason = f"has a loss mask, {path}, so its documents are chats, but {key} is false"
        hint = f"set {key}: true to learn the answers of the chats, or name a pair of texts"
    return Problem("", reason, hint, about=(key,), subject="it")


def size_problem(prefix: str | os.PathLike[str], num_tokens: int) -> Problem | None:
    """The problem of a mask whose size is not `num_tokens`, the number of tokens of its pair. None if it fits.

    Raises:
        OSError: the mask is missing or cannot be read.
    """
    path = mask_path(prefix)
    size = os.stat(path).st_size  # noqa: PTH116
    if size == num_tokens:
        return None
    reason = (
        f"has {size:,} bytes, but the pair has {num_tokens:,} tokens. The two do not belong together, or one is "
        "truncated"
    )
    return Problem("", reason, "make the pair again", where=FilePlace(path), subject="the loss mask")
