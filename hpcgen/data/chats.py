"""Chats to text and to the tokens that are learned.

Each line of a chat corpus becomes the text that the tokenizer's chat template renders, and the positions of the
assistant's answers in it. Special tokens are those that the template writes: nothing is added before or after a chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpcgen.config.corpus import ChatConfig
from hpcgen.config.tokenizer import TokenizerConfig, eod_token
from hpcgen.data.chat_template import chat_template
from hpcgen.data.jsonl import Block, Reject, Texts, UnreadableError, read_object
from hpcgen.data.tokenizer import Encode
from hpcgen.errors import FilePlace, HpcgenError
from trainer.chats.answers import Span, render_answers
from trainer.chats.chat import Completion, read_chat
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.chats.template import ChatTemplate
from trainer.contract.files.loss_mask import LEARNED

MERGED = "an answer shares a token with the text around it"
"""Kind of rejects whose answers do not begin or end between two tokens."""
_CONTEXT = 20
"""Characters that a message shows on each side of a border."""


def chat_reader(chat: ChatConfig, tokenizer: TokenizerConfig) -> Callable[[Block], Texts]:
    """Returns a thread-safe function that renders the chats of a block.

    It rejects lines without a chat, with an incomplete message, or that the template refuses.

    Raises:
        HpcgenError: the tokenizer has no chat template, or it is invalid.
    """
    template = chat_template(chat, tokenizer)
    end = eod_token(tokenizer) or ""

    def read(block: Block) -> Texts:
        if block.too_long is not None:
            return Texts([], np.empty(0, np.int64), [block.too_long], [])
        texts, answers, numbers, rejects = list[str](), list[list[Span]](), list[int](), list[Reject]()
        for number, line in _lines(block):
            try:
                text, spans = _rendered(template, end, read_object(line))
            except (BadChatError, UnreadableError) as error:
                rejects.append(Reject(block.path, number, error.kind, error.reason, line))
            except ChatTemplateError as error:
                raise _refusal(error, block.path, number) from error
            else:
                texts.append(text)
                answers.append(spans)
                numbers.append(number)
        return Texts(texts, np.asarray(numbers, np.int64), rejects, answers)

    return read


def learned_tokens(
    encode: Encode, chats: Texts, tokens: NDArray[Any], lengths: NDArray[np.int64]
) -> tuple[NDArray[np.uint8], dict[int, int]]:
    """Finds the tokens of the answers.

    Args:
        encode: Encoder of texts, which made `tokens` [sum(lengths)] of `chats.texts`.

    Returns:
        The loss mask [sum(lengths)], and the chats with an answer that does not begin or end between two tokens: index
        -> position of that border in the text. Their mask is 0.
    """
    assert chats.answers is not None
    pieces = [list(_pieces(text, spans)) for text, spans in zip(chats.texts, chats.answers, strict=True)]
    found, sizes = encode([piece for of_chat in pieces for piece in of_chat])
    mask = np.zeros(len(tokens), np.uint8)
    wrong: dict[int, int] = {}
    begin = piece_begin = first = 0
    for index, of_chat in enumerate(pieces):
        own = sizes[first : first + len(of_chat)]
        end, piece_end = begin + int(lengths[index]), piece_begin + int(own.sum())
        if np.array_equal(tokens[begin:end], found[piece_begin:piece_end]):
            borders: list[int] = np.cumsum(own).tolist()
        else:  # some tokenizers treat the beginning of a text differently
            borders = _borders_of_beginnings(encode, of_chat, tokens[begin:end])
        if len(borders) < len(of_chat):
            wrong[index] = sum(map(len, of_chat[: len(borders) + 1]))
        else:
            for answer in range(1, len(of_chat), 2):
                mask[begin + borders[answer - 1] : begin + borders[answer]] = LEARNED
        begin, piece_begin, first = end, piece_end, first + len(of_chat)
    return mask, wrong


def merged_reject(block: Block, number: int, text: str, border: int) -> Reject:
    """The reject of line `number`, a chat with an answer that does not begin or end between two tokens."""
    around = f"{text[max(0, border - _CONTEXT) : border]!r} and {text[border : border + _CONTEXT]!r}"
    reason = (
        f"{MERGED}: the border is between {around}. A prompt never ends with such a token. Remove the space at the "
        "beginning of the answer, or change the chat template"
    )
    return Reject(block.path, number, MERGED, reason, _line(block, number - block.first_line))


def _pieces(text: str, spans: Sequence[Span]) -> Iterator[str]:
    """Cuts a text at its answers, which have odd indices. Other pieces may be empty."""
    position = 0
    for begin, end in spans:
        yield text[position:begin]
        yield text[begin:end]
        position = end
    yield text[position:]


def _borders_of_beginnings(encode: Encode, pieces: Sequence[str], tokens: NDArray[Any]) -> list[int]:
    """Number of tokens up to the end of each piece, as long as the tokens of a beginning are the first of the text."""
    beginnings = ["".join(pieces[: count + 1]) for count in range(len(pieces))]
    found, sizes = encode(beginnings)
    begin, borders = 0, list[int]()
    for size in sizes.tolist():
        if not np.array_equal(found[begin : begin + size], tokens[:size]):
            break
        borders.append(size)
        begin += size
    return borders


def _rendered(template: ChatTemplate, end: str, document: dict[str, Any]) -> tuple[str, list[Span]]:
    chat = read_chat(document)
    if not isinstance(chat, Completion):
        return render_answers(template, chat)
    completion = chat.completion if chat.completion.endswith(end) else chat.completion + end
    return chat.prompt + completion, [(len(chat.prompt), len(chat.prompt) + len(completion))]


def _lines(block: Block) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line."""
    return enumerate(block.data[:-1].split(b"\n"), block.first_line)


def _line(block: Block, index: int) -> bytes:
    begin = int(block.newlines[index - 1]) + 1 if index else 0
    return block.data[begin : int(block.newlines[index])]


def _refusal(error: ChatTemplateError, path: Path, number: int) -> HpcgenError:
    return HpcgenError(error.mistakes[0], f"the chat is {FilePlace(path, number + 1)}")
