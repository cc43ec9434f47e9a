"""Reads the index of a torch_dist checkpoint, `.metadata`, without running any code that it names.

The index is a pickle, and unpickling can call any function with any arguments. This module imports and calls nothing
that the pickle names. Plain records stand in for torch's classes; their contents are checked and copied into the types
below.
"""

from __future__ import annotations

import copyreg
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trainer.contract.files.checkpoint_files import INDEX
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.problem import Problem

PACKAGES = ("torch.", "megatron.core.dist_checkpointing.")
"""Prefixes of the modules whose classes an index may contain: the format's own, and modules of older versions of
Megatron-Core."""

PLAIN = frozenset(
    {
        ("collections", "OrderedDict"),
        ("builtins", "set"),
        *((module, name) for module in ("pathlib", "pathlib._local") for name in ("Path", "PosixPath")),
    }
)
"""Other classes that torch's writers put into an index. Python 3.13 names the classes of pathlib differently."""

ENUMS = frozenset(
    {
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.planner", "WriteItemType"),
    }
)
"""torch's enums in an index. Python 3.11.0 to 3.11.3 pickles their members as getattr(class, name)."""

Sizes = tuple[int, ...]


class ForbiddenError(ValueError):
    """A checkpoint file names code that no checkpoint needs. Unpickling the file would run that code."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint."""

    shape: Sizes
    dtype: str
    """torch's name of the data type, without `torch.`."""
    chunks: tuple[tuple[Sizes, Sizes], ...]
    """Offsets and sizes of the pieces that were written."""


@dataclass(frozen=True)
class StoredBytes:
    """Location of the bytes of an object or of one piece of a tensor."""

    name: str
    offsets: Sizes | None
    """Offsets of the piece in its tensor; None for an object."""
    number: int | None
    """Likely index of the piece in the list of chunks."""
    file: str
    """Name of a file in the checkpoint's directory."""
    first: int
    """Offset of the first byte."""
    length: int
    """Number of bytes."""


@dataclass(frozen=True)
class CheckpointIndex:
    """The tensors and objects of a checkpoint, with the locations of their bytes."""

    tensors: Mapping[str, StoredTensor]
    objects: tuple[str, ...]
    """Names of the entries that are stored as bytes, such as Core's extra states."""
    places: tuple[StoredBytes, ...]
    version: str | None
    """Version of torch.distributed.checkpoint's format."""


def parse(data: bytes) -> CheckpointIndex:
    """Reads the bytes of an index.

    Raises:
        ForbiddenError: the index names code that no index needs.
        ValueError: the bytes are not a valid index.
    """
    try:
        return _index(_Unpickler(io.BytesIO(data)).load())
    except ForbiddenError:
        raise
    except Exception as error:  # a damaged pickle can fail in any way
        raise ValueError(f"not a torch_dist index ({type(error).__name__}: {error})") from error


def problem(checkpoint: Path) -> Problem | None:
    """Why the index of a checkpoint's directory cannot be read; None if it can.

    Raises:
        OSError: the storage fails, or there is no index.
    """
    try:
        parse(read_bytes(checkpoint / INDEX))
    except ForbiddenError as error:
        return Problem(
            "", f"{error}. The code was not run. Do not load this checkpoint", "find out who wrote its files"
        )
    except ValueError as error:
        return Problem(INDEX, f"cannot be read: {error}")
    return None


def pickle_by_value(enum: type[Enum]) -> None:
    """Makes this process pickle the members of `enum` by value, as all Pythons but 3.11.0 to 3.11.3 do.

    These versions write getattr(class, name). Readers such as hpcgen 0.2.0's take it for an attack and refuse it.
    """
    copyreg.pickle(enum, lambda member: (type(member), (member.value,)))


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


def _place(key: Any, value: Any) -> StoredBytes:
    file = _text(value.relative_path)
    if file in {"", ".", ".."} or "/" in file or "\0" in file:
        raise ValueError(f"{file!r} is not the name of a file in the checkpoint")
    if getattr(value, "transform_descriptors", None):
        raise ValueError(f"{file} is transformed: {value.transform_descriptors!r}")
    offsets, number = getattr(key, "offset", None), getattr(key, "index", None)
    return StoredBytes(
        name=_text(key.fqn),
        offsets=None if offsets is None else _sizes(offsets),
        number=None if number is None else _count(number),
        file=file,
        first=_count(value.offset),
        length=_count(value.length),
    )


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected a string, got a {type(value).__name__}")
    return value


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"expected a non-negative integer, got a {type(value).__name__}")
    return value


def _sizes(values: Any) -> Sizes:
    return tuple(map(_count, values))


class _Unpickler(pickle.Unpickler):
    """Unpickles an index with records in place of its classes."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        # New classes for each file, since a pickle can set attributes of the classes that it names.
        self._record = type("Record", (), {"__new__": _new, "__init__": _ignore})
        self._sequence = type("Sequence", (self._record,), {"__setstate__": _keep})
        self._enum = enum = type("Enum", (self._record,), {})

        def member(cls: type, *arguments: Any) -> Any:
            """__new__ of the stand-in for getattr: accepts a class of ENUMS and a name, and looks nothing up."""
            if len(arguments) != 2 or arguments[0] is not enum or type(arguments[1]) is not str:
                raise _forbidden("builtins.getattr")
            return object.__new__(enum)

        self._getattr = type("Getattr", (), {"__new__": member})

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        if module_name == "torch":  # a dtype: torch.float32
            return global_name
        if global_name == "TensorProperties":
            return self._sequence
        if (module_name, global_name) in ENUMS:
            return self._enum
        if (module_name, global_name) == ("builtins", "getattr"):
            return self._getattr
        if module_name.startswith(PACKAGES) or (module_name, global_name) in PLAIN:
            return self._record
        raise _forbidden(f"{module_name}.{global_name}")


def _forbidden(name: str) -> ForbiddenError:
    return ForbiddenError(
        f"{INDEX} names {name}, which no checkpoint's index needs. It may have been put there to run code on load"
    )


def _new(cls: type, *arguments: Any) -> Any:
    return object.__new__(cls)


def _ignore(self: Any, *arguments: Any) -> None:
    """__init__ of a stand-in: accepts the arguments of the real class."""


def _keep(self: Any, state: Any) -> None:
    """__setstate__ of a stand-in for a class whose state is a tuple."""
    self.state = state
