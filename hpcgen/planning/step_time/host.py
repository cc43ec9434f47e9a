"""Time that the host needs to launch the kernels of a layer. A GPU that computes it in less time waits."""

from __future__ import annotations

from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.work import Passes, Seconds

_SOURCE = "guessed from steps on one kind of host; hosts differ by a factor of two"
DENSE = Constant(3.0e-3, "the host needs 3 ms per dense layer and microbatch", _SOURCE)
TENSOR_PARALLEL = Constant(6.0e-3, "the host needs 6 ms per dense layer and microbatch with TP", _SOURCE)
GRAPHS = Constant(1.0e-3, "the host needs 1 ms per layer and microbatch with CUDA graphs", _SOURCE)
EXPERTS_FACTOR = Constant(2.5, "the host needs 2.5 times as long for a layer with experts", _SOURCE)
FORWARD_SHARE = 0.4
"""Share of the forward pass in the launches of a layer. Recomputation launches it again."""


def host_time(setup: Setup, machine: Machine, *, has_experts: bool) -> tuple[float, list[Constant]]:
    """Seconds per layer and microbatch for both passes, and the constants that were not measured."""
    has_tensor, has_graphs = (
        setup.layout.tensor_model_parallel_size > 1,
        setup.training.cuda_graph_impl != "none",
    )
    precision = "fp8" if setup.training.fp8 else "bf16"
    kind = "experts" if has_experts else "dense"
    for row in machine.measurements.host if machine.measurements else ():
        shape = row["layer"], row["tensor_parallel"], row["graphs"], row["precision"]
        if shape == (kind, has_tensor, has_graphs, precision):
            return row["us"] * 1e-6, []
    constant = GRAPHS if has_graphs else TENSOR_PARALLEL if has_tensor else DENSE
    if not has_experts:
        return constant.value, [constant]
    return EXPERTS_FACTOR.value * constant.value, [constant, EXPERTS_FACTOR]


def with_waits(passes: Passes, host: float) -> Passes:
    """`passes` of a layer with the time in which the GPU waits for the `host`, in proportion to the passes."""
    computed = passes.forward.total + passes.backward.total
    factor = max(0.0, host / computed - 1)
    return passes + Passes(
        Seconds(host=factor * passes.forward.total), Seconds(host=factor * passes.backward.total)
    )
