"""The device on which layers are computed, and the time of parts of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import Groups, Links
from hpcgen.planning.step_time.kernels import PASSES, Kernels, Precision, Product
from trainer.contract.config.training import RecomputeModule
from trainer.contract.record import record

BYTES_PER_VALUE: dict[str, tuple[float, float]] = {
    "norm": (4, 6),
    "layer_norm": (4, 6),
    "residual": (6, 6),
    "dropout": (1, 5),
    "bias": (0, 2),
    "swiglu": (6, 10),
    "weighted_swiglu": (6, 10),
    "gelu": (4, 6),
    "rope": (4, 4),
    "copy": (4, 4),
}
"""Bytes that a memory-bound kernel reads and writes per value, forward and backward, for values of two bytes.

The values are those of the output. A bias is added by the product before it. The kernels
that are measured have the same names in the tables of topologies/kernels.
"""


@dataclass(slots=True)  # faster than a record: an estimate adds up hundreds
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


@dataclass(slots=True)
class Passes:
    """Time of a part of the model for one microbatch."""

    forward: Seconds = field(default_factory=Seconds)
    backward: Seconds = field(default_factory=Seconds)

    @classmethod
    def computing(cls, forward: float, backward: float) -> Passes:
        """Passes that wait for no transfer."""
        return cls(Seconds(forward), Seconds(backward))

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)

    def times(self, number: float) -> Passes:
        """The time of `number` equal parts."""
        return Passes(self.forward.times(number), self.backward.times(number))


class Products(NamedTuple):
    """Seconds of the products of a linear layer."""

    forward: float
    data_gradient: float
    weight_gradient: float


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
    is_frozen: bool = False
    """True for parts of the model of which no weight is trained (training.freeze)."""

    @property
    def trains_weights(self) -> bool:
        """True if the weights of the model have gradients: they are not frozen, and adapters do not replace them."""
        return self.setup.trains_weights and not self.is_frozen

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
    ) -> Products:
        """The products of a linear layer of the model. A frozen weight has no gradient."""
        found = self.trained_products(tokens, outputs, inputs, precision, groups)
        return found if self.trains_weights else found._replace(weight_gradient=0.0)

    def trained_products(
        self, tokens: float, outputs: float, inputs: float, precision: Precision, groups: int = 1
    ) -> Products:
        """The products of a linear layer whose weight is trained."""
        seconds = (
            self.kernels.product(
                Product(tokens, outputs, inputs, kind, precision, groups, self.setup.gradient_bytes)
            )
            for kind in PASSES
        )
        return Products(*seconds)

    def memory_bound(self, kernel: str, tokens: float, width: float) -> Passes:
        """A kernel of BYTES_PER_VALUE on a tensor of `width` values per token, and on its gradient."""
        forward, backward = (size * tokens * width for size in BYTES_PER_VALUE[kernel])
        return self.moving(kernel, forward, backward, width)

    def moving(
        self, kernel: str, forward: float, backward: float, width: float, experts: float = 1
    ) -> Passes:
        """A kernel that moves these bytes in both passes, if values have two bytes."""
        scale = self.setup.value_bytes / 2
        return Passes.computing(
            self.kernels.memory(kernel, "forward", scale * forward, width, experts),
            self.kernels.memory(kernel, "backward", scale * backward, width, experts),
        )

    def norm(self, tokens: float, width: float) -> Passes:
        """A norm of hidden states, or of other tensors."""
        is_rms = self.setup.model.normalization == "RMSNorm"
        return self.memory_bound("norm" if is_rms else "layer_norm", tokens, width)
