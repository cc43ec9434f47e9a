"""One pair of some files that a person names, apart from any corpus."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.data.compression import SUFFIXES
from hpcgen.data.indexed_dataset import bin_path, idx_path, token_dtype
from hpcgen.data.record import Record, record_path
from hpcgen.data.task import Context, Progress, Step
from hpcgen.data.tokenize import make_pairs
from hpcgen.data.tokenizer import Tokenizer
from hpcgen.data.unit import Input, Unit, configuration
from hpcgen.data.workers import cores
from hpcgen.errors import HpcgenError
from hpcgen.files import sweep
from hpcgen.text import counted


@dataclass(frozen=True)
class TokenizeReport:
    """What `tokenize_files` read and wrote."""

    output_prefix: str
    documents_read: int
    documents: int
    """Documents in the pair: documents_read, less the empty ones when those are dropped, and the rejected ones."""
    rejected_documents: int
    """Lines without a readable text, which stand in OUTPUT_PREFIX.rejects.jsonl."""
    empty_documents: int
    """Documents read that gave no token."""
    sequences: int
    """Documents in the pair that hold tokens."""
    tokens: int
    """Token ids in the pair, the end-of-document tokens included."""
    eod_in_text: int
    """End-of-document ids that came from the text itself, which spelled the token out."""
    verified_documents: int
    """Documents whose ids were compared with those of the library tokenizers."""
    input_bytes: int
    """Bytes of JSON Lines, uncompressed."""
    output_bytes: int
    """Bytes of the pair."""
    dtype: str
    vocab_size: int
    eod_id: int
    backend: str
    """The library that encoded: gigatoken, tokenizers or bytes."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        skipped = self.documents_read - self.documents - self.rejected_documents
        lines = [
            f"{self.output_prefix}.bin, .idx  ({self.output_bytes:,} bytes, {self.dtype})",
            f"documents  {self.documents_read:,} in = {self.documents:,} out + {skipped:,} skipped + "
            f"{self.rejected_documents:,} rejected; {self.empty_documents:,} empty",
            f"tokens     {self.tokens:,} in {counted(self.sequences, 'sequence')}, each ended by {self.eod_id}",
            f"input      {self.input_bytes:,} bytes of JSON Lines, encoded with {self.backend}",
        ]
        if self.verified_documents:
            lines.append(f"verified   {counted(self.verified_documents, 'document')}: the ids of tokenizers")
        if self.rejected_documents:
            lines.append(f"rejects    {self.output_prefix}.rejects.jsonl")
        if self.eod_in_text:
            lines.append(
                f"note       {self.eod_in_text:,} end-of-document tokens are spelled out in the text"
            )
        return "\n".join(lines)


def tokenize_files(
    inputs: Sequence[Path],
    output_prefix: Path,
    tokenizer: Tokenizer,
    *,
    json_key: str = "text",
    drop_empty: bool = False,
    bad_documents: Literal["fail", "skip"] = "fail",
    max_bad_fraction: float = 0.001,
    verify_fraction: float = 0.0001,
    overwrite: bool = False,
    workers: int | None = None,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> TokenizeReport:
    """Tokenizes every document of `inputs`, in order, into output_prefix.bin and output_prefix.idx.

    Documents are treated as hpcgen.data.tokenize.tokenize_unit says. The pair appears only when all of it is on the
    disk, .idx and the record last. `workers` blocks of 4 MiB are parsed and encoded at once (None means one per core);
    the output does not depend on it.

    Raises:
        HpcgenError: an input is missing, damaged or holds a line without text; no document has a token; the
            pair exists and `overwrite` is false; or the output cannot be written. Nothing is published then.
    """
    progress = Progress("tokenize", 0, 1, units=1, bytes=sum(_input_size(path) for path in inputs))
    if idx_path(output_prefix).exists() and not overwrite:
        raise HpcgenError(f"{idx_path(output_prefix)} exists", "choose another prefix, or pass --overwrite")
    corpus = CorpusConfig(
        directory=str(output_prefix.parent),
        json_key=json_key,
        drop_empty=drop_empty,
        bad_documents=bad_documents,
        max_bad_fraction=max_bad_fraction,
        verify_fraction=verify_fraction,
    )
    unit = Unit(
        stage="tokenize",
        inputs=tuple(Input(name=str(path), path=path) for path in inputs),
        outputs=(output_prefix.name,),
    )

    def advance(step: Step) -> None:
        progress.bytes_done += step.bytes
        progress.bytes_new += step.bytes
        progress.documents += step.documents
        progress.tokens += step.tokens
        on_progress(progress)

    context = Context(
        configuration=configuration("tokenize", CorpusJob(corpus=corpus, tokenizer=tokenizer.config)),
        threads=workers or cores(),
        advance=advance,
    )
    sweep([bin_path(output_prefix), idx_path(output_prefix), record_path(output_prefix)])
    try:
        record = make_pairs(unit, corpus, tokenizer, context)
    except OSError as error:
        raise HpcgenError(f"cannot write {output_prefix}.bin and .idx: {error}") from error
    return _report(record, output_prefix, tokenizer)


def _input_size(path: Path) -> int:
    """Bytes on disk of an input, once it is known to be there and to have a suffix that we know."""
    if not path.name.endswith(SUFFIXES):
        raise HpcgenError(f"{path}: the name must end in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    try:
        with path.open("rb") as file:
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
        eod_in_text=counts.eod_in_text,
        verified_documents=counts.verified,
        input_bytes=counts.text_bytes,
        output_bytes=sum(file.size or 0 for file in record.outputs if not file.name.endswith(".jsonl")),
        dtype=token_dtype(tokenizer.vocab_size).name,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        backend=tokenizer.backend,
    )
