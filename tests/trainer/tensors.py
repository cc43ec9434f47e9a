"""Reads the complete tensors of a checkpoint without the trainer."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint

from hpcgen.planning.checkpointing import checkpoint_bytes
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.files import checkpoint_files
from trainer.contract.files.run_directory import RunDirectory


def assert_same_checkpoint(one: Path, other: Path) -> None:
    """All tensors, of the model and of the optimizer, are bit-identical."""
    tensors, expected = load_all(one), load_all(other)
    assert tensors.keys() == expected.keys()
    assert any("exp_avg_sq" in name for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name


def load_all(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The tensors by name. Parts that are not stored, such as the state of frozen layers, are zero."""
    reader = torch.distributed.checkpoint.FileSystemReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        name: torch.zeros(tensor.size, dtype=tensor.properties.dtype)
        for name, tensor in metadata.items()
        if isinstance(tensor, torch.distributed.checkpoint.metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # it warns that there is one process, as asked for
        warnings.simplefilter("ignore")
        torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    return state


def assert_predicted_size(run: Path, iteration: int) -> None:
    """The tensors of a checkpoint have the number of bytes that hpcgen predicts."""
    content = json.loads((run / RunDirectory.TRAINED_WITH).read_bytes())
    trainer = resolve(from_dict(TrainerConfig, content, "test"))
    tensors = load_all(checkpoint_files.iteration_directory(run / "checkpoints", iteration))
    assert checkpoint_bytes(trainer) == sum(tensor.nbytes for tensor in tensors.values())
