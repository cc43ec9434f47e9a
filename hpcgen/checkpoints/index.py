"""Which tensors a torch_dist checkpoint holds: its `.metadata`, read without torch."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.errors import HpcgenError

INDEX = ".metadata"
"""A pickle of torch.distributed.checkpoint's Metadata."""

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor of a checkpoint, whole, however many ranks wrote it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As torch names it, without `torch.`."""
    chunks: int
    """Pieces in which it was written."""

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its numbers; FP8 and other small types have one each."""
        return self.elements * _BYTES.get(self.dtype, 1)

    @property
    def is_weight(self) -> bool:
        """Whether the model computes with it; the others are the optimizer's."""
        return not self.name.startswith("optimizer.")


def read_tensors(checkpoint: Path) -> list[Tensor]:
    """The tensors of a checkpoint directory, in its own order. What is kept as bytes (Core's extra states) is none.

    Raises:
        HpcgenError: the index is missing, or is not one.
    """
    path = checkpoint / INDEX
    try:
        with path.open("rb") as file:
            metadata = _Unpickler(file).load()
        return [
            Tensor(
                name=str(name),
                shape=tuple(int(size) for size in entry.size),
                dtype=str(entry.properties.state[0]),
                chunks=len(entry.chunks),
            )
            for name, entry in metadata.state_dict_metadata.items()
            if hasattr(entry, "chunks")
        ]
    except FileNotFoundError:
        raise HpcgenError(f"{path}: no such file", "only torch_dist checkpoints have this index") from None
    except OSError as error:
        raise HpcgenError(f"{path}: cannot be read ({error.strerror})") from error
    except Exception as error:  # a damaged pickle can fail in any way
        raise HpcgenError(f"{path}: not an index of torch_dist ({type(error).__name__}: {error})") from error


class _Record:
    """Stands for any class in the pickle, and holds what was said of the object."""

    state: tuple[Any, ...]

    def __new__(cls, *arguments: Any) -> _Record:
        return super().__new__(cls)

    def __init__(self, *arguments: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)
        else:
            self.state = state


class _Unpickler(pickle.Unpickler):
    """Imports nothing and calls nothing, whatever the file asks for: a checkpoint may come from anywhere."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) == ("torch", "Size"):
            return tuple
        if module_name == "torch":  # a dtype: torch.float32
            return global_name
        return _Record
