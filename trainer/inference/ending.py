"""The text of new tokens, and where a stop string ends it: exactly where lm-eval's own model `hf` ends it.

`hf` decodes the last tokens together with special tokens. If they contain a stop string, it generates no further token.
It then decodes all new tokens without special tokens, and cuts the text at each stop string in the order of the list.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.inference.tokenizer import INCOMPLETE, Tokenizer

LOOKBACK = 2
"""Number of last tokens to decode in addition to the tokens of a stop string, as in `hf`, because the model may spell
the string with other tokens."""


class Ending:
    """The text of new tokens with one tokenizer and its stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._sizes = {string: len(tokenizer.encode(string)) + LOOKBACK for string in stop}

    def is_spelled(self, tokens: Sequence[int]) -> bool:
        """True if the last tokens contain a stop string. It may consist of special tokens."""
        return any(string in self._tokenizer.spell(tokens[-size:]) for string, size in self._sizes.items())

    def text(self, tokens: Sequence[int], context: Sequence[int]) -> str:
        """Text of `tokens` after the tokens `context`, without special tokens."""
        return self._tokenizer.decode([*context, *tokens])[len(self._tokenizer.decode(context)) :]

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        for string in self._stop:
            text = text.partition(string)[0]
        return text

    def settled(self, tokens: Sequence[int], context: Sequence[int]) -> tuple[str, bool]:
        """The part of the text that later tokens cannot change, and whether a stop string has ended the text.

        A longer stop string may spread over more tokens than `is_spelled` decodes.
        """
        byte = self._tokenizer.first_byte_id
        text = self.text(tokens if byte is None else [*tokens, byte], context).rstrip(INCOMPLETE)
        certain = text[: len(text) - self._begun(text)]
        # `cut` depends on the order of stop strings that overlap, so wait while one may still appear before the end of
        # another.
        is_ended = any(string in certain for string in self._stop)
        begins = min((offset for string in self._stop if (offset := text.find(string)) >= 0), default=None)
        return certain[:begins], is_ended

    def _begun(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        beginnings = (
            size
            for string in self._stop
            for size in range(min(len(string) - 1, len(text)), 0, -1)
            if text.endswith(string[:size])
        )
        return max(beginnings, default=0)
