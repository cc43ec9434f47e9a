"""Reads the index of a torch_dist checkpoint, `.metadata`, without running anything that it asks for.

The index is a pickle, and a pickle can name any function to be called with arguments of its choice. Here nothing that
it names is imported or called: plain records stand in for torch's classes, and what they hold is checked and copied
into the types below. hpcgen and the trainer both read the index through this module, which needs only the standard
library.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

INDEX = ".metadata"
"""A pickle of torch.distributed.checkpoint's Metadata."""

PACKAGES = ("torch.", "megatron.core.dist_checkpointing.")
"""Where the classes in an index come from: the format's own, and those of Megatron-Core's older versions."""

PLAIN = frozenset(
    {("collections", "OrderedDict"), ("pathlib", "Path"), ("pathlib", "PosixPath"), ("builtins", "set")}
)
"""Other classes that torch's writers put into it."""

Sizes = tuple[int, ...]


class ForbiddenError(ValueError):
    """A checkpoint file names code that no checkpoint needs; loading it would run that code."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    shape: Sizes
    dtype: str
    """As torch names it, without `torch.`."""
    chunks: tuple[tuple[Sizes, Sizes], ...]
    """Offsets and sizes of the pieces in which it was written."""


@dataclass(frozen=True)
class Place:
    """Where the bytes of a tensor's piece or of an object are."""

    name: str
    offsets: Sizes | None
    """Offsets of the piece in its tensor; None for an object."""
    number: int | None
    """Position of the piece among the chunks, as a hint."""
    file: str
    """Name of a file in the checkpoint's directory."""
    first: int
    """Offset of the first byte."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors and objects of a checkpoint, and where they are."""

    tensors: Mapping[str, StoredTensor]
    objects: tuple[str, ...]
    """Names of what is stored as bytes, as Core's extra states are."""
    places: tuple[Place, ...]
    version: str | None
    """Version of torch.distributed.checkpoint's format."""


def parse(data: bytes) -> CheckpointIndex:
    """Reads the bytes of an index.

    Raises:
        ForbiddenError: they name code that no index needs.
        ValueError: they are no index.
    """
    try:
        return _index(_Unpickler(io.BytesIO(data)).load())
    except ForbiddenError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"not an index of torch_dist ({type(error).__name__}: {error})") from error


def _index(root: Any) -> CheckpointIndex:
    tensors, objects = {}, []
    for name, entry in root.state_dict_metadata.items():
        if hasattr(entry, "chunks"):
            tensors[_text(name)] = _tensor(entry)
        else:
            objects.append(_text(name))
    version = getattr(root, "version", None)
    return CheckpointIndex(
        tensors=tensors,
        objects=tuple(objects),
        places=tuple(_place(key, value) for key, value in (root.storage_data or {}).items()),
        version=None if version is None else _text(version),
    )


def _tensor(entry: Any) -> StoredTensor:
    dtype = entry.properties.state[0]
    chunks = tuple((_sizes(chunk.offsets), _sizes(chunk.sizes)) for chunk in entry.chunks)
    return StoredTensor(_sizes(entry.size), _text(dtype), chunks)


def _place(key: Any, value: Any) -> Place:
    file = _text(value.relative_path)
    if file in {"", ".", ".."} or "/" in file or "\0" in file:
        raise ValueError(f"{file!r} is no name of a file in the checkpoint")
    if getattr(value, "transform_descriptors", None):
        raise ValueError(f"{file} is transformed: {value.transform_descriptors!r}")
    offsets, number = getattr(key, "offset", None), getattr(key, "index", None)
    return Place(
        name=_text(key.fqn),
        offsets=None if offsets is None else _sizes(offsets),
        number=None if number is None else _count(number),
        file=file,
        first=_count(value.offset),
        length=_count(value.length),
    )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"a {type(value).__name__} where a text is expected")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"a {type(value).__name__} where a number of at least 0 is expected")
    return value


def _sizes(values: Any) -> Sizes:
    return tuple(map(_count, values))


class _Unpickler(pickle.Unpickler):
    """Unpickles an index with records in place of its classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # New ones for each file: a pickle can set attributes of a class that it names.
        self._record = type("Record", (), {"__new__": _new, "__init__": _ignore})
        self._sequence = type("Sequence", (self._record,), {"__setstate__": _keep})

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        if module_name == "torch":  # a dtype: torch.float32
            return global_name
        if global_name == "TensorProperties":
            return self._sequence
        if module_name.startswith(PACKAGES) or (module_name, global_name) in PLAIN:
            return self._record
        raise ForbiddenError(
            f"{INDEX} names {module_name}.{global_name}, which no checkpoint's index needs: it may be there to run "
            "code where it is loaded"
        )


def _new(cls: type, *arguments: Any) -> Any:
    return object.__new__(cls)


def _ignore(self: Any, *arguments: Any) -> None:
    """Takes what the class would be made with."""


def _keep(self: Any, state: Any) -> None:
    """Takes the state of a class whose state is a tuple."""
    self.state = state
