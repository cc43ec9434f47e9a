"""The device on which layers are computed, and the time of parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import Groups, Links
from hpcgen.planning.step_time.kernels import PASSES, Kernels, Precision, Product
from trainer.contract.config.training import RecomputeModule
from trainer.contract.record import record

BYTES_PER_VALUE: dict[str, tuple[float, float]] = {
    "norm": (4, 6),
    "residual": (6, 6),
    "dropout": (1, 5),
    "bias": (0, 2),
    "swiglu": (6, 10),
    "gelu": (4, 6),
    "rope": (4, 4),
    "copy": (4, 4),
    "embedding": (4, 4),
    "permute": (4, 4),
    "unpermute": (4, 4),
    "router": (16, 16),
    "cast_current": (6, 6),
    "cast_delayed": (4, 4),
}
"""Bytes that a memory-bound kernel reads and writes per value, forward and backward, for values of two bytes.

The values are those of the output; for swiglu, half as many as of the input. A bias is added by the product before it.
The cast to FP8 also writes the transpose, and with current scaling it first reads the input for its maximum.
"""


@record
class Seconds:
    """Time on the critical path of a device, by what it waits for."""

    compute: float = 0.0
    tensor_parallel: float = 0.0
    """Transfers that no computation hides, by the parallelism that needs them. The next two likewise."""
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    host: float = 0.0
    """Waiting for the host to launch kernels."""

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(
            self.compute + other.compute,
            self.tensor_parallel + other.tensor_parallel,
            self.context_parallel + other.context_parallel,
            self.expert_parallel + other.expert_parallel,
            self.host + other.host,
        )

    def times(self, number: float) -> Seconds:
        """The time of `number` equal parts."""
        return Seconds(
            number * self.compute,
            number * self.tensor_parallel,
            number * self.context_parallel,
            number * self.expert_parallel,
            number * self.host,
        )

    @property
    def total(self) -> float:
        """Sum in seconds."""
        transfers = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return self.compute + transfers + self.host


@record
class Passes:
    """Time of a part of the model for one microbatch."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()

    @classmethod
    def computing(cls, forward: float, backward: float) -> Passes:
        """Passes that wait for no transfer."""
        return cls(Seconds(forward), Seconds(backward))

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: float) -> Passes:
        """The time of `number` equal parts."""
        return Passes(self.forward.times(number), self.backward.times(number))


@record
class Part:
    """A part of a layer, and the module of selective recomputation that computes it again."""

    passes: Passes
    module: RecomputeModule | None = None


def added(passes: Iterable[Passes]) -> Passes:
    """The sum of `passes`."""
    return sum(passes, Passes())


@record(eq=False)
class Device:
    """A rank of a run: its setup, its kernels, and its links to other ranks."""

    setup: Setup
    kernels: Kernels
    links: Links
    groups: Groups
    documents: Sequence[int]
    """Lengths of the documents of a sample in tokens, if they are separate."""
    imbalance: float
    """Tokens of the experts of the busiest device, relative to the mean."""

    @property
    def precision(self) -> Precision:
        """Precision of the products of the layers."""
        training = self.setup.training
        return "fp8" if training.fp8 else self.precision_outside_layers

    @property
    def precision_outside_layers(self) -> Precision:
        """Precision of products that FP8 excludes. fp16 is as fast as bf16."""
        return "fp32" if self.setup.training.precision == "fp32" else "bf16"

    @property
    def sharded_tokens(self) -> float:
        """Tokens of a microbatch between the layers."""
        return self.setup.sharded(self.setup.tokens)

    def products(
        self, tokens: float, outputs: float, inputs: float, precision: Precision, groups: int = 1
    ) -> tuple[float, float, float]:
        """The forward product of a linear layer, the gradient of its inputs, and that of its weights."""
        forward, data, weight = (
            self.kernels.product(
                Product(tokens, outputs, inputs, kind, precision, groups, self.setup.gradient_bytes)
            )
            for kind in PASSES
        )
        return forward, data, weight

    def memory_bound(self, kernel: str, values: float, gradients: float | None = None) -> Passes:
        """A kernel of BYTES_PER_VALUE on a tensor, and in the backward pass on `gradients`. Default: as many."""
        forward, backward = BYTES_PER_VALUE[kernel]
        scale = self.setup.value_bytes / 2
        return Passes.computing(
            self.kernels.memory(kernel, "forward", scale * forward * values),
            self.kernels.memory(
                kernel, "backward", scale * backward * (values if gradients is None else gradients)
            ),
        )
