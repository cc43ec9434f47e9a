"""Which tensors a torch_dist checkpoint holds: its `.metadata`, read without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from hpcgen.errors import HpcgenError
from trainer.contract import checkpoint_index
from trainer.contract.checkpoint_index import INDEX

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
        index = checkpoint_index.parse(path.read_bytes())
    except FileNotFoundError:
        raise HpcgenError(f"{path}: no such file", "only torch_dist checkpoints have this index") from None
    except OSError as error:
        raise HpcgenError(f"{path}: cannot be read ({error.strerror})") from error
    except checkpoint_index.ForbiddenError as error:
        raise HpcgenError(
            f"{path}: {error}",
            "nothing was run; do not load this checkpoint, and find out who wrote the file",
        ) from error
    except ValueError as error:
        raise HpcgenError(f"{path}: {error}") from error
    return [
        Tensor(name=name, shape=tensor.shape, dtype=tensor.dtype, chunks=len(tensor.chunks))
        for name, tensor in index.tensors.items()
    ]
