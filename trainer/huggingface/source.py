"""The checkpoint to export: its model and what is known about its training."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.contract.config import ConfigError, LoraConfig, ModelConfig, from_dict
from trainer.contract.config.resolve import resolve_model
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.problem import listed
from trainer.contract.resuming import base_model
from trainer.contract.resuming.record_shape import origins
from trainer.distributed import device
from trainer.inference.checkpoint import record_of


@dataclass(frozen=True)
class Source:
    """A valid checkpoint."""

    path: Path
    iteration: int
    model: ModelConfig
    """Resolved. `vocab_size` is None if the checkpoint does not say how many rows are padding."""
    record: dict[str, Any]
    """Contents of COMPLETE; for a checkpoint of Megatron-LM, the sections that its arguments contain."""
    is_foreign: bool
    """True if Megatron-LM wrote it."""
    base: Source | None = None
    """The model of the adapters, if the checkpoint contains adapters and no other weights."""

    @property
    def lora(self) -> LoraConfig:
        """The adapters, without dropout. Its rank is null if there are none."""
        if self.base is None:
            return LoraConfig()
        return base_model.adapters(self.path, self.record)

    @property
    def huggingface_origin(self) -> dict[str, Any]:
        """The Hugging Face model that the weights were imported from. Empty if they were not."""
        origin: dict[str, Any] = origins((self.base or self).record).get("huggingface") or {}
        return origin


def read_source(path: Path) -> Source:
    """Read the model of the checkpoint in an `iter_...` directory, and check the names and sizes of its files. For
    adapters, also check the SHA-256 of the files of their base model, as when training starts.

    Raises:
        TrainerError: it is not a valid checkpoint, or its model is not supported.
    """
    if not path.is_dir() or checkpoint_files.iteration_of(path) is None:
        raise TrainerError(f"{path} is not a checkpoint. Name an iter_... directory")
    try:
        found = checkpoint_files.describe(path)
        problems = checkpoint_files.problems(found, hashes=False)
    except OSError as error:
        raise TrainerError(f"{error.filename or path} cannot be read ({error.strerror})") from error
    if problems:
        raise TrainerError(f"{path} is not a valid checkpoint: {listed(problems)}")
    if found.is_foreign:
        device.prepare("cpu")
    record = record_of(found)
    try:
        model = resolve_model(from_dict(ModelConfig, record["model"], f"{path}: model"))
    except ConfigError as error:
        raise TrainerError(f"{error}. Use the version of hpcgen that wrote it") from error
    if not base_model.has_adapters(record):
        return Source(path, found.iteration, model, record, found.is_foreign)
    try:
        stored = base_model.find(record, None)
        if broken := checkpoint_files.problems(stored, hashes=True):
            raise TrainerError(base_model.damage(stored, path, broken))
        base = read_source(stored.path)
    except OSError as error:
        model_path = base_model.path_of(record)
        raise TrainerError(
            f"{error.filename or model_path}, of the model of the adapters in {path}, cannot be read ({error.strerror})"
        ) from error
    # MTP layers are not trained with adapters, but remain in the base model.
    model = replace(model, mtp_num_layers=base.model.mtp_num_layers)
    return Source(path, found.iteration, model, record, found.is_foreign, base)


def with_vocabulary(source: Source, vocab_size: int | None) -> Source:
    """`source` with the number of tokens: the checkpoint's own, or `vocab_size`.

    Raises:
        TrainerError: neither is known, or `vocab_size` contradicts the checkpoint.
    """
    known, padded = source.model.vocab_size, source.model.padded_vocab_size or 0
    if known is None and vocab_size is None:
        raise TrainerError(
            f"{source.path} does not say how many of its {padded} embedding rows are padding. Name its tokenizer with "
            "--tokenizer, or give the number of tokens with --vocab-size"
        )
    if vocab_size is not None and not 1 <= vocab_size <= padded:
        raise TrainerError(
            f"--vocab-size {vocab_size} does not fit the {padded} embedding rows of {source.path}"
        )
    return replace(source, model=replace(source.model, vocab_size=vocab_size or known))
