"""Sections of a run file for continued pretraining of a Hugging Face model. Reads no weights and does not need
torch."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.tokenizer import GPT2_EOD, TokenizerConfig
from hpcgen.errors import HpcgenError
from trainer.contract.config import ConfigError, ModelConfig, from_dict, to_dict
from trainer.contract.config.resolve import resolve_model
from trainer.contract.families.huggingface import model_of
from trainer.contract.files.git_lfs import pointer_problem
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.files.tokenizer_files import SETTINGS

BATCH = {"micro_batch_size": 1, "global_batch_size": 256, "train_iters": 1000}
LR = 3e-5
"""Learning rate to start from: a tenth of Llama 3 8B's. The best one depends on the model and its data."""


def sections(directory: Path, load: str) -> dict[str, Any]:
    """The sections model, data, training, optimizer and checkpoint. `load` is where the weights will be imported.

    Raises:
        HpcgenError: the directory has no supported model, or no tokenizer that fits it.
    """
    document = _read(directory / "config.json")
    _, model = _model_of(directory / "config.json", document)
    tokenizer = _tokenizer(directory, document)
    config = TokenizerConfig(**tokenizer)
    if (needed := tokenizers.vocab_size(config)) > (model.vocab_size or 0):
        raise HpcgenError(
            f"the tokenizer has IDs up to {needed - 1}, but the embedding has {model.vocab_size} rows",
            "use the tokenizer that the model was trained with",
            where=directory,
        )
    return {
        "model": _shortest(model),
        "data": {"tokenizer": tokenizer},
        "training": BATCH,
        "optimizer": {"lr": LR},
        "checkpoint": {"load": load, "finetune": True},
    }


def read_model(path: Path) -> tuple[str, ModelConfig]:
    """The family (`model_type`) and the resolved model of a config.json.

    Raises:
        HpcgenError: the file cannot be read, or its architecture is not supported.
    """
    return _model_of(path, _read(path))


def _model_of(path: Path, document: dict[str, Any]) -> tuple[str, ModelConfig]:
    try:
        family, model = model_of(document)
    except ConfigError as error:
        raise HpcgenError(str(error), where=path) from error
    return family.name, model


def _shortest(model: ModelConfig) -> dict[str, Any]:
    """The keys of a resolved model that do not follow from the others."""
    section = to_dict(model)
    required = {
        field.name for field in dataclasses.fields(ModelConfig) if field.default is dataclasses.MISSING
    }
    for key in [key for key in section if key not in required]:
        shorter = {name: value for name, value in section.items() if name != key}
        if resolve_model(from_dict(ModelConfig, shorter, "model")) == model:
            section = shorter
    if section.get("rope_scaling"):
        given = section["rope_scaling"]
        section["rope_scaling"] = {name: value for name, value in given.items() if value is not None}
    return section


def _tokenizer(directory: Path, document: Any) -> dict[str, Any]:
    """The section data.tokenizer for the files in `directory`, with absolute paths."""
    absolute = Path(os.path.normpath(directory.absolute()))
    if (absolute / "tokenizer.json").is_file():
        config = TokenizerConfig(kind="huggingface", tokenizer_file=str(absolute / "tokenizer.json"))
    elif (absolute / "vocab.json").is_file() and (absolute / "merges.txt").is_file():
        files = {"vocab_file": str(absolute / "vocab.json"), "merges_file": str(absolute / "merges.txt")}
        config = TokenizerConfig(kind="gpt2", **files)
    else:
        raise HpcgenError(
            f"{directory} has neither tokenizer.json nor vocab.json with merges.txt",
            "save them with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)",
        )
    eod = _end_token(absolute, config, document)
    given = {name: value for name, value in to_dict(config).items() if value is not None}
    return (
        given if eod is None or (config.kind == "gpt2" and eod == GPT2_EOD) else {**given, "eod_token": eod}
    )


def _end_token(directory: Path, config: TokenizerConfig, document: Any) -> str | None:
    """The end token that tokenizer_config.json names, or whose ID config.json has."""
    known = tokenizers.tokens(config)
    settings = directory / SETTINGS
    named = _read(settings).get("eos_token") if settings.is_file() else None
    named = named.get("content") if isinstance(named, dict) else named
    if isinstance(named, str) and named in known:
        return named
    ids = document.get("eos_token_id")
    wanted = ids[0] if isinstance(ids, list) and ids else ids
    return next((token for token, index in known.items() if index == wanted), None)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(read_bytes(path))
    except FileNotFoundError:
        hint = "name a local directory with a Hugging Face model, from hf download MODEL --local-dir DIR"
        raise HpcgenError("no such file", hint, where=path) from None
    except (OSError, ValueError, RecursionError) as error:
        raise HpcgenError(pointer_problem(path) or f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise HpcgenError(f"{path} is not a JSON object", "name a local directory with a Hugging Face model")
    return document
