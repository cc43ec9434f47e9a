"""Exports a checkpoint to a Hugging Face directory, holding one file of the result in memory."""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from trainer.contract.config import ConfigError
from trainer.contract.errors import TrainerError
from trainer.contract.families.huggingface import FAMILIES, config_of, family_for
from trainer.contract.families.model_family import LAYERS, Family, Weight, in_order
from trainer.contract.model import rope_parameters
from trainer.contract.wording import few
from trainer.huggingface import card, check, generation, tokenizer_files
from trainer.huggingface.adapters import MergedWeights, StoredAdapters, Weights
from trainer.huggingface.destination import Report, new_directory, sync_file, umask, write_json, write_text
from trainer.huggingface.reading import INDEX, SINGLE
from trainer.huggingface.source import Source, read_source, with_vocabulary
from trainer.huggingface.tokenizer_files import Tokenizer
from trainer.huggingface.torch_dist import StoredWeights, with_own_storage
from trainer.huggingface.transforms import to_huggingface

SHARD_BYTES = 5 * 10**9
"""Maximum size of a file, unless a single tensor is larger. transformers' own limit before version 5."""

NUM_READERS = 4
"""Number of threads. As many tensors are in memory in addition to the tensors of the file that is written next."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Choices of the user."""

    family: str | None = None
    """Name of the family; None for the first that can express the model."""
    dtype: str | None = None
    """Key of DTYPES; None for the type of the checkpoint's weights."""
    vocab_size: int | None = None
    tokenizer: Path | None = None
    """Tokenizer file or directory."""
    eos_token: str | None = None
    """End of a document, if the tokenizer's files do not name it."""
    chat_template: Path | None = None
    """File of the chat template that the model was trained with, in place of the tokenizer's."""
    chat_template_name: str | None = None
    """Name of the one of the tokenizer's chat templates that the model was trained with, which becomes its default."""
    base_model: str | None = None
    """Name or directory of the base model of an adapter; None for the directory it was imported from."""
    check: bool = False
    """Compare logits with transformers before the directory appears."""
    shard_bytes: int = SHARD_BYTES


def export(checkpoint: Path, destination: Path, options: Options, report: Report) -> None:
    """Write the checkpoint in an `iter_...` directory as a new Hugging Face directory.

    `report` is called with a line about each step.

    Raises:
        TrainerError: the checkpoint, its model or the tokenizer cannot be exported. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    source, tokenizer, family = prepare(checkpoint, options)
    stored = weights_of(source)
    _check_tensors(source, family, stored)
    dtype = DTYPES[options.dtype] if options.dtype else stored.dtype("embedding.word_embeddings.weight")
    with new_directory(destination) as directory:
        started = time.monotonic()
        size = _write_weights(source, family, stored, dtype, directory, options.shard_bytes, report)
        seconds = time.monotonic() - started
        _write_texts(source, family, dtype, tokenizer, directory, report)
        if options.check:
            report(check.compare(source, directory))
    report(
        f"exported {checkpoint} as {family.architecture} to {destination}: {size / 1e9:,.2f} GB of weights in "
        f"{seconds:,.1f} s ({size / 1e6 / max(seconds, 1e-9):,.0f} MB/s)"
    )
    if problem := rope_parameters.older_transformers_problem(source.model):
        report(f"warning: {problem}")
    if tokenizer is None:
        report(f"{destination} has no tokenizer files. To add them, export with --tokenizer")
    elif lost := tokenizer_files.lost(tokenizer):
        report(f"warning: {lost}")


def prepare(checkpoint: Path, options: Options) -> tuple[Source, Tokenizer | None, Family]:
    """The checkpoint in an `iter_...` directory, the tokenizer that `options` name, and the family of the model.

    Raises:
        TrainerError: the checkpoint, its model or the tokenizer cannot be exported.
    """
    source = read_source(checkpoint)
    tokenizer = _find_tokenizer(options)
    vocab_size = options.vocab_size
    if source.model.vocab_size is None and tokenizer is not None:
        vocab_size = vocab_size or tokenizer.size or None
    source = with_vocabulary(source, vocab_size)
    if tokenizer is not None:
        tokenizer_files.check_size(tokenizer, source.model.vocab_size)
    try:
        return source, tokenizer, family_for(source.model, options.family or _imported_family(source))
    except ConfigError as error:
        raise TrainerError(f"{checkpoint} cannot be exported: {error}") from error


def weights_of(source: Source) -> Weights:
    """The weights of a checkpoint. Adapters are added to the weights of their base model.

    Raises:
        TrainerError: an index is missing or invalid.
    """
    if source.base is None:
        return StoredWeights(source.path)
    adapters = StoredAdapters(source.path, source.lora, source.model)
    return MergedWeights(StoredWeights(source.base.path), adapters)


def _imported_family(source: Source) -> str | None:
    """The family that an imported checkpoint came from, since several can express some models."""
    origin = source.huggingface_origin.get("family")
    return origin if origin in FAMILIES else None


def _find_tokenizer(options: Options) -> Tokenizer | None:
    if options.tokenizer is None:
        return None
    found = tokenizer_files.named_tokenizer(options.tokenizer, options.eos_token)
    if found is None:
        raise TrainerError(f"{options.tokenizer} has no tokenizer.json, vocab.json or tokenizer.model")
    tokenizer_files.check_links(found, options.tokenizer)
    return tokenizer_files.with_chat_template(found, options.chat_template, options.chat_template_name)


def _check_tensors(source: Source, family: Family, stored: Weights) -> None:
    """Check that the checkpoint has exactly the tensors of the model.

    Raises:
        TrainerError: a tensor is missing, has another shape, or has no place in the family.
    """
    unused = {name for name in stored.names if "_extra_state" not in name}
    for weight in family.weights(source.model):
        shape = weight.stacked_shape(source.model.num_layers)
        names = [(weight.core, shape)]
        if weight.in_layers and stored.shape(weight.core) is None:
            layers = range(source.model.num_layers)
            names = [(weight.core.replace(LAYERS, f"{LAYERS}{n}.", 1), shape[1:]) for n in layers]
        for name, shape in names:
            if (found := stored.shape(name)) is None:
                raise TrainerError(
                    f"{source.path} has no tensor {weight.core}, which {family.architecture} needs"
                )
            if found != shape:
                raise TrainerError(
                    f"{name} has the shape {list(found)}, not {list(shape)}", where=source.path
                )
            unused.discard(name)
    if unused:
        raise TrainerError(
            f"{source.path} has tensors that {family.architecture} does not: {few(sorted(unused), 5)}"
        )


def _write_weights(
    source: Source,
    family: Family,
    stored: Weights,
    dtype: torch.dtype,
    directory: Path,
    shard_bytes: int,
    report: Report,
) -> int:
    """Write the tensors and, if there are several files, their index. Returns the total size of the tensors."""
    shards: list[list[str]] = []
    shard: dict[str, torch.Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal size
        save_tensors(shard, directory / f"shard-{len(shards)}")
        shards.append(list(shard))
        if len(shards) > 1 or size >= shard_bytes // 2:
            report(f"wrote file {len(shards)} ({size / 1e9:,.2f} GB)")
        shard.clear()
        size = 0

    for parts in _converted(source, family, stored, dtype):
        for name, part in parts.items():
            part_bytes = part.numel() * part.element_size()
            if shard and size + part_bytes > shard_bytes:
                flush()
            shard[name] = part
            size += part_bytes
            total += part_bytes
    flush()
    _name_shards(shards, directory, total)
    return total


def _converted(
    source: Source, family: Family, stored: Weights, dtype: torch.dtype
) -> Iterator[dict[str, torch.Tensor]]:
    """Yields the tensors of the model by name, in order. Threads read and convert the next ones."""

    def convert(weight: Weight, layer: int) -> dict[str, torch.Tensor]:
        tensor = stored.read(weight, layer)
        tensor = tensor if weight.form == "fp32" else _rounded(weight, tensor, dtype)
        parts = to_huggingface(weight, tensor, source.model)
        return {name.format(n=layer): with_own_storage(part) for name, part in parts.items()}

    with ThreadPoolExecutor(NUM_READERS) as threads:
        pending: deque[Future[dict[str, torch.Tensor]]] = deque()
        for weight, layer in in_order(family, source.model):
            pending.append(threads.submit(convert, weight, layer))
            if len(pending) > NUM_READERS:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _rounded(weight: Weight, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor` in another data type.

    Raises:
        TrainerError: it has numbers that are too large for fp16.
    """
    rounded = tensor.to(dtype)
    if dtype is torch.float16 and tensor.dtype is not dtype and not bool(rounded.isfinite().all()):
        raise TrainerError(f"{weight.core} has numbers that are too large for fp16. Export with --dtype bf16")
    return rounded


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write and sync a file, and read its header back.

    Raises:
        OSError: it cannot be written.
        TrainerError: the storage has something else.
    """
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # wraps errors of the storage
        number = re.search(r"os error (\d+)", str(error))
        raise (
            OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
        ) from error
    path.chmod(0o666 & ~umask())  # safetensors makes it private
    sync_file(path)
    try:
        with safe_open(path, framework="pt") as written:
            is_same = set(written.keys()) == set(tensors)
    except SafetensorError:
        is_same = False
    if not is_same:
        raise TrainerError(f"{path} cannot be read back as it was written. Check the storage")


def _name_shards(shards: list[list[str]], directory: Path, total: int) -> None:
    if len(shards) == 1:
        (directory / "shard-0").rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        (directory / f"shard-{number}").rename(directory / file)
        weight_map |= dict.fromkeys(names, file)
    write_json(
        directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def _write_texts(
    source: Source,
    family: Family,
    dtype: torch.dtype,
    tokenizer: Tokenizer | None,
    directory: Path,
    report: Report,
) -> None:
    """Write configurations, tokenizer files and the model card."""
    dtype_name = str(dtype).removeprefix("torch.")
    vocab_size = source.model.vocab_size or 0
    ids = generation.token_ids(tokenizer, vocab_size, report)
    settings = generation.generation_config(tokenizer, ids, vocab_size, report)
    write_json(directory / generation.CONFIG, {**config_of(family, source.model, dtype_name), **ids})
    write_json(directory / generation.GENERATION, settings)
    if tokenizer is not None:
        tokenizer_files.copy_tokenizer(tokenizer, directory, source.model.max_position_embeddings)
    write_text(directory / "README.md", card.model_card(source, family, dtype_name))
