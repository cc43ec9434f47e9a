"""Tensors of a torch_dist checkpoint, from its `.metadata`, read without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hpcgen.errors import HpcgenError
from trainer.contract.files import checkpoint_index
from trainer.contract.files.checkpoint_files import INDEX
from trainer.contract.files.regular_file import read_bytes

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One complete tensor of a checkpoint, however many ranks wrote it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Name of the torch dtype, without the `torch.` prefix."""
    chunks: int
    """Number of pieces in which the tensor was written."""

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes. FP8 and other small types take one byte per element."""
        return self.elements * _BYTES.get(self.dtype, 1)

    @property
    def is_weight(self) -> bool:
        """True if the tensor belongs to the model and not to the optimizer."""
        return not self.name.startswith("optimizer.")


def read_tensors(checkpoint: Path) -> list[Tensor]:
    """Lists the tensors of a checkpoint directory in the order of its index, without Core's extra states (raw bytes).

    Raises:
        HpcgenError: the index is missing or invalid.
    """
    path = checkpoint / INDEX
    try:
        index = checkpoint_index.parse(read_bytes(path))
    except FileNotFoundError:
        raise HpcgenError("no such file", "only torch_dist checkpoints have this index", where=path) from None
    except OSError as error:
        raise HpcgenError(f"cannot read {path}: {error.strerror}") from error
    except checkpoint_index.ForbiddenError as error:
        raise HpcgenError(
            str(error),
            "no code was executed; do not load this checkpoint, and find out who wrote the file",
            where=path,
        ) from error
    except ValueError as error:
        raise HpcgenError(str(error), where=path) from error
    return [
        Tensor(name=name, shape=tensor.shape, dtype=tensor.dtype, chunks=len(tensor.chunks))
        for name, tensor in index.tensors.items()
    ]
