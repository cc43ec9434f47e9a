"""Tokenizes files named on the command line into one pair, without a corpus."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcgen.config.corpus import ChatConfig, CorpusConfig, CorpusJob, problems
from hpcgen.data.indexed_dataset import token_dtype
from hpcgen.data.progress import Progress, Step
from hpcgen.data.record import Record, record_path, rejects_text
from hpcgen.data.stages.base import Context
from hpcgen.data.stages.tokenize import TOKENIZE
from hpcgen.data.suffixes import SUFFIXES
from hpcgen.data.tokenize import make_pairs
from hpcgen.data.tokenizer import Tokenizer
from hpcgen.data.unit import Input, Unit
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError
from hpcgen.files import sweep
from hpcgen.text import counted, one_of
from trainer.contract.files import loss_mask
from trainer.contract.files.index_header import bin_path, idx_path
from trainer.contract.files.regular_file import open_regular


@dataclass(frozen=True)
class TokenizeReport:
    """Result of `tokenize_files`."""

    output_prefix: str
    documents_read: int
    documents: int
    """Documents in the pair: documents_read minus rejected documents, and minus empty ones if they are dropped."""
    rejected_documents: int
    """Lines or rows without a readable text; they are in OUTPUT_PREFIX.rejects.jsonl."""
    empty_documents: int
    """Documents read that have no token."""
    sequences: int
    """Documents in the pair that have tokens."""
    tokens: int
    """Token ids in the pair, including end-of-document tokens."""
    learned_tokens: int
    """Tokens of chats that are learned."""
    eod_in_text: int
    """End-of-document ids that come from text that spells the token out."""
    unknown_tokens: int
    """Tokens for text that the tokenizer does not know."""
    lost_characters: int
    """Characters that the tokenizer left out."""
    warnings: tuple[str, ...]
    """The two numbers in words; empty if both are 0."""
    rejects: str
    """Number of rejected documents of each kind."""
    verified_documents: int
    """Number of documents whose ids were compared with the ids from the library `tokenizers`."""
    input_bytes: int
    """Uncompressed size of the JSON Lines, or of the texts in Parquet files."""
    output_bytes: int
    """Size of the pair."""
    dtype: str
    vocab_size: int
    eod_id: int
    backend: str
    """Library that encoded the text: gigatoken, tokenizers or bytes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        skipped = self.documents_read - self.documents - self.rejected_documents
        end = f", each ends with id {self.eod_id}" if not self.learned_tokens else ""
        lines = [
            f"{self.output_prefix}.bin, .idx  ({self.output_bytes:,} bytes, {self.dtype})",
            f"documents  {self.documents_read:,} in = {self.documents:,} out + {skipped:,} skipped + "
            f"{self.rejected_documents:,} rejected; {self.empty_documents:,} empty",
            f"tokens     {self.tokens:,} in {counted(self.sequences, 'sequence')}{end}",
            f"input      {self.input_bytes:,} bytes, encoded with {self.backend}",
        ]
        if self.learned_tokens:
            share = self.learned_tokens / self.tokens
            lines.insert(
                3, f"learned    {self.learned_tokens:,} tokens ({share:.1%}); {self.output_prefix}.mask"
            )
        if self.verified_documents:
            lines.append(
                f"verified   {counted(self.verified_documents, 'document')} against the library tokenizers"
            )
        if self.rejected_documents:
            lines.append(f"rejects    {self.rejects}; see {self.output_prefix}.rejects.jsonl")
        lines += [f"warning    {warning}" for warning in self.warnings]
        if self.eod_in_text:
            lines.append(
                f"note       the text spells out {counted(self.eod_in_text, 'end-of-document token')}"
            )
        return "\n".join(lines)


def tokenize_files(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    chat: ChatConfig | None = None,
    drop_empty: bool = False,
    bad_documents: Literal["fail", "skip"] = "fail",
    max_bad_fraction: float = 0.001,
    verify_fraction: float = 0.0001,
    overwrite: bool = False,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenizeReport:
    """Tokenizes every document of `inputs`, in order, into output_prefix.bin and output_prefix.idx.

    With `chat`, the documents are chats, and output_prefix.mask is their loss mask.
    Documents are handled as in hpcgen.data.stages.pairs. The pair appears only after all of it is on disk;
    .idx and the record come last. `workers` blocks of 4 MiB are parsed and encoded at once (None: one per core);
    the output does not depend on this number.

    Raises:
        HpcgenError: an input is missing, damaged or has a line without text; no document has a token; the
            pair exists and `overwrite` is false; or the output cannot be written. Nothing is published in these cases.
    """
    progress = Progress(TOKENIZE.name, 0, 1, units=1, bytes=sum(_input_size(path) for path in inputs))
    if idx_path(output_prefix).exists() and not overwrite:
        raise HpcgenError(
            f"{idx_path(output_prefix)} already exists", "choose another prefix, or pass --overwrite"
        )
    corpus = CorpusConfig(
        directory=str(output_prefix.parent),
        json_key=json_key,
        chat=chat,
        drop_empty=drop_empty,
        bad_documents=bad_documents,
        max_bad_fraction=max_bad_fraction,
        verify_fraction=verify_fraction,
    )
    if chat is not None:
        _require_chats(corpus, tokenizer)
    unit = _unit(inputs, output_prefix.name, has_masks=chat is not None)

    def advance(step: Step) -> None:
        progress.add(step)
        on_progress(progress)

    context = Context(
        configuration=TOKENIZE.configuration(CorpusJob(corpus=corpus, tokenizer=tokenizer.config)),
        num_cores=lambda: workers or cores(),
        advance=advance,
    )
    mask = Path(loss_mask.mask_path(output_prefix))
    sweep([bin_path(output_prefix), idx_path(output_prefix), mask, record_path(output_prefix)])
    try:
        record = make_pairs(unit, corpus, tokenizer, context)
    except OSError as error:
        raise HpcgenError(f"cannot write {output_prefix}.bin and .idx: {error}") from error
    return _report(record, output_prefix, tokenizer)


def _unit(inputs: Sequence[Path], name: str, *, has_masks: bool) -> Unit:
    """The unit that makes the pair `name` of all inputs."""
    return Unit(
        stage=TOKENIZE.name,
        inputs=tuple(Input(name=str(path), path=path) for path in inputs),
        outputs=(name,),
        makes_pairs=True,
        has_masks=has_masks,
    )


def _require_chats(corpus: CorpusConfig, tokenizer: Tokenizer) -> None:
    """Refuses settings for chats that the tokenizer does not suit. The corpus has no source, but files."""
    for problem in problems(corpus, tokenizer.config):
        if problem.path != "data.corpus.source":
            raise HpcgenError(problem)


def _input_size(path: Path) -> int:
    """Checks the suffix of an input and returns its size on disk."""
    if not path.name.endswith(SUFFIXES):
        raise HpcgenError(f"the name must end in {one_of(SUFFIXES)}", where=path)
    try:
        with open_regular(path) as file:
            return file.seek(0, os.SEEK_END)
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error


def _report(record: Record, output_prefix: Path, tokenizer: Tokenizer) -> TokenizeReport:
    counts = record.counts
    return TokenizeReport(
        output_prefix=str(output_prefix),
        documents_read=counts.documents_in,
        documents=counts.documents_out,
        rejected_documents=counts.rejected,
        empty_documents=counts.empty,
        sequences=counts.sequences,
        tokens=counts.tokens,
        learned_tokens=counts.learned,
        eod_in_text=counts.eod_in_text,
        unknown_tokens=counts.unknown,
        lost_characters=counts.lost,
        warnings=tuple(counts.warnings),
        rejects=rejects_text([record]),
        verified_documents=counts.verified,
        input_bytes=counts.text_bytes,
        output_bytes=sum(file.size or 0 for file in record.outputs if not file.name.endswith(".jsonl")),
        dtype=token_dtype(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        backend=tokenizer.backend,
    )
