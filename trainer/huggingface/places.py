"""Names under which files store the tensors of a family: transformers loads several spellings of the same model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from trainer.contract.families.model_family import HEAD

EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
"""Names of the tensors of a single expert."""

STACKED = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
"""Matrix of an expert -> the tensor in which transformers 5 stacks the matrices of all experts, and the half of the
tensor that has the matrix."""


@dataclass(frozen=True)
class TensorPart:
    """A tensor of a file, or the part of one that belongs to one expert."""

    stored: str
    """Name in the file."""
    expert: int | None = None
    half: int | None = None
    """0 or 1: the first or second half of the rows, since gate and up are joined."""
    num_experts: int = 1

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the tensor in the file, computed from the shape of the part."""
        if self.expert is None:
            return shape
        rows = shape[0] if self.half is None else 2 * shape[0]
        return (self.num_experts, rows, *shape[1:])

    def index(self, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
        """Index of the part in the tensor of the file."""
        if self.expert is None:
            return ()
        if self.half is None:
            return (self.expert,)
        return self.expert, slice(self.half * shape[0], (self.half + 1) * shape[0])


def places(name: str, tied: str | None, num_experts: int) -> Iterator[TensorPart]:
    """Yields the places where a file may have the tensor that the family calls `name`.

    `tied` is the embedding of a model that also uses it as its head. Files keep one of the two names.
    """
    names = [name, HEAD] if name == tied else [name]
    names += [each.replace(".block_sparse_moe.", ".mlp.") for each in names if ".block_sparse_moe." in each]
    names += [each.partition(".")[2] for each in names if each != HEAD]  # models without a head
    for each in names:
        yield TensorPart(each)
        if expert := EXPERT.fullmatch(each):
            tensor, half = STACKED[expert["matrix"]]
            yield TensorPart(f"{expert['experts']}.{tensor}", int(expert["number"]), half, num_experts)
