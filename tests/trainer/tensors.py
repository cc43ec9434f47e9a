"""Reads the complete tensors of a checkpoint without the trainer."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint


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
