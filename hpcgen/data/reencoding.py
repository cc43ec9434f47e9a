"""Whether the ids of a pair are those of a GPT-2 tokenizer: documents are decoded, and their text encoded again.

Byte-level BPE keeps every byte, so the text comes back exactly, and one vocabulary encodes a text in one way.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.indexed_dataset import bin_path
from hpcgen.data.inspection import gpt2_decoder
from hpcgen.data.pair import Pair
from hpcgen.data.tokenizer import load_tokenizer

_MOST_TOKENS = 20_000_000
"""Tokens of a pair that are encoded again: of a larger one, in documents that are spread evenly over it."""
_BATCH = 256
"""Documents encoded together."""


class Reencoder:
    """The tokenizer of `config`, of the kind gpt2, both ways. Threads may share it.

    Raises:
        HpcgenError: as `load_tokenizer`.
    """

    def __init__(self, config: TokenizerConfig, threads: int) -> None:
        self._encode = load_tokenizer(config, threads=threads).encode
        self._decoder, _ = gpt2_decoder(config)

    def compare(self, pair: Pair) -> tuple[int, str]:
        """How many documents of a valid pair were encoded again, and what is wrong with the first that differs."""
        step = -(-int(pair.lengths.sum(dtype=np.int64)) // _MOST_TOKENS) or 1
        numbers, done = iter(range(0, pair.num_documents, step)), 0
        while batch := list(islice(numbers, _BATCH)):
            for number, is_same in zip(batch, self._are_same(pair, batch), strict=True):
                if not is_same:
                    return done, (
                        f"{bin_path(pair.prefix)}: document {number:,} was encoded with another vocabulary than "
                        f"GPT-2's; remove the pair and run the stage again"
                    )
                done += 1
        return done, ""

    def _are_same(self, pair: Pair, numbers: list[int]) -> Iterator[bool]:
        """Whether each document has the ids that its text gives now, without its end-of-document token."""
        before = [pair.document(number)[:-1] for number in numbers]
        texts = self._decoder.decode_batch([ids.tolist() for ids in before], skip_special_tokens=False)
        tokens, lengths = self._encode(texts)
        for ids, again in zip(before, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
            yield np.array_equal(ids, again)
