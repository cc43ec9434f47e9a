"""The settings that determine the bytes of each stage's outputs, as hashes for the records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.corpus import CorpusJob
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.data.record import TokenizerIdentity, configuration_hash
from hpcgen.data.unit import DataStage


def configuration(stage: DataStage, job: CorpusJob) -> str:
    """Hash of all settings that determine the bytes of a stage's outputs."""
    return configuration_hash(_SETTINGS[stage](job))


def configuration_without_vocabulary(stage: DataStage, job: CorpusJob) -> str | None:
    """Hash that earlier versions recorded for the built-in GPT-2 vocabulary, without the vocabulary's content.

    The vocabulary files came from another package then. Records with this hash remain valid, and `hpcgen data verify`
    encodes documents of their pairs again. Returns None for other stages and tokenizers, whose hashes are unchanged.
    """
    tokenizer = job.tokenizer
    if stage not in ("tokenize", "prepare") or tokenizer.kind != "gpt2" or tokenizer.vocab_file is not None:
        return None
    settings = _tokenize_settings(job)
    return configuration_hash({**settings, "tokenizer": settings["tokenizer"] | {"files": []}})


def tokenizer_identity(tokenizer: TokenizerConfig) -> TokenizerIdentity:
    """Identity of a tokenizer, from its files as they are now.

    Raises:
        HpcgenError: a file of the tokenizer is missing or invalid.
    """
    return TokenizerIdentity(
        kind=tokenizer.kind,
        eod_id=tokenizers.eod_id(tokenizer),
        vocab_size=tokenizers.vocab_size(tokenizer),
        files=tuple(tokenizers.content_sha256(tokenizer)),
    )


def _no_settings(job: CorpusJob) -> Mapping[str, Any]:
    return {}


def _tokenize_settings(job: CorpusJob) -> Mapping[str, Any]:
    corpus, tokenizer = job.corpus, tokenizer_identity(job.tokenizer)
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
    }


_SETTINGS: dict[DataStage, Callable[[CorpusJob], Mapping[str, Any]]] = {
    "download": _no_settings,
    "extract": _no_settings,
    "concat": _no_settings,
    "tokenize": _tokenize_settings,
    "prepare": _tokenize_settings,
}
