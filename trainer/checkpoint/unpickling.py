"""Makes torch and Megatron-Core read checkpoints without running code that their files may name.

The checksums of a checkpoint show that it is unchanged, but not who wrote it. torch.load reads tensors and `common.pt`
with weights_only, which is safe. Three other pickles are not safe in torch 2.13 and megatron-core 0.16 to 0.19:

- `.metadata`, which FileSystemReader.read_metadata unpickles;
- objects in the tensors' files (Core's extra states, and since megatron-core 0.19 the common state), which
  DefaultLoadPlanner.load_bytes loads with weights_only=False;
- the bytes of an extra state, which Transformer Engine unpickles: FP8's scales.

What is data depends on the Python that wrote it. Python 3.11.0 to 3.11.3 pickles a member of an enum as getattr(class,
name), Pythons before 3.11.4 name signals one by one, and Python 3.13 names the classes of pathlib differently. All are
read here, whatever Python runs. `enum_member` takes the place of getattr.

Importing this module replaces the first two functions in this process, however Core reaches them.
`checked_extra_state` handles the third. In each case torch receives the checked values themselves, or bytes made from
them; nothing is read twice.
"""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import re
import signal
from enum import Enum
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from trainer.contract.files import checkpoint_index
from trainer.contract.files.checkpoint_files import INDEX
from trainer.contract.files.checkpoint_index import (
    CheckpointIndex,
    ForbiddenError,
    StoredTensor,
    pickle_by_value,
)

RECIPES = "transformer_engine.common.recipe"
"""Module of Transformer Engine's FP8 recipes. An extra state contains one of them."""

CORE_RECIPES = frozenset({("megatron.core.extensions.transformer_engine", "TEDelayedScaling")})
"""Megatron-Core's own subclasses of the recipes, in megatron-core 0.16 to 0.19."""

STORAGES = frozenset({
    ("torch.storage", "_load_from_bytes"),
    ("megatron.core.safe_globals", "safe_load_from_bytes"),  # megatron-core 0.19's replacement
})  # fmt: skip
"""Functions that a pickled tensor names for its storage."""

REBUILDERS = frozenset({("torch._utils", "_rebuild_tensor_v2"), ("collections", "OrderedDict")})
"""Functions that a pickled tensor names, apart from its storage."""

ALLOW_CHECKED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
"""Variable without which Transformer Engine 2.18 and later refuse every pickled extra state."""


def enum_member(*arguments: Any) -> Enum:
    """The member of an enum, for a pickle that names getattr for it.

    Raises:
        ForbiddenError: the arguments are not an enum and the name of one of its members.
    """
    if len(arguments) == 2:
        cls, name = arguments
        if isinstance(cls, type) and issubclass(cls, Enum) and type(name) is str and name in cls.__members__:
            return cls.__members__[name]
    raise _forbidden("the checkpoint", "builtins.getattr")


SAME_DATA = (
    (enum_member, "builtins.getattr"),
    *((pathlib.PosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    *((number, f"signal.{number.name}") for number in signal.Signals),
)
"""Names that other versions of Python write for values that Megatron-Core allows in `common.pt` -> their meanings."""


def checked_extra_state(value: Any) -> Any:
    """Check an extra state and pickle it again from plain data, in the form that Transformer Engine 2 expects.

    A value without a pickle is returned unchanged.

    Raises:
        ForbiddenError: it names code that no extra state needs.
        pickle.UnpicklingError: it is damaged, or torch refuses it.
    """
    if isinstance(value, io.BytesIO):  # Transformer Engine 1
        value.seek(0)
        state = torch.load(value, map_location="cpu", weights_only=True)
    elif isinstance(value, torch.Tensor) and value.dtype == torch.uint8 and value.numel() > 0:
        state = _ExtraState(io.BytesIO(value.cpu().numpy().tobytes())).load()
    else:
        return value
    os.environ[ALLOW_CHECKED] = "1"
    return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)


class _ExtraState(pickle.Unpickler):
    """Allows tensors, plain values and Transformer Engine's recipes."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in STORAGES:
            return _storage
        if (module_name, global_name) == ("builtins", "getattr"):
            return enum_member
        if (module_name, global_name) in REBUILDERS | CORE_RECIPES:
            return super().find_class(module_name, global_name)
        if module_name == RECIPES and global_name.isidentifier():
            found = super().find_class(module_name, global_name)
            if isinstance(found, type) and found.__module__ == RECIPES:
                return found
        raise _forbidden("an extra state", f"{module_name}.{global_name}")


def _forbidden(what: str, name: str) -> ForbiddenError:
    return ForbiddenError(
        f"{what} names {name}, which no checkpoint needs. It may have been put there to run code on load"
    )


def _storage(data: bytes) -> Any:
    """Load a storage like torch.storage._load_from_bytes, but with weights_only."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def forbidden(error: BaseException) -> str | None:
    """Message about code that a checkpoint file names, if that caused `error`; else None."""
    if isinstance(error, ForbiddenError):
        return str(error)
    if isinstance(error, pickle.UnpicklingError) and (
        name := re.search(r"(?:GLOBAL|function) (\S+)", str(error))
    ):
        return f"it names {name[1]}, which is not data. It may have been put there to run code on load"
    return None


def _read_metadata(reader: FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    """FileSystemReader.read_metadata, without unpickling."""
    rank = kwargs.get("rank")
    path = reader.fs.concat_path(reader.path, INDEX if rank is None else f"__{rank}{INDEX}")
    with reader.fs.create_stream(path, "rb") as file:
        index = checkpoint_index.parse(file.read())
    metadata = _metadata(index)
    metadata.storage_meta = StorageMeta(load_id=reader.load_id)
    return metadata


def _metadata(index: CheckpointIndex) -> Metadata:
    entries: dict[str, Any] = {name: _entry(tensor) for name, tensor in index.tensors.items()}
    entries |= {name: BytesStorageMetadata() for name in index.objects}
    places = {
        MetadataIndex(place.name, place.offsets, place.number): _StorageInfo(
            place.file, place.first, place.length
        )
        for place in index.places
    }
    metadata = Metadata(state_dict_metadata=entries, storage_data=places)
    if index.version is not None:
        metadata.version = index.version
    return metadata


def _entry(tensor: StoredTensor) -> TensorStorageMetadata:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{tensor.dtype!r} is not a tensor type in torch {torch.__version__}")
    chunks = [
        ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in tensor.chunks
    ]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)


_original_load_bytes = DefaultLoadPlanner.load_bytes


def _load_bytes(planner: DefaultLoadPlanner, read_item: ReadItem, value: io.BytesIO) -> None:
    """DefaultLoadPlanner.load_bytes, restricted to objects that contain only data."""
    checked = io.BytesIO()
    torch.save(torch.load(value, weights_only=True), checked)
    checked.seek(0)
    _original_load_bytes(planner, read_item, checked)


FileSystemReader.read_metadata = _read_metadata
DefaultLoadPlanner.load_bytes = _load_bytes
torch.serialization.add_safe_globals(list(SAME_DATA))
pickle_by_value(_MEM_FORMAT_ENCODING)
# With this variable, torch.load would run code that common.pt names.
os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)
