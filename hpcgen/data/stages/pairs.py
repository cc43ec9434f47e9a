"""Base class of the stages that make pairs: tokenize and prepare."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.record import Record, TokenizerIdentity, configuration_hash
from hpcgen.data.stages.base import Bounds, Context, DataStage
from hpcgen.data.stages.extract import expansion
from hpcgen.data.unit import Input, Unit
from hpcgen.errors import HpcgenError

if TYPE_CHECKING:
    from hpcgen.data.listed_files import ManifestFile

_TOKEN_BYTES = {"uint16": (0.35, 0.95), "int32": (0.5, 1.9), "bytes": (1.6, 2.05)}
"""Bytes of .bin per byte of JSON Lines. Measured with GPT-2's vocabulary: SlimPajama 0.46, source code 0.83. If most of
a line is metadata, the ratio may be close to 0.
An id takes 2 bytes if the vocabulary has fewer than 65,500 entries, otherwise 4. The byte tokenizer has one id per
byte."""


class PairStage(DataStage, ABC):
    """A stage that makes .bin/.idx pairs.

    With k outputs, line n of the only input goes to output n mod k. Each document becomes one sequence that ends
    with the end-of-document token. A document without tokens becomes a document without a sequence, as in
    Megatron-LM, or is dropped with `drop_empty`.
    """

    folder = "tokens"
    makes_output_files = True

    def unit(self, job: CorpusJob, inputs: tuple[Input, ...], names: Sequence[str]) -> Unit:
        """The unit that makes the pairs `names` of `inputs`."""
        return Unit(
            stage=self.name,
            inputs=inputs,
            outputs=tuple(f"{self.folder}/{name}" for name in names),
            makes_pairs=True,
            has_masks=job.corpus.chat is not None,
        )

    def make(self, unit: Unit, job: CorpusJob, context: Context) -> Record:
        """Makes the pairs of a unit.

        Raises:
            HpcgenError: an input is damaged or has changed; a line has no readable text and bad documents are not
                skipped, or too many were skipped; ids differ from those of the library `tokenizers`; an output would
                be empty.
            OSError: an output cannot be written. Nothing is published in either case.
        """
        from hpcgen.data.tokenize import loaded_tokenizer, make_pairs  # imports numpy, which only tasks need

        tokenizer = loaded_tokenizer(job.tokenizer)
        if self.configuration(job) != context.configuration:
            raise HpcgenError(
                "the tokenizer's files have changed since the task started", "run the stage again"
            )
        return make_pairs(unit, job.corpus, tokenizer, context)

    def settings(self, job: CorpusJob) -> Mapping[str, Any]:
        """The tokenizer, and the settings for reading documents."""
        corpus, tokenizer = job.corpus, TokenizerIdentity.of(job.tokenizer)
        chat = {}
        if corpus.chat is not None:
            from hpcgen.data.chat_template import template_identity  # imports Jinja

            chat = {"chat": template_identity(corpus.chat, job.tokenizer)}
        return {
            "tokenizer": {
                "kind": tokenizer.kind,
                "eod": tokenizer.eod_id,
                "vocab_size": tokenizer.vocab_size,
                "files": list(tokenizer.files),
            },
            "json_key": corpus.json_key,
            "drop_empty": corpus.drop_empty,
            "bad_documents": corpus.bad_documents,
            **chat,
        }

    def earlier_configuration(self, job: CorpusJob) -> str | None:
        """Hash that earlier versions recorded for the built-in GPT-2 vocabulary, without the vocabulary's content.

        The vocabulary files came from another package then. Records with this hash remain valid, and `hpcgen data
        verify` encodes documents of their pairs again. Returns None for other tokenizers, whose hashes are unchanged.
        """
        tokenizer = job.tokenizer
        if tokenizer.kind != "gpt2" or tokenizer.vocab_file is not None:
            return None
        settings = self.settings(job)
        return configuration_hash({**settings, "tokenizer": settings["tokenizer"] | {"files": []}})

    def modules(self, units: Sequence[Unit]) -> Iterator[str]:
        """The module that tokenizes, and the one for Parquet files."""
        yield "hpcgen.data.tokenize"
        yield from super().modules(units)

    def growth(self, file: ManifestFile) -> Bounds:
        """Bytes of JSON Lines. `output_bounds` multiplies them by the bytes of token ids per byte."""
        return expansion(file.name)

    def output_bounds(self, files: Iterable[tuple[ManifestFile, float]], job: CorpusJob) -> Bounds:
        """Bounds of the size of all pairs."""
        (least, most), (low, high) = (
            super().output_bounds(files, job),
            _TOKEN_BYTES[_kind_of_ids(job.tokenizer)],
        )
        per_id = tokenizers.id_bytes(tokenizers.vocab_size(job.tokenizer))
        masked = 1.0 if job.corpus.chat is None else (per_id + 1) / per_id
        return least * low * masked, most * high * masked

    def certain_bytes(self, item: Input) -> int:
        """Zero, because the lines may contain little more than metadata."""
        return 0


def _kind_of_ids(tokenizer: TokenizerConfig) -> str:
    if tokenizer.kind == "bytes":
        return "bytes"
    return "uint16" if tokenizers.id_bytes(tokenizers.vocab_size(tokenizer)) == 2 else "int32"
