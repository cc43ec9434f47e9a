"""Finds pairs that another tokenizer made, by the records next to them and the pairs themselves."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from hpcgen.config.corpus import CorpusConfig, CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.pair import open_pair
from hpcgen.data.pair_records import find_records
from hpcgen.data.record import Record, TokenizerIdentity
from hpcgen.data.stages import PAIR_STAGES
from trainer.contract.files.index_header import CHECKED_DOCUMENTS, CHECKED_TOKENS, bin_path

BAD_DOCUMENTS: tuple[Literal["fail", "skip"], ...] = ("fail", "skip")


def other_tokenizers(
    tokenizer: TokenizerConfig, prefixes: Sequence[Path], eod_id: int | None = None
) -> dict[Path, str]:
    """Pairs that hpcgen made with another tokenizer, each with a description of the difference.

    `eod_id` is a further end-of-document id that is accepted. A pair without a record, such as Megatron-LM's, is
    accepted. So is a pair whose .bin does not match its record.

    Raises:
        HpcgenError: a file of the tokenizer is missing or invalid, or a pair is damaged.
    """
    records = {
        prefix: record for prefix, record in find_records(prefixes).items() if _has_size(record, prefix)
    }
    if not records:
        return {}
    now = TokenizerIdentity.of(tokenizer)
    settings = frozenset(_settings(tokenizer))
    found = {}
    for prefix, record in records.items():
        if record.tokenizer is not None:
            found[prefix] = _difference(record.tokenizer, now, eod_id)
        elif (record.stage, record.configuration) not in settings:
            found[prefix] = _difference_in_ids(prefix, now, eod_id)
    return {prefix: text for prefix, text in found.items() if text is not None}


def _has_size(record: Record, prefix: Path) -> bool:
    """True if the .bin has the size in the record. Otherwise, another program has replaced the pair."""
    name = bin_path(prefix).name
    sizes = [output.size for output in record.outputs if Path(output.name).name == name]
    return sizes == [bin_path(prefix).stat().st_size]


def _difference(made: TokenizerIdentity, now: TokenizerIdentity, eod_id: int | None) -> str | None:
    """How the tokenizer that made a pair differs from the present one; None if it does not.

    Only files of the same kind are compared, because one tokenizer can be stored in several ways.
    """
    if made.vocab_size != now.vocab_size:
        return f"its tokenizer has {made.vocab_size:,} ids, and data.tokenizer has {now.vocab_size:,}"
    if made.eod_id not in (now.eod_id, eod_id):
        return _ends(made.eod_id, now)
    if made.kind == now.kind and made.files != now.files:
        was, is_now = (" and ".join(digest[:12] for digest in each.files) for each in (made, now))
        return f"the files of its tokenizer have the SHA-256 {was}, and those of data.tokenizer {is_now}"
    return None


def _difference_in_ids(prefix: Path, now: TokenizerIdentity, eod_id: int | None) -> str | None:
    """The difference of a pair of version 0.2.0, whose record has only a hash of all settings."""
    pair = open_pair(prefix)
    ends = [pair.last_token(number) for number in range(min(pair.num_documents, CHECKED_DOCUMENTS))]
    found = [end for end in ends if end is not None]
    if found and not {now.eod_id, eod_id}.intersection(found):
        return _ends(found[0], now)
    beginning = np.fromfile(bin_path(prefix), pair.dtype, CHECKED_TOKENS)
    if len(beginning) and (largest := int(beginning.max())) >= now.vocab_size:
        return f"it contains the id {largest}, and data.tokenizer has only {now.vocab_size:,} ids"
    return None


def _ends(eod_id: int, now: TokenizerIdentity) -> str:
    return f"its documents end with the id {eod_id}, and those of data.tokenizer with {now.eod_id}"


def _settings(tokenizer: TokenizerConfig) -> Iterator[tuple[str, str | None]]:
    """Stages and hashes of version 0.2.0 for pairs of the tokenizer, if the text has its usual key."""
    for stage, drop_empty, bad_documents in itertools.product(PAIR_STAGES, (False, True), BAD_DOCUMENTS):
        corpus = CorpusConfig(directory="/", drop_empty=drop_empty, bad_documents=bad_documents)
        job = CorpusJob(corpus=corpus, tokenizer=tokenizer)
        yield stage.name, stage.configuration(job)
        yield stage.name, stage.earlier_configuration(job)
