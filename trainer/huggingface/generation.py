"""The tokens that begin, end and pad a text, and the other settings of generation, as an export writes them.

An export keeps the settings of the model in the tokenizer's directory, from which the training started.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from trainer.contract.wording import shown
from trainer.huggingface.tokenizer_files import Tokenizer, json_object

CONFIG, GENERATION = "config.json", "generation_config.json"
BOS, EOS, PAD = "bos_token_id", "eos_token_id", "pad_token_id"


def token_ids(tokenizer: Tokenizer | None, vocab_size: int, report: Callable[[str], None]) -> dict[str, Any]:
    """The IDs for config.json: from the config.json next to the tokenizer, and from the tokenizer itself.

    Raises:
        TrainerError: the file is not a JSON object.
    """
    if tokenizer is None:
        return {BOS: None, EOS: None}
    usual = {name: tokenizer.id_of(token) for name, token in _special_tokens(tokenizer).items()}
    source = _read(tokenizer, CONFIG)
    if "model_type" not in source:
        return _with_end(usual, tokenizer, CONFIG, report)
    found = {name: source[name] for name in (BOS, EOS, PAD) if name in source}
    kept = _without_unknown(found, tokenizer, vocab_size, CONFIG, report)
    return _with_end({**usual, **kept}, tokenizer, CONFIG, report)


def generation_config(
    tokenizer: Tokenizer | None, ids: Mapping[str, Any], vocab_size: int, report: Callable[[str], None]
) -> dict[str, Any]:
    """Content of generation_config.json: the content of the file next to the tokenizer, or else the `ids` of
    config.json.

    Raises:
        TrainerError: the file is not a JSON object.
    """
    source = _read(tokenizer, GENERATION) if tokenizer else {}
    if tokenizer is None or not source:
        return {"_from_model_config": True, **ids}
    kept = _without_unknown(source, tokenizer, vocab_size, GENERATION, report)
    return _with_end(kept, tokenizer, GENERATION, report)


def _special_tokens(tokenizer: Tokenizer) -> dict[str, str | None]:
    return {BOS: tokenizer.bos_token, EOS: tokenizer.eos_token}


def _read(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    path = tokenizer.directory and tokenizer.directory / name
    return json_object(path) if path and path.is_file() else {}


def _without_unknown(
    values: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int, name: str, report: Callable[[str], None]
) -> dict[str, Any]:
    """`values` without IDs that the model does not have, which are reported."""
    kept = dict(values)
    for key in (BOS, EOS, PAD):
        ids = kept.get(key)
        listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
        if not all(type(index) is int and 0 <= index < vocab_size for index in listed):
            del kept[key]
            report(
                f"left out {key} = {shown(ids)} of {tokenizer.directory}/{name}: not an ID below {vocab_size}"
            )
    return kept


def _with_end(
    values: dict[str, Any], tokenizer: Tokenizer, name: str, report: Callable[[str], None]
) -> dict[str, Any]:
    """`values` with the end of a document among the tokens that end a text."""
    end, ids = tokenizer.id_of(tokenizer.end_of_document), values.get(EOS)
    listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if end is None or end in listed:
        return values
    if listed:
        report(f"{name}: added {end} ({tokenizer.end_of_document}), the end of a document, to {EOS} = {ids}")
    return {**values, EOS: [end, *listed] if listed else end}
