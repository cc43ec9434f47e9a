"""Checks that a pair was encoded with GPT-2's vocabulary: decodes documents and encodes their text again.

Byte-level BPE keeps every byte, so decoding returns the exact text, and a vocabulary encodes a text in one way only.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import numpy as np

from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.inspection import gpt2_decoder
from hpcgen.data.pair import Pair
from hpcgen.data.tokenizer import load_tokenizer
from hpcgen.errors import Problem, problem_of
from trainer.contract.files.index_header import bin_path

_MAX_TOKENS = 20_000_000
"""Approximate number of tokens to encode again. In a larger pair, the documents are spread evenly over the pair."""
_BATCH = 256
"""Documents per encoder call."""


class Reencoder:
    """Encoder and decoder of a tokenizer of kind gpt2. Thread-safe.

    Raises:
        HpcgenError: see `load_tokenizer`.
    """

    def __init__(self, config: TokenizerConfig) -> None:
        self._encode = load_tokenizer(config).encode
        self._decoder, _ = gpt2_decoder(config)

    def compare(self, pair: Pair) -> tuple[int, Problem | None]:
        """Returns the number of matching documents in a valid pair, and a finding for the first mismatch."""
        step = -(-int(pair.lengths.sum(dtype=np.int64)) // _MAX_TOKENS) or 1
        numbers, done = iter(range(0, pair.num_documents, step)), 0
        while batch := list(islice(numbers, _BATCH)):
            for number, is_same in zip(batch, self._are_same(pair, batch), strict=True):
                if not is_same:
                    return done, problem_of(
                        bin_path(pair.prefix),
                        f"document {number:,} was not encoded with GPT-2's vocabulary",
                        "remove the pair and run the stage again",
                    )
                done += 1
        return done, None

    def _are_same(self, pair: Pair, numbers: list[int]) -> Iterator[bool]:
        """Yields for each document whether encoding its text again returns the same ids (without end of document)."""
        before = [pair.document(number)[:-1] for number in numbers]
        texts = self._decoder.decode_batch([ids.tolist() for ids in before], skip_special_tokens=False)
        tokens, lengths = self._encode(texts)
        for ids, again in zip(before, np.split(tokens, np.cumsum(lengths)[:-1]), strict=True):
            yield np.array_equal(ids, again)
