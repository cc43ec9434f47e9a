"""The documents of an input: blocks of lines or rows, and their texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from hpcgen.config.corpus import CorpusConfig
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.chats import chat_reader
from hpcgen.data.compression import content
from hpcgen.data.hashed_files import CheckedFile
from hpcgen.data.jsonl import Block, Reject, Texts, read_blocks, text_reader
from hpcgen.data.suffixes import PARQUET
from hpcgen.data.unit import Input
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.data.parquet import Rows

    Documents: TypeAlias = Block | Rows


def documents(item: Input, source: CheckedFile, corpus: CorpusConfig) -> Iterator[Documents]:
    """Yields the documents of one input, in blocks."""
    if item.path.suffix != PARQUET:
        return read_blocks(item.path, content(item.path, source))
    from hpcgen.data.parquet import chat_lines, read_rows  # needs the extra `parquet`

    if corpus.chat is not None:
        return read_blocks(item.path, chat_lines(item.path, source))
    return read_rows(item.path, source, corpus.json_key)


def document_reader(corpus: CorpusConfig, tokenizer: TokenizerConfig) -> Callable[[Documents], Texts]:
    """Returns a thread-safe function that extracts the texts of a block.

    Raises:
        HpcgenError: the documents are chats, and the tokenizer has no valid chat template.
    """
    read_lines = text_reader(corpus.json_key) if corpus.chat is None else chat_reader(corpus.chat, tokenizer)

    def read(block: Documents) -> Texts:
        found = read_lines(block) if isinstance(block, Block) else block.read()
        refuse_rejects(found.rejects, corpus)
        return found

    return read


def refuse_rejects(rejects: Sequence[Reject], corpus: CorpusConfig) -> None:
    """Raises an error for the first reject, unless bad documents are skipped."""
    if rejects and corpus.bad_documents == "fail":
        raise HpcgenError(str(rejects[0]), "correct it, or set bad_documents: skip")
