"""Converts Megatron-LM's command line into sections of a run file: data, tokenizer, vocabulary, checkpoints."""

from __future__ import annotations

import re
from typing import Any

from hpcgen.check.lint.launch import Launch
from hpcgen.check.lint.megatron import DOCUMENT_MASK, PACKED_DOCUMENTS, ignores_document_mask
from hpcgen.check.lint.words import Word
from hpcgen.check.migration.leftover import Carried, is_sure, unknown
from hpcgen.check.migration.values import (
    PLACEHOLDER,
    Flags,
    carry_as,
    integer,
    is_known,
    plain_path,
    shown,
    typed,
    why_not,
)
from hpcgen.config.megatron_options import rows
from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import TokenizerConfig, vocab_size
from hpcgen.errors import HpcgenError
from hpcgen.text import few
from trainer.contract.config import PathKind, paths_in
from trainer.contract.config.resolve import VOCAB_MULTIPLE, pad_vocab_size

SEPARATE_DOCUMENTS = "data.reset_attention_mask"

READ_BY = {
    "GPT2BPETokenizer": {"tokenizer-type", "vocab-file", "merge-file"},
    "HuggingFaceTokenizer": {"tokenizer-type", "tokenizer-model"},
    "NullTokenizer": {"tokenizer-type", "vocab-size"},
}
"""Tokenizer -> the options it reads."""

DATA_KEYS = ("data.datasets", "data.train", "data.mock", "data.corpus")


def carry_data(flags: Flags, carried: Carried) -> None:
    """Carries over the blends, or mock data."""
    names = (
        ("data-path", "datasets"),
        ("train-data-path", "train"),
        ("valid-data-path", "valid"),
        ("test-data-path", "test"),
    )
    if flag := flags.get("mock-data"):
        carried.put("data.mock", True)
        if given := [f"--{name}" for name, _ in names if name in flags]:
            why = f"{given[0]} is also given, and Megatron-LM uses only one of them"
            carried.refuse(flag.line, shown(flag), why, *DATA_KEYS)
    for name, key in names:
        if flag := flags.get(name):
            if any(carried.is_chosen(other) for other in DATA_KEYS):
                carried.leave(flag.line, f"--{name}", "--set overrides the data")
                continue
            datasets = _blend(flag.values) if is_known(flag.values) else None
            if datasets is not None:
                carried.put(f"data.{key}", datasets)
            else:
                carried.refuse(
                    flag.line,
                    _brief(f"--{name}", flag.values),
                    _why_no_blend(flag.values),
                    *rows()[name].keys,
                )


def _why_no_blend(words: tuple[Word, ...]) -> str:
    doubtful = next((word for word in words if not is_sure(word)), None)
    if doubtful is not None:
        return unknown(doubtful)
    if any(PLACEHOLDER.search(word.text) for word in words):
        return "it is a placeholder"
    return "it is neither one path nor pairs of weight and path" if words else "it has no value"


def _brief(option: str, words: tuple[Word, ...]) -> str:
    texts = [word.text for word in words[:2] if word.certain]
    return " ".join([option, *texts])


def _blend(words: tuple[Word, ...]) -> list[dict[str, object]] | None:
    """A blend: paths, or pairs of a weight and a path; None for anything else."""
    number = r"\d+\.?\d*([eE][+-]?\d+)?|\.\d+"
    texts = [word.text for word in words]
    if not texts or any(not text or PLACEHOLDER.search(text) for text in texts):
        return None
    if not any(re.fullmatch(number, text) for text in texts):
        return [{"prefix": plain_path(text)} for text in texts]
    if len(texts) % 2 or not all(re.fullmatch(number, text) for text in texts[::2]):
        return None
    return [
        {"prefix": plain_path(prefix), "weight": float(weight)}
        for weight, prefix in zip(texts[::2], texts[1::2], strict=True)
    ]


def carry_tokenizer(launch: Launch, flags: Flags, carried: Carried) -> None:
    """Carries over the tokenizer and the vocabulary size. An unsupported tokenizer is refused."""
    names = {"tokenizer-type", "tokenizer-model", "vocab-file", "merge-file", "vocab-size"}
    kind = flags.get("tokenizer-type")
    if kind is None and "tokenizer-type" in launch.flags:
        return  # conditional: refused already
    # pretrain_gpt.py sets GPT2BPETokenizer with args_defaults
    name = (
        "GPT2BPETokenizer" if kind is None else kind.value.text if kind.value and is_sure(kind.value) else ""
    )
    line = kind.line if kind else launch.line
    size = None
    if carried.is_chosen("data.tokenizer"):
        chosen = carried.get("data.tokenizer")
        size = carried.get("model.vocab_size") or (_size(chosen) if isinstance(chosen, dict) else None)
    elif kind is not None and not name:
        carried.refuse(line, shown(kind), why_not("data.split", kind), "data.tokenizer")
    elif name == "GPT2BPETokenizer":
        size = _gpt2(flags, carried)
    elif name == "HuggingFaceTokenizer":
        size = _hugging_face(line, flags, carried)
    elif name == "NullTokenizer":
        size = _null(line, flags, carried)
    else:
        why = "data.tokenizer supports gpt2, huggingface (a tokenizer.json) and bytes"
        if re.match("Llama2|.*SentencePiece", name):
            why += "; transformers makes a tokenizer.json from a tokenizer.model (docs/tokenization.md)"
        carried.refuse(line, f"--tokenizer-type {name}", why, "data.tokenizer")
    for unread in names & flags.keys() - READ_BY.get(name, names):
        carried.leave(flags[unread].line, shown(flags[unread]), f"{name} does not read it")
    _padded_vocabulary(size, launch, flags, carried)


def _gpt2(flags: Flags, carried: Carried) -> int | None:
    """The tokenizer's size; None if its files are not here."""
    files: dict[str, str] = {}
    for name, key in (("vocab-file", "vocab_file"), ("merge-file", "merges_file")):
        if flag := flags.get(name):
            text = typed("checkpoint.load", flag)  # a path
            if text is None:
                carried.refuse(
                    flag.line, shown(flag), why_not("checkpoint.load", flag), "data.tokenizer.kind"
                )
            elif name == "merge-file" and text.endswith(".json"):
                carried.refuse(
                    flag.line, shown(flag), "it is a vocabulary, not a merges file", "data.tokenizer.kind"
                )
            else:
                files[key] = text
    given = [flags[name] for name in ("vocab-file", "merge-file") if name in flags]
    if len(given) == 1:
        why = "--vocab-file and --merge-file must be given together"
        carried.refuse(given[0].line, shown(given[0]), why, "data.tokenizer.kind")
    if len(given) != len(files) or len(given) == 1:
        return None
    tokenizer = {"kind": "gpt2", **files}
    carried.put("data.tokenizer", tokenizer)
    return _size(tokenizer)


def _hugging_face(line: int, flags: Flags, carried: Carried) -> int | None:
    flag = flags.get("tokenizer-model")
    text = typed("checkpoint.load", flag) if flag else None
    if flag is None:
        carried.refuse(
            line, "--tokenizer-type HuggingFaceTokenizer", "--tokenizer-model is missing", "data.tokenizer"
        )
    elif text is None:
        carried.refuse(flag.line, shown(flag), why_not("checkpoint.load", flag), "data.tokenizer")
    elif not text.startswith("/"):
        why = "data.tokenizer reads a tokenizer.json and downloads nothing: download it, and set its path"
        carried.refuse(flag.line, shown(flag), why, "data.tokenizer")
    else:
        path = text if text.endswith(".json") else f"{text.rstrip('/')}/tokenizer.json"
        tokenizer = {"kind": "huggingface", "tokenizer_file": path}
        carried.put("data.tokenizer", tokenizer)
        return _size(tokenizer)
    return None


def _null(line: int, flags: Flags, carried: Carried) -> int | None:
    """Converts NullTokenizer. Before core 0.16, Megatron-LM adds the end-of-document token to --vocab-size."""
    asked = integer(flags, "vocab-size")
    what = f"--tokenizer-type NullTokenizer --vocab-size {asked or ''}".strip()
    if not asked:
        carried.refuse(line, what, "--vocab-size is missing or unknown", "model.vocab_size")
    elif pad_vocab_size(asked) != pad_vocab_size(asked + 1) and not carried.is_chosen("model.vocab_size"):
        why = (
            f"the embedding has {pad_vocab_size(asked)} rows in newer releases of Megatron-LM and "
            f"{pad_vocab_size(asked + 1)} in older ones, which add a token to --vocab-size"
        )
        carried.refuse(line, what, why, "model.vocab_size")
    else:
        carried.put("model.vocab_size", asked)
        if any(
            carried.get(f"data.{key}")
            for key in ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
        ):
            carried.put("data.eod_id", asked)  # null_tokenizer.py, NullTokenizer
    carried.put("data.tokenizer", {"kind": "bytes"})  # the smallest tokenizer
    return carried.get("model.vocab_size") if asked else None


def _size(tokenizer: dict[str, Any]) -> int | None:
    """The size of a tokenizer; None if its files are not here."""
    try:
        return vocab_size(TokenizerConfig(**tokenizer))
    except (HpcgenError, TypeError):  # unknown keys in --set are refused later
        return None


def _padded_vocabulary(size: int | None, launch: Launch, flags: Flags, carried: Carried) -> None:
    """Megatron-LM pads the vocabulary to a multiple proportional to TP, a run file to a multiple of 128."""
    divisor = flags.get("make-vocab-size-divisible-by")
    tensor = carried.get("parallelism.tensor_model_parallel_size") or 1
    given = integer(flags, "make-vocab-size-divisible-by") if divisor else VOCAB_MULTIPLE
    if not given:
        assert divisor is not None
        why = why_not("training.seed", divisor)
        carried.refuse(divisor.line, shown(divisor), why, "model.padded_vocab_size")
        return
    multiple = given * tensor
    if divisor:
        carried.usual.append("--make-vocab-size-divisible-by")
    if multiple == VOCAB_MULTIPLE or "padded-vocab-size" in flags:
        return
    if size is None:
        why = (
            f"Megatron-LM rounds them up to a multiple of {multiple}, and a run file to one of {VOCAB_MULTIPLE}: "
            "to load the script's checkpoints, set model.padded_vocab_size"
        )
        carried.leave(divisor.line if divisor else launch.line, "the rows of the embedding", why)
    elif (padded := -(-size // multiple) * multiple) != pad_vocab_size(size):
        carried.put("model.padded_vocab_size", padded)


def list_relative_paths(launch: Launch, carried: Carried) -> None:
    """Lists relative paths: in a script, they start at the job's directory; in a run file, at its folder."""
    found = [
        path.text
        for path in paths_in(carried.sections, cls=RunConfig)
        if path.kind is PathKind.PATH and not carried.is_chosen(path.key.partition("[")[0])
    ]
    if relative := [text for text in found if not text.startswith("/")]:
        why = "in a run file, the path starts at its folder, not at the directory of the job"
        carried.leave(launch.line, f"the directory of {few(relative)}", why)


def carry_checkpoints(flags: Flags, carried: Carried) -> None:
    """Carries over checkpoint paths. Loading from the directory of --save is the trainer's default."""
    flag, saved = flags.get("load"), flags.get("save")
    if saved and (place := carried.get("checkpoint.save")):
        why = f"checkpoint.save is the script's {place}: the run resumes from checkpoints there, and saves there"
        carried.leave(saved.line, "the run's own checkpoint directory", why)
    if saved and "save-interval" not in flags and "non-persistent-save-interval" not in flags:
        why = (
            "the script sets no --save-interval, with which Megatron-LM would save; the run saves every 30 minutes, or "
            "every checkpoint.save_interval_minutes"
        )
        carried.leave(saved.line, shown(saved), why)
    if flag is None:
        return
    word = flag.value
    if word and saved and saved.value and is_same(saved.value, word):
        carried.usual.append("--load")
    elif (value := typed("checkpoint.load", flag)) is not None:
        carried.put("checkpoint.load", value)
    else:
        carried.refuse(flag.line, shown(flag), why_not("checkpoint.load", flag), "checkpoint.load")


def is_same(one: Word, other: Word) -> bool:
    """True if two words certainly have the same text."""
    is_fixed = one.known or "(" not in one.text
    return one.text == other.text and one.certain and other.certain and is_fixed


def carry_documents(flags: Flags, carried: Carried) -> None:
    """Converts the document mask, and the packed documents of core 0.19, whose positions begin at 0."""
    mask, packed = flags.get(DOCUMENT_MASK), flags.get(PACKED_DOCUMENTS)
    if packed:
        carried.put(SEPARATE_DOCUMENTS, True)
        carried.put("data.reset_position_ids", True)
    elif mask and ignores_document_mask(flags):
        why = (
            "Megatron-LM's attention ignores this mask (NVIDIA/Megatron-LM, issue 2357), so the script trains across "
            "documents: true separates them, and false trains as the script does"
        )
        carried.refuse(mask.line, shown(mask), why, SEPARATE_DOCUMENTS)
    elif mask:
        carry_as(SEPARATE_DOCUMENTS, mask, carried)
    _drop_positions_of_rope(flags, carried)


def _drop_positions_of_rope(flags: Flags, carried: Carried) -> None:
    """Positions that Megatron-Core ignores (models/gpt/gpt_model.py, _preprocess)."""
    positions = flags.get("reset-position-ids")
    if (
        positions
        and carried.get("model.position_embedding_type") == "rope"
        and not carried.get(SEPARATE_DOCUMENTS)
    ):
        carried.drop("data.reset_position_ids")
        why = "Megatron-Core computes rope from the number of tokens, and does not read the positions"
        carried.leave(positions.line, shown(positions), why)
