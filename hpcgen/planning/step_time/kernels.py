"""Times of the kernels of a GPU: a physical form, corrected by measured rows of similar shape.

The form counts what a kernel cannot avoid: floating-point operations, bytes, and a launch. Its constants are general.
The measured rows of the GPU model correct it: the ratio of measured to computed time is interpolated between the rows
nearest in shape. Without rows, the general constants decide, and `Kernels.guesses` returns them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Iterable
from typing import Literal, NamedTuple

from hpcgen.config.known_gpus import gpu_called
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.measurements import Measurements, Row

Pass = Literal["forward", "data_gradient", "weight_gradient"]
"""The three products of a linear layer."""
PASSES: tuple[Pass, ...] = ("forward", "data_gradient", "weight_gradient")
Direction = Literal["forward", "backward"]
Precision = Literal["bf16", "fp8", "fp32"]

_SOURCE = "from complete steps of GPT 1.3B and Llama on H200s"
PEAK_SHARE: dict[Precision, float] = {"bf16": 0.73, "fp8": 0.70, "fp32": 0.80}
"""Share of the dense peak that large products of Hopper GPUs reach, apart from incomplete tiles and waves."""
STORE_FACTOR = 1.7
"""Time that the output of a product adds to its main loop, relative to the time for its bytes."""
MEMORY_SHARE = Constant(0.71, "memory-bound kernels at 71% of the memory bandwidth", _SOURCE, by_tune=True)
ATTENTION_SHARE: dict[Direction, Constant] = {
    "forward": Constant(
        0.65, "attention on long samples at 65% of the bf16 peak, forward", _SOURCE, by_tune=True
    ),
    "backward": Constant(
        0.55, "attention on long samples at 55% of the bf16 peak, backward", _SOURCE, by_tune=True
    ),
}
ATTENTION_HALF_LENGTH = 600
"""Tokens of a sample for which attention reaches half of that share."""
IN_A_STEP = Constant(
    1.05,
    "products and attention take 5% longer in a step than alone",
    "guessed from complete steps on H200s. Under load, power limits the clock: 1,305 MHz on an H100",
)
LAUNCH_S = 4e-6
"""Time between two kernels of a stream."""

_TILES = ((128, 256, 1.0), (256, 128, 1.0), (128, 128, 0.93), (128, 192, 0.97), (64, 256, 0.85))
"""Rows and columns of the output that a streaming multiprocessor computes at once, and the relative speed."""
_BYTES: dict[Precision, int] = {"bf16": 2, "fp8": 1, "fp32": 4}
_NEAR = 0.05
"""Squared distance in the logarithms of a shape below which rows count almost like rows of the same shape."""
_GROUPED = 2.0
"""Distance between a grouped product and a single one, in addition to that of their shapes."""


class Product(NamedTuple):
    """One of the products of a linear layer. The shape is that of the forward product: y[m, n] = x[m, k] w[k, n]."""

    m: float
    """Tokens. With groups, tokens of each group."""
    n: float
    """Outputs."""
    k: float
    """Inputs."""
    kind: Pass = "forward"
    precision: Precision = "bf16"
    groups: int = 1
    """Equal products that are computed together: one for each expert."""
    gradient_bytes: int = 4
    """Size of a value of the buffer to which a weight gradient is added."""

    @property
    def stored_bytes(self) -> int:
        """Bytes moved per value of the output."""
        return 2 * self.gradient_bytes if self.kind == "weight_gradient" else 2

    @property
    def output(self) -> tuple[float, float, float]:
        """Rows and columns of the output, and the length of the sums."""
        if self.kind == "forward":
            return self.m, self.n, self.k
        return (self.m, self.k, self.n) if self.kind == "data_gradient" else (self.n, self.k, self.m)


class Attention(NamedTuple):
    """Fused causal attention of complete samples."""

    seq: float
    """Tokens of a sample."""
    batch: float
    """Samples."""
    heads: float
    kv_heads: float
    qk_dim: int
    """Width of queries and keys in a head."""
    v_dim: int
    """Width of values in a head."""
    direction: Direction = "forward"


class MemoryBound(NamedTuple):
    """A kernel that reads and writes `size` bytes, with a row of `width` values for each token."""

    kernel: str
    direction: Direction
    size: float
    width: float
    experts: float

    @property
    def logarithms(self) -> tuple[float, float, float]:
        """Its shape, as rows are compared."""
        return math.log(self.size), math.log(self.width), math.log(self.experts)


class Kernels:
    """Seconds of kernels on the GPUs of a machine. The time of a shape is computed once."""

    def __init__(self, machine: Machine) -> None:
        table = machine.measurements or Measurements(machine.gpu_model)
        self._machine = machine
        self._times: dict[Product | Attention | MemoryBound, float] = {}
        self._products = _Corrections(_product_row(row, machine) for row in table.products)
        self._attention = _Corrections(_attention_row(row, machine) for row in table.attention)
        memory = [_memory_row(row, machine) for row in table.memory]
        self._memory = _Corrections(memory)
        self._any_memory = _Corrections(row._replace(kind="any", shape=row.shape[:1]) for row in memory)

    def product(self, product: Product) -> float:
        """A matrix product, without the casts of its inputs to FP8."""
        if product not in self._times:
            ratio = self._products.ratio(_product_shape(product), (product.kind, product.precision))
            self._times[product] = _in_a_step(ratio) * product_form(product, self._machine)
        return self._times[product]

    def attention(self, attention: Attention) -> float:
        """Attention of the queries to all keys before them."""
        if attention not in self._times:
            ratio = self._attention.ratio(_attention_shape(attention), attention.direction)
            self._times[attention] = _in_a_step(ratio) * attention_form(attention, self._machine)
        return self._times[attention]

    def memory(
        self, kernel: str, direction: Direction, size: float, width: float = 1.0, experts: float = 1.0
    ) -> float:
        """A memory-bound kernel that reads and writes `size` bytes, with a row of `width` values for each token.

        Kernels without rows are like those with rows of this size.
        """
        if size <= 0:
            return 0.0
        key = MemoryBound(kernel, direction, size, width, experts)
        if key not in self._times:
            shape = key.logarithms
            ratio = self._memory.ratio(shape, (kernel, direction)) or self._any_memory.ratio(shape[:1], "any")
            self._times[key] = (ratio or 1.0) * memory_form(size, self._machine)
        return self._times[key]

    @property
    def used(self) -> list[Product | Attention | MemoryBound]:
        """The shapes whose times were asked for, the longest times first."""
        return sorted(self._times, key=lambda shape: -self._times[shape])

    def is_measured(self, shape: Product | Attention | MemoryBound) -> bool:
        """True if a measured row has nearly this shape."""
        if isinstance(shape, Product):
            return self._products.has_near(_product_shape(shape), (shape.kind, shape.precision))
        if isinstance(shape, Attention):
            return self._attention.has_near(_attention_shape(shape), shape.direction)
        return self._memory.has_near(shape.logarithms, (shape.kernel, shape.direction))

    def guesses(self, precisions: Iterable[Precision]) -> list[Constant]:
        """The constants that replace measured rows in a step with products in `precisions`."""
        missing = [
            product_share(self._machine.gpu_model, name)
            for name in precisions
            if not self._products.has(("forward", name))
        ]
        missing += [share for name, share in ATTENTION_SHARE.items() if not self._attention.has(name)]
        if not self._any_memory.has("any"):
            missing.append(MEMORY_SHARE)
        return [*missing, IN_A_STEP] if self._products.has(("forward", "bf16")) else missing


def _in_a_step(ratio: float | None) -> float:
    """Factor of a form. The general constants, which apply without a measured ratio, are from complete steps."""
    return 1.0 if ratio is None else IN_A_STEP.value * ratio


@functools.lru_cache(maxsize=16)
def kernels_of(machine: Machine) -> Kernels:
    """The kernels of a machine, with the times that earlier estimates have computed."""
    return Kernels(machine)


@functools.cache
def product_share(gpu_model: str, precision: Precision) -> Constant:
    """Share of the dense peak that large products reach, apart from incomplete tiles and waves.

    Power and clocks limit the share, so the best products of a GPU model tell how its others compare with Hopper's.
    """
    share, source, hopper = PEAK_SHARE[precision], _SOURCE, gpu_called("H100")
    assert hopper is not None
    assert hopper.best_product is not None
    known = gpu_called(gpu_model)
    if known is not None and known.best_product is not None:
        share *= known.best_product / hopper.best_product
        source += f", and the best products of {known.name}"
    return Constant(share, f"matrix products in {precision} at {share:.0%} of the peak", source, by_tune=True)


def product_form(product: Product, machine: Machine) -> float:
    """Time of a product: its main loop, its output, and a launch; or that for its bytes, if they take longer."""
    rows, columns, length = product.output
    values = product.groups * rows * columns
    peak = _peak(machine, product.precision) * product_share(machine.gpu_model, product.precision).value
    main_loop = 2 * values * length / (peak * _busy_share(product.groups, rows, columns, machine))
    stored = values * product.stored_bytes
    loaded = product.groups * (rows + columns) * length * _BYTES[product.precision]
    by_bytes = (stored + loaded) / (0.9 * machine.memory_bandwidth)
    return max(main_loop + STORE_FACTOR * stored / machine.memory_bandwidth, by_bytes) + LAUNCH_S


def _peak(machine: Machine, precision: Precision) -> float:
    """Dense peak in FLOP/s. Without a figure, FP8 is as fast as bf16, and fp32 does not use the tensor cores."""
    bf16 = machine.peak_flops["bf16"]
    return machine.peak_flops.get(precision, bf16 / 16 if precision == "fp32" else bf16)


def _busy_share(groups: int, rows: float, columns: float, machine: Machine) -> float:
    """Share of the GPU that works with the best tile shape. The rest of incomplete tiles and of the last wave idles."""
    best, num_sms = 0.0, machine.num_sms.value
    for tile_rows, tile_columns, speed in _TILES:
        tiles = groups * math.ceil(rows / tile_rows) * math.ceil(columns / tile_columns)
        slots = math.ceil(tiles / num_sms) * num_sms * tile_rows * tile_columns
        best = max(best, speed * groups * rows * columns / slots)
    return best


def attention_form(attention: Attention, machine: Machine) -> float:
    """Time of attention. The backward pass computes the scores again, and four more products.

    Three of these five products have the width of queries and keys, and two have that of the values.
    """
    is_forward = attention.direction == "forward"
    width = attention.qk_dim + attention.v_dim if is_forward else 3 * attention.qk_dim + 2 * attention.v_dim
    pairs = attention.batch * attention.heads * attention.seq**2 / 2
    share = (
        ATTENTION_SHARE[attention.direction].value * attention.seq / (attention.seq + ATTENTION_HALF_LENGTH)
    )
    return 2 * pairs * width / (_peak(machine, "bf16") * share) + LAUNCH_S


def memory_form(size: float, machine: Machine) -> float:
    """Time of a kernel that reads and writes `size` bytes."""
    return size / (MEMORY_SHARE.value * machine.memory_bandwidth) + LAUNCH_S


class _Ratio(NamedTuple):
    """A measured row: what it measures, the logarithms of its shape, and its time relative to the form's."""

    kind: Hashable
    shape: tuple[float, ...]
    ratio: float


class _Corrections:
    """Ratios of measured to computed times, interpolated over shapes."""

    def __init__(self, ratios: Iterable[_Ratio]) -> None:
        self._ratios: dict[Hashable, list[tuple[tuple[float, ...], float]]] = {}
        for each in ratios:
            self._ratios.setdefault(each.kind, []).append((each.shape, math.log(each.ratio)))

    def has(self, kind: Hashable) -> bool:
        """True if there are rows of `kind`."""
        return kind in self._ratios

    def has_near(self, shape: tuple[float, ...], kind: Hashable) -> bool:
        """True if there is a row of `kind` whose shape is nearly the same."""
        return any(_distance(shape, row) < _NEAR for row, _ in self._ratios.get(kind, ()))

    def ratio(self, shape: tuple[float, ...], kind: Hashable) -> float | None:
        """The ratio at `shape`: a mean of the rows of `kind`, in which near ones weigh most. None without rows."""
        total, weights = 0.0, 0.0
        for row_shape, logarithm in self._ratios.get(kind, ()):
            weight = 1 / (_distance(shape, row_shape) + _NEAR) ** 2
            total += weight * logarithm
            weights += weight
        return math.exp(total / weights) if weights else None


def _distance(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    """The squared distance of two shapes."""
    return math.dist(one, other) ** 2


def _product_shape(product: Product) -> tuple[float, ...]:
    logarithms = (math.log(max(1, size)) for size in (product.m, product.n, product.k))
    return *logarithms, math.log(product.groups) / 2, _GROUPED if product.groups > 1 else 0.0


def _attention_shape(attention: Attention) -> tuple[float, ...]:
    return (
        math.log(attention.seq),
        math.log(attention.batch * attention.heads) / 2,
        math.log(attention.heads / attention.kv_heads) / 2,
        2 * math.log(attention.qk_dim),
        2 * math.log(attention.v_dim),
    )


def product_of(row: Row) -> Product:
    """The product that a row measures. It counts the tokens of all groups."""
    groups = row["groups"]
    return Product(row["m"] / groups, row["n"], row["k"], row["pass"], row["precision"], groups)


def _product_row(row: Row, machine: Machine) -> _Ratio:
    product = product_of(row)
    ratio = row["us"] * 1e-6 / product_form(product, machine)
    return _Ratio((product.kind, product.precision), _product_shape(product), ratio)


def _attention_row(row: Row, machine: Machine) -> _Ratio:
    names = ("seq", "batch", "heads", "kv_heads", "qk_dim", "v_dim", "pass")
    attention = Attention(*(row[name] for name in names))
    ratio = row["us"] * 1e-6 / attention_form(attention, machine)
    return _Ratio(attention.direction, _attention_shape(attention), ratio)


def _memory_row(row: Row, machine: Machine) -> _Ratio:
    ratio = row["us"] * 1e-6 / memory_form(row["bytes"], machine)
    shape = math.log(row["bytes"]), math.log(row["width"]), math.log(row.get("experts", 1))
    return _Ratio((row["kernel"], row["pass"]), shape, ratio)
