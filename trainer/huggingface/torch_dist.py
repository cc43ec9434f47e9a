"""Reads and writes single tensors of a torch_dist checkpoint, without process groups and without Megatron-Core."""

from __future__ import annotations

import io
import math
import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer.contract.errors import TrainerError
from trainer.contract.families.model_family import LAYERS, Weight
from trainer.contract.files import checkpoint_index
from trainer.contract.files.checkpoint_files import INDEX
from trainer.contract.files.checkpoint_index import StoredBytes, StoredTensor
from trainer.contract.files.hashed_file import HashedFile
from trainer.contract.files.regular_file import open_regular, read_bytes

FILE_BYTES = 4 * 2**30
"""Size at which a new file is begun, so that the ranks of a run share the reading."""

# With this variable, torch.load would run code that a file names.
os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
checkpoint_index.pickle_by_value(_MEM_FORMAT_ENCODING)

Chunk = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a piece of a tensor."""


class StoredWeights:
    """The weights of a checkpoint. Reading a tensor holds only this tensor and one of its pieces in memory."""

    def __init__(self, path: Path) -> None:
        """Reads the index of the checkpoint `path`. No code that its files name is run.

        Raises:
            TrainerError: the index is missing or invalid.
        """
        self._path = path
        try:
            index = checkpoint_index.parse(read_bytes(path / INDEX))
        except FileNotFoundError:
            raise TrainerError(f"{path} has no {INDEX}, so it is not a torch_dist checkpoint") from None
        except (OSError, ValueError) as error:
            raise TrainerError(f"{path / INDEX} cannot be read: {error}") from error
        self._tensors = index.tensors
        self._places: dict[str, dict[tuple[int, ...], StoredBytes]] = defaultdict(dict)
        for place in index.places:
            if place.offsets is not None:
                self._places[place.name][place.offsets] = place

    @property
    def names(self) -> set[str]:
        """Names of the tensors of the model, without the optimizer's."""
        return {name for name in self._tensors if not name.startswith("optimizer.")}

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Shape of the tensor with this name; None if there is none."""
        tensor = self._tensors.get(name)
        return None if tensor is None else tensor.shape

    def dtype(self, name: str) -> torch.dtype:
        """Data type of a tensor."""
        dtype = getattr(torch, self._tensors[name].dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise TrainerError(f"{name} has an unknown type, {self._tensors[name].dtype!r}", where=self._path)
        return dtype

    def read(self, weight: Weight, layer: int = 0) -> torch.Tensor:
        """The tensor of a layer, or of the model if layers do not have it. Its shape must be `weight.shape`.

        Raises:
            TrainerError: it is missing or incomplete, or a file is damaged.
        """
        if weight.in_layers and weight.core not in self._tensors:
            return self.read_part(
                weight.core.replace(LAYERS, f"{LAYERS}{layer}.", 1), weight.index(layer)[1:]
            )
        return self.read_part(weight.core, weight.index(layer))

    def read_part(self, name: str, first: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor at the index `first` of its leading axes.

        Raises:
            TrainerError: it is incomplete, or a file is damaged.
        """
        stored = self._tensors[name]
        axes = len(first)
        chunks = [chunk for chunk in stored.chunks if _contains(chunk, first)]
        shape = stored.shape[axes:]
        result: torch.Tensor | None = None
        for offsets, sizes in chunks:
            piece = self._piece(name, stored, offsets, sizes)
            piece = piece[tuple(at - offset for at, offset in zip(first, offsets, strict=False))]
            if len(chunks) == 1 and piece.shape == torch.Size(shape):
                return piece
            if result is None:
                result = torch.empty(shape, dtype=piece.dtype)
            result[_slices(offsets[axes:], sizes[axes:])] = piece
        if result is None or sum(math.prod(sizes[axes:]) for _, sizes in chunks) != math.prod(shape):
            raise TrainerError(f"{name} is incomplete in its index", where=self._path)
        return result

    def _piece(
        self, name: str, stored: StoredTensor, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> torch.Tensor:
        place = self._places[name].get(offsets)
        if place is None:
            raise TrainerError(f"{name} is incomplete in its index", where=self._path)
        file = self._path / place.file
        try:
            with open_regular(file) as stream:
                stream.seek(place.first)
                data = stream.read(place.length)
        except OSError as error:
            raise TrainerError(f"{file} cannot be read ({error.strerror or error})") from error
        if len(data) != place.length:
            raise TrainerError(f"{file} is truncated: {name} ends at byte {place.first + place.length:,}")
        try:
            piece = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged archive can fail in any way
            raise TrainerError(f"{name} cannot be read ({_first_line(error)})", where=file) from error
        if not torch.is_tensor(piece) or tuple(piece.shape) != sizes or piece.dtype != self.dtype(name):
            raise TrainerError(f"{name} is not the tensor that the index describes", where=file)
        return piece.detach()


def _contains(chunk: Chunk, first: tuple[int, ...]) -> bool:
    return all(offset <= at < offset + size for at, offset, size in zip(first, *chunk, strict=False))


def _slices(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


class WeightsWriter:
    """Writes tensors one at a time, as files and index of a torch_dist checkpoint.

    Use it in a `with` block, which closes its file.
    """

    def __init__(self, path: Path, file_bytes: int = FILE_BYTES) -> None:
        self._path, self._file_bytes = path, file_bytes
        self._file: HashedFile | None = None
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._places: dict[MetadataIndex, _StorageInfo] = {}
        self.files: dict[str, dict[str, Any]] = {}
        """Size and SHA-256 of each file by name, as in the record of a checkpoint."""

    def __enter__(self) -> WeightsWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.__exit__()

    def write(self, weight: Weight, tensor: torch.Tensor, layer: int = 0, num_layers: int = 1) -> None:
        """Write a tensor, or the part of a stacked tensor that belongs to one layer or expert."""
        assert tuple(tensor.shape) == weight.shape, (weight, tensor.shape)
        self.write_part(weight.core, weight.stacked_shape(num_layers), weight.index(layer), tensor)

    def write_part(
        self, name: str, shape: tuple[int, ...], first: tuple[int, ...], tensor: torch.Tensor
    ) -> None:
        """Write the part of the tensor `name` of `shape` that is at the index `first` of its leading axes."""
        offsets = torch.Size((*first, *(0 for _ in tensor.shape)))
        tensor = tensor.reshape(*(1 for _ in first), *tensor.shape).contiguous()
        entry = self._tensors.setdefault(
            name, TensorStorageMetadata(TensorProperties(dtype=tensor.dtype), torch.Size(shape), [])
        )
        entry.chunks.append(ChunkStorageMetadata(offsets, tensor.shape))
        file = self._open_file()
        begin = file.size
        try:
            torch.save(with_own_storage(tensor), file)
        except RuntimeError as error:  # torch raises it for an OSError of the file
            if file.error is None:
                raise
            raise file.error from error
        place = _StorageInfo(file.path.name, begin, file.size - begin)
        self._places[MetadataIndex(name, offsets)] = place

    def finish(self) -> None:
        """Write the index, after the last tensor."""
        self._close_file()
        file = HashedFile(self._path / INDEX)
        pickle.dump(Metadata(self._tensors, storage_data=self._places), file)
        self.files[INDEX] = file.finish()

    def _open_file(self) -> HashedFile:
        if self._file is not None and self._file.size >= self._file_bytes:
            self._close_file()
        if self._file is None:
            self._file = HashedFile(self._path / f"__0_{len(self.files)}.distcp")
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self.files[self._file.path.name] = self._file.finish()
            self._file = None


def with_own_storage(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it that is contiguous and alone in its storage, because torch.save writes complete
    storages."""
    tensor = tensor.contiguous()
    is_alone = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    return tensor if is_alone else tensor.clone()
