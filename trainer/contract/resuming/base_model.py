"""The model that adapters belong to. Checkpoints of a LoRA run contain only adapters, and record their base model.

A LoRA run starts from the checkpoint of a complete model, or from adapters. Either way, the weights of the base model
come from its own checkpoint. Adapters are useless with other weights, so a base model that has changed is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.contract.code.code_record import SHA256_DIGITS
from trainer.contract.config import LoraConfig, from_dict
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import INDEX, METADATA, Checkpoint
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.problem import Problem, listed
from trainer.contract.resuming.record_shape import origins

ORIGIN = "base"
"""Key of the base model in the `origins` of a checkpoint's record."""


def has_adapters(record: Mapping[str, Any] | None) -> bool:
    """True if a checkpoint with this record contains adapters and no other weights."""
    return bool(record) and ((record or {}).get("lora") or {}).get("rank") is not None


def rank_of(record: Mapping[str, Any]) -> int:
    """Rank of the adapters in a checkpoint that has some."""
    rank: int = record["lora"]["rank"]
    return rank


def adapters(path: Path, record: Mapping[str, Any]) -> LoraConfig:
    """The section `lora` of the checkpoint at `path`, without dropout. Its rank is null if there are no adapters.

    Raises:
        ConfigError: the record has an unknown or invalid key.
    """
    if not has_adapters(record):
        return LoraConfig()
    return from_dict(
        LoraConfig, record["lora"] | {"dropout": 0.0}, f"{path / checkpoint_files.COMPLETE}: lora"
    )


def mismatch(
    path: Path, record: Mapping[str, Any] | None, lora: LoraConfig, *, weights_only: bool, is_own: bool
) -> Problem | None:
    """Why a run with the section `lora` cannot start from the checkpoint at `path`; None if it can.

    `record` is None for a checkpoint of Megatron-LM, which contains a complete model. `is_own` is true for a checkpoint
    of the run itself, which it continues whatever checkpoint.load and checkpoint.finetune are.
    """
    if has_adapters(record):
        assert record
        if lora.rank is None:
            reason = f"is null, but {path} contains only LoRA adapters of rank {rank_of(record)}, of {path_of(record)}"
            another = "use another paths.run_dir" if is_own else "name the checkpoint of a complete model"
            hint = f"set it to {rank_of(record)} to train them, or {another}"
            return Problem("lora.rank", reason, hint)
        alpha, saved = lora.rank if lora.alpha is None else lora.alpha, record["lora"]["alpha"]
        if weights_only and alpha != saved:
            reason = f"differs from {saved:g}, with which the adapters in {path} were trained"
            return Problem("lora.alpha", reason, f"set it to {saved:g}")
        return None
    if lora.rank is not None and is_own:
        reason = f"needs new adapters, but the run has trained all weights: {path} contains a complete model"
        hint = "use another paths.run_dir for the adapters; to continue all weights, remove lora"
        return Problem("lora.rank", reason, hint)
    if lora.rank is not None and not weights_only:
        reason = f"is false, but {path} contains a complete model, for which adapters can only be started"
        hint = "set it to true; to continue all weights without adapters, remove lora"
        return Problem("checkpoint.finetune", reason, hint)
    return None


def entry(base: Checkpoint) -> dict[str, str]:
    """The base model as an origin in the records of its adapters.

    Raises:
        OSError: its files cannot be read.
    """
    return {"path": str(base.path), "sha256": identity(base)}


def identity(base: Checkpoint) -> str:
    """SHA-256 of the names, sizes and hashes of a checkpoint's files. A checkpoint of Megatron-LM has no hashes, so
    only the list of its tensors is hashed, with the sizes of its other files.

    Raises:
        OSError: its files cannot be read.
    """
    if base.record is not None:
        files = base.record["files"]
    else:
        sizes = {path.name: path.stat().st_size for path in base.path.iterdir() if path.is_file()}
        files = {
            name: {"bytes": sizes[name]} for name in sizes if name.endswith(".distcp") or name == METADATA
        }
        files[INDEX] = {"sha256": sha256(read_bytes(base.path / INDEX))}
    return sha256(json.dumps(files, sort_keys=True).encode())


def find(record: Mapping[str, Any], load: str | None) -> Checkpoint:
    """The base model of the adapters with this `record`: where they were trained or, if it was moved, in `load`.

    Raises:
        TrainerError: it is missing or has changed, or `load` names only other models.
        OSError: its files cannot be read.
    """
    saved = origins(record).get(ORIGIN) or {}
    path, known = Path(str(saved.get("path"))), saved.get("sha256")
    named = _present(checkpoint_files.paths_to_load(Path(load)) if load else ())
    present = _present([path])
    models = list(_models(dict.fromkeys([*present, *named])))
    bases = [model for model in models if identity(model) == known]
    loaded = [model for model in models if model.path in named]
    if bases and loaded and not any(model in loaded for model in bases):
        raise TrainerError(
            f"the adapters were trained on {bases[0].path}, but checkpoint.load names {loaded[0].path}, another model. "
            f"Set it to {bases[0].path}, or train adapters of the other model in another paths.run_dir"
        )
    if bases:
        return bases[0]
    state = "has changed since" if path in present else "is missing"
    moved = "make this path a link to the directory to which it was moved"
    if load is not None:
        moved = f"set checkpoint.load to the directory to which it was moved, or {moved}"
    raise TrainerError(
        f"the adapters were trained on {path} (SHA-256 {str(known)[:SHA256_DIGITS]}), which {state}. Restore it, or "
        f"{moved}"
    )


def damage(base: Checkpoint, adapters: Path, problems: Sequence[Problem]) -> str:
    """The message for `problems` of the files of the base model of the `adapters`."""
    return f"{base.path}, the model of the adapters in {adapters}, is broken: {listed(problems)}. Restore it"


def _present(paths: Iterable[Path]) -> list[Path]:
    return [path for path in paths if checkpoint_files.iteration_of(path) is not None and path.is_dir()]


def _models(paths: Iterable[Path]) -> Iterator[Checkpoint]:
    """Yields the checkpoints that contain complete models."""
    for path in paths:
        checkpoint = checkpoint_files.describe(path)
        if (checkpoint.is_complete or checkpoint.is_foreign) and not has_adapters(checkpoint.record):
            yield checkpoint


def path_of(record: Mapping[str, Any]) -> str:
    """Where the base model of the adapters with this `record` was when they were trained."""
    return str((origins(record).get(ORIGIN) or {}).get("path", "an unknown model"))
