"""Rules about speed and memory. Their violations are warnings, except that of a model that must fit."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from hpcgen.planning.memory import GIB, OTHER_GIB, MemoryEstimate, estimate_memory, nccl_gib
from hpcgen.planning.setup import Setup
from trainer.contract.model.adapters import targets
from trainer.contract.model.layout import Layout
from trainer.contract.model.model_size import active_parameter_count
from trainer.contract.problem import Problem
from trainer.contract.record import record
from trainer.contract.rules import context_parallel, experts
from trainer.contract.rules.facts import Facts, Rule, divisors
from trainer.contract.rules.parallelism import CP, PP, TP, VPP

MICRO_BATCH = "training.micro_batch_size"
MODULES = "training.recompute_modules"
INSTANCES = "parallelism.num_distributed_optimizer_instances"
GRANULARITY = "training.recompute_granularity"
FULL_RECOMPUTE: dict[str, object] = {
    GRANULARITY: "full",
    MODULES: None,
    "training.recompute_method": "uniform",
    "training.recompute_num_layers": 1,
}

MAX_BUBBLE_FRACTION = 0.1
MAX_BATCH_FACTOR = 2
"""Largest batch that a hint offers, relative to that of the run. A much larger one changes what is learned."""
LONG_TRANSFERS = 0.35
"""Time of tensor-parallel transfers at the peak of NVLink, relative to that of the computation at the peak of a device,
above which they take a fifth of a step, so that half of them is a tenth: kernels reach four sevenths of the peak, and
collectives 80% of one direction of NVLink (step_time/machine.py)."""
SHORT_LAYER_S = 2.3e-3
"""Time of a layer and a microbatch at the peak of a device, below which GPUs wait for their host in a tenth of a step
or more: kernels reach four sevenths of the peak, and a host launches a layer in 4.5 ms (step_time/host.py)."""
LAUNCHES_WITH_TENSOR_PARALLELISM = 1.5
"""Launches of a layer, relative to one without tensor parallelism."""
LAUNCHES_WITH_EXPERTS = 2.7
"""Launches of a layer, relative to one without experts."""
LAUNCHES_WITH_ADAPTERS = 2.4
"""Launches of a dense layer with adapters, relative to one without (step_time/host.py)."""
SMALL_HEADROOM = 0.03
"""Part of the memory of a device that fragments and uneven loads of experts can take."""


@record
class DeviceMemory:
    """The memory of a device of a run, in GiB."""

    estimate: MemoryEstimate
    """Estimate of the fullest device."""
    available_gib: float
    headroom_gib: float
    """Memory that should remain next to tensors, CUDA and libraries, for fragments and NCCL's buffers."""

    @property
    def free_gib(self) -> float:
        """Free memory. Negative if the tensors do not fit."""
        return self.available_gib - OTHER_GIB - self.estimate.total_gib

    @property
    def is_tight(self) -> bool:
        """True if too little remains to be safe."""
        return self.free_gib < self.headroom_gib


def device_memory(facts: Facts) -> DeviceMemory | None:
    """The memory of a device; None if layout, vocabulary or the size of the memory are unknown."""
    layout, available = facts.layout, facts.device_memory_gib
    if layout is None or available is None or facts.resolved_model.padded_vocab_size is None:
        return None
    return memory_of(Setup.of_facts(facts, layout), available, facts.nvlink_devices)


def memory_of(setup: Setup, available_gib: float, nvlink_devices: int) -> DeviceMemory:
    """The memory of a device with `available_gib`, of which NVLink connects `nvlink_devices`."""
    headroom = max(SMALL_HEADROOM * available_gib, nccl_gib(setup.layout, nvlink_devices))
    return DeviceMemory(estimate_memory(setup), available_gib, headroom)


def pipeline_is_mostly_busy(facts: Facts) -> Iterator[Problem]:
    """(PP - 1) / (VPP x num_microbatches) <= 10% (arXiv 2104.04473, section 2.2; the limit is hpcgen's)."""
    layout = facts.layout
    if layout is None or layout.bubble_fraction <= MAX_BUBBLE_FRACTION:
        return
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    microbatches = math.ceil((stages - 1) / (chunks * MAX_BUBBLE_FRACTION))
    microbatches = math.ceil(microbatches / stages) * stages if chunks > 1 else microbatches
    enough = microbatches * layout.data_parallel_size * facts.training.micro_batch_size
    is_near = enough <= MAX_BATCH_FACTOR * facts.training.global_batch_size
    larger_batch = f"set training.global_batch_size to {enough} or more, or " if is_near else ""
    yield Problem(
        path=PP,
        reason=f"results in a pipeline bubble of {layout.bubble_fraction:.0%} of the compute time: (PP - 1) / (VPP x "
        f"num_microbatches) = {stages - 1} / ({chunks} x {layout.num_microbatches})",
        candidates=[size for size in divisors(stages, near=stages) if size < stages],
        offers=1,
        hint=f"{larger_batch}use more virtual stages",
    )


def recomputation_is_needed(facts: Facts) -> Iterator[Problem]:
    """Without recomputation, the model would not fit the device with headroom (hpcgen's rule, since recomputing a layer
    makes it a third slower).
    """
    if facts.training.recompute_granularity is None:
        return
    used = [path for path in FULL_RECOMPUTE if facts.value_at(path) is not None]
    memory = device_memory(functools.reduce(lambda made, path: made.with_value(path, None), used, facts))
    if memory is not None and not memory.is_tight:
        yield Problem(
            path=GRANULARITY,
            reason="is not needed: without recomputation, the tensors take about "
            f"{memory.estimate.total_gib:.1f} GiB of {_device(memory.available_gib)}",
            hint=f"set {', '.join(path.partition('.')[2] for path in used)} to null",
        )


def microbatch_may_be_small(facts: Facts, peak_tflops: float | None) -> bool:
    """True if GPUs may wait for their host because microbatches are small. Only a prediction tells whether they do."""
    layout, training, model = facts.layout, facts.training, facts.resolved_model
    if peak_tflops is None or layout is None or model.padded_vocab_size is None:
        return False
    if layout.num_microbatches == 1 or training.cuda_graph_impl != "none":
        return False
    tokens = training.micro_batch_size * model.seq_length / layout.context_parallel_size
    short_s = SHORT_LAYER_S
    short_s *= LAUNCHES_WITH_TENSOR_PARALLELISM if layout.tensor_model_parallel_size > 1 else 1
    short_s *= LAUNCHES_WITH_EXPERTS if model.num_moe_experts else 1
    short_s *= LAUNCHES_WITH_ADAPTERS if facts.lora.rank is not None else 1
    return tokens * _flops_per_token(facts, layout) / (peak_tflops * 1e12) < short_s


def tensor_parallelism_may_dominate(
    facts: Facts, peak_tflops: float | None, nvlink_gb_s: float | None
) -> bool:
    """True if GPUs may wait long for tensor-parallel transfers inside NVLink. Only a prediction tells whether another
    layout is faster. Groups that cross the network are found by a rule.

    Args:
        facts: the run.
        peak_tflops: peak of a device in the precision of the layers. None if unknown.
        nvlink_gb_s: bandwidth of a device's links in both directions. None without NVLink.
    """
    layout, model = facts.layout, facts.resolved_model
    if layout is None or peak_tflops is None or nvlink_gb_s is None or model.padded_vocab_size is None:
        return False
    ranks = layout.tensor_model_parallel_size
    if ranks == 1 or facts.crosses_network(ranks):
        return False
    # all-gather and reduce-scatter of two-byte values, before and after attention and MLP, forward and backward
    num_bytes = 8 * 2 * model.hidden_size * (ranks - 1) / ranks
    transfers_s = num_bytes / (nvlink_gb_s / 2 * 1e9)
    return transfers_s > LONG_TRANSFERS * _flops_per_token(facts, layout) / (peak_tflops * 1e12)


def adapts_experts(facts: Facts) -> bool:
    """True if experts have adapters. Only a prediction tells whether training all weights is faster."""
    lora = facts.lora
    return lora.rank is not None and any(each.num_experts for each in targets(lora, facts.resolved_model))


def _flops_per_token(facts: Facts, layout: Layout) -> float:
    """Floating-point operations of a device for a token in a layer, forward and backward."""
    model = facts.resolved_model
    return 6 * active_parameter_count(model) / model.num_layers / layout.tensor_model_parallel_size


def model_fits_device(facts: Facts) -> Iterator[Problem]:
    """The estimated memory fits the device (sources: hpcgen.planning.memory). An error unless memory_check says
    otherwise. Reported at the first key of the layout that the user set.
    """
    memory = device_memory(facts)
    if memory is not None and memory.free_gib < 0:
        estimate = memory.estimate
        keys = (facts.world.path, TP, PP, VPP, CP, MICRO_BATCH)
        path = next((key for key in facts.set_by_user if key in keys), TP)
        layout = f" ({_axes(facts)})" if path == facts.world.path else ""
        yield Problem(
            path=path,
            reason=f"results in about {estimate.total_gib:.1f} GiB on {_device(memory.available_gib)}: "
            f"{estimate.parameter_bytes / GIB:.1f} GiB of weights, gradients and optimizer state, "
            f"{estimate.activation_bytes / GIB:.1f} GiB of activations, and "
            f"{estimate.kernel_bytes / GIB:.1f} GiB of buffers for kernels{layout}",
        )


def _axes(facts: Facts) -> str:
    axes = facts.parallelism
    sizes = (axes.tensor_model_parallel_size, axes.pipeline_model_parallel_size, axes.context_parallel_size)
    return f"TP x PP x CP = {' x '.join(map(str, sizes))}"


def changes_of_memory(facts: Facts) -> dict[str, list[dict[str, object]]]:
    """Changes that may reduce the memory per device: the path of a key -> the values that change with it,
    nearest first.
    """
    axes, training, model = facts.parallelism, facts.training, facts.model
    layers_per_stage = model.num_layers // axes.pipeline_model_parallel_size
    nodes = nodes_that_fit(facts)
    values: dict[str, Sequence[object]] = {
        facts.world.path: [] if nodes is None else [nodes],
        TP: _larger(axes.tensor_model_parallel_size, model.num_attention_heads),
        PP: _larger(axes.pipeline_model_parallel_size, model.num_layers),
        VPP: [
            count if count > 1 else None
            for count in divisors(layers_per_stage, near=facts.parallelism.num_chunks)
        ],
        CP: _larger(axes.context_parallel_size, facts.nvlink_devices),
        MICRO_BATCH: divisors(training.micro_batch_size, near=training.micro_batch_size)[1:],
        "parallelism.sequence_parallel": [] if axes.sequence_parallel else [True],
        INSTANCES: divisors(
            axes.num_distributed_optimizer_instances, near=axes.num_distributed_optimizer_instances
        )[1:],
    }
    changes: dict[str, list[dict[str, object]]] = {
        path: [{path: value} for value in found] for path, found in values.items()
    }
    if training.recompute_granularity != "full":
        modules = training.recompute_modules or ()
        mlp: dict[str, object] = {MODULES: (*modules, "mlp"), GRANULARITY: "selective"}
        return changes | {MODULES: [] if "mlp" in modules else [mlp], GRANULARITY: [FULL_RECOMPUTE]}
    return changes


def _larger(size: int, multiple: int) -> list[object]:
    return [divisor for divisor in divisors(multiple, near=size) if divisor > size]


def device_has_headroom(facts: Facts) -> Iterator[Problem]:
    """NCCL's buffers fit what remains of the device, and at least 3% remain (the limit is hpcgen's)."""
    memory = device_memory(facts)
    if memory is not None and memory.free_gib >= 0 and memory.is_tight:
        assert facts.layout is not None
        left, needed = memory.free_gib, nccl_gib(facts.layout, facts.nvlink_devices)
        yield Problem(
            path=TP,
            reason=f"leaves {left:.1f} GiB ({left / memory.available_gib:.1%}) on {_device(memory.available_gib)}: "
            f"the tensors take about {memory.estimate.total_gib:.1f} GiB. NCCL's buffers may take {needed:.1f} GiB, "
            "and uneven loads of experts more",
            hint="use more nodes or pipeline stages if the run ends out of memory",
        )


def _device(available: float) -> str:
    return f"a device with {available:g} GiB, of which CUDA, libraries and fragments need {OTHER_GIB:g} GiB"


def _estimate(facts: Facts, layout: Layout) -> MemoryEstimate:
    return estimate_memory(Setup.of_facts(facts, layout))


def nodes_that_fit(facts: Facts) -> int | None:
    """The smallest multiple of the number of nodes with which the model fits with headroom. None if there is none, or
    if memory or layout are unknown.
    """
    memory = device_memory(facts)
    if memory is None or facts.layout is None:
        return None
    usable = memory.available_gib - OTHER_GIB - memory.headroom_gib
    times = _times_nodes_that_fit(facts, facts.layout, usable)
    return None if times is None else times * facts.world.count


def _times_nodes_that_fit(facts: Facts, layout: Layout, usable: float) -> int | None:
    """The factor for the number of nodes with which the model fits, because more ranks share the optimizer state. None
    if no factor helps.

    A rank needs at least one microbatch of the global batch, or with interleaved stages one for each stage.
    """
    is_interleaved = layout.virtual_pipeline_model_parallel_size > 1
    unit = layout.pipeline_model_parallel_size if is_interleaved else 1
    for times in divisors(layout.num_microbatches // unit, near=1):
        larger = dataclasses.replace(
            layout,
            data_parallel_size=times * layout.data_parallel_size,
            expert_data_parallel_size=times * (layout.expert_data_parallel_size or 1),
        )
        if _estimate(facts, larger).total_gib <= usable:
            return times
    return None


RULES: tuple[Rule, ...] = (
    context_parallel.tensor_and_context_parallel_stay_in_node,
    pipeline_is_mostly_busy,
    model_fits_device,
    device_has_headroom,
)

SPEED_RULES: tuple[Rule, ...] = (
    context_parallel.tensor_and_context_parallel_stay_in_node,
    experts.experts_stay_in_node,
    pipeline_is_mostly_busy,
    recomputation_is_needed,
)
"""Rules about speed alone. hpcgen/planning/layouts/advice.py names a faster layout for each violation."""


def may_be_slow(facts: Facts, peak_tflops: float | None, nvlink_gb_s: float | None) -> bool:
    """True if a prediction could find a faster layout of a run that breaks no rule."""
    is_slow = any(True for rule in SPEED_RULES for _ in rule(facts))
    return (
        is_slow
        or adapts_experts(facts)
        or microbatch_may_be_small(facts, peak_tflops)
        or tensor_parallelism_may_dominate(facts, peak_tflops, nvlink_gb_s)
    )
