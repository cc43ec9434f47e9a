"""The predicted time of an optimizer step, put together from its layers, its pipeline and its update."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence

from hpcgen.planning.memory.parameters import layer_kinds
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import Collective, Group, Groups, Links, NotedLinks
from hpcgen.planning.step_time.data_parallel import (
    DataParallel,
    data_parallel_time,
    least_reductions,
    weight_transfers,
)
from hpcgen.planning.step_time.frozen import saved_time
from hpcgen.planning.step_time.host import AFTER_ROUTING, AFTER_TRANSFERS, host_is_measured
from hpcgen.planning.step_time.kernels import Kernels, kernels_of
from hpcgen.planning.step_time.layer import chunk_time
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.optimizer import OVERHEAD, optimizer_time
from hpcgen.planning.step_time.parts import KnownParts, Parts
from hpcgen.planning.step_time.pipeline import Timeline, least_ends, replay
from hpcgen.planning.step_time.result import Schedule, StageTime, StepTime
from hpcgen.planning.step_time.traffic import NetworkBytes, SentBytes, Transfer
from hpcgen.planning.step_time.work import Device, Passes, Seconds, added
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.pipeline import mtp_chunk, mtp_stage
from trainer.contract.record import record


def estimate_step_time(
    setup: Setup,
    machine: Machine,
    *,
    documents: Sequence[int] = (),
    imbalance: float = 1.0,
    host: float = 1.0,
) -> StepTime:
    """The time of a step of `setup` on a machine.

    Args:
        setup: a resolved training run.
        machine: its machine.
        documents: lengths of the documents in a typical sample, in tokens, for a run that separates documents.
            Default: one document per sample.
        imbalance: tokens that the experts of the busiest device receive, relative to the mean.
        host: time in which the host launches kernels, relative to the measured one.
    """
    return Estimator(machine, documents=documents, imbalance=imbalance, host=host).step_time(setup)


class Estimator:
    """Estimates steps of one run in several layouts. What they have in common is computed once.

    They may differ in the keys that `hpcgen.planning.step_time.parts` names, and in no others.
    """

    def __init__(
        self, machine: Machine, *, documents: Sequence[int] = (), imbalance: float = 1.0, host: float = 1.0
    ) -> None:
        self._machine = machine
        self._links = Links(machine)
        self._documents = documents
        self._imbalance = imbalance
        self._parts = KnownParts(machine, host)

    def step_time(self, setup: Setup) -> StepTime:
        """The time of a step of `setup`."""
        step = self.step(setup, self._links)
        timeline, device = step.timeline, step.device
        stages = [added(stage) for stage in step.chunks]
        slowest = stages[timeline.slowest].times(setup.layout.num_microbatches)
        both = slowest.forward + slowest.backward
        return StepTime(
            compute=both.compute,
            host=both.host,
            tensor_parallel=both.tensor_parallel,
            context_parallel=both.context_parallel,
            expert_parallel=both.expert_parallel,
            data_parallel=step.data_parallel.total,
            pipeline_bubble=max(0.0, timeline.bubble),
            pipeline_transfers=timeline.transferring[timeline.slowest],
            optimizer=max(optimizer_time(device, stage) for stage in range(len(stages))),
            stages=tuple(StageTime(stage.forward.total, stage.backward.total) for stage in stages),
            guesses=tuple(str(each) for each in (*step.guesses, *_guesses(device)) if not each.is_measured),
            host_is_measured=host_is_measured(setup, self._machine),
        )

    def least_time(self, setup: Setup) -> float:
        """A time that a step of `setup` exceeds, without the replay of its pipeline."""
        device = self._device(setup, self._links)
        chunks, _ = _chunks(setup, self._parts.of(device))
        forward, backward = _durations(chunks)
        transfers = _transfers(device)
        ends = least_ends(forward, backward, setup.layout.num_microbatches, transfers)
        sending = (0.0, transfers[0])  # reductions start before the last gradient is sent
        reduced = zip(ends, sending, least_reductions(setup, device.links), strict=False)
        return max(end - sent + seconds for end, sent, seconds in reduced) + OVERHEAD.value

    def least_time_of_pipelines(self, setup: Setup) -> float:
        """A time that no step of the run falls below in any pipeline with the parts of `setup`: if no GPU waits."""
        parts, layout = self._parts.of(self._device(setup, self._links)), setup.layout
        pattern = Counter(moe_layer_pattern(setup.model))
        # a pipeline decides how many layers are recomputed, unless all are
        is_all = setup.recomputes_layers and setup.training.recompute_method == "uniform"
        layers = {kind: layer.recomputed if is_all else layer.kept for kind, layer in parts.layers.items()}
        passes = [layers[kind].times(number) for kind, number in pattern.items()]
        total = added([*passes, parts.embedding, parts.mtp, parts.output])
        if parts.frozen_layers:
            numbers = range(setup.model.num_layers)
            saved = saved_time(setup, parts.layers, parts.frozen_layers, numbers)
            total += Passes(backward=saved.times(-1))
        samples = setup.training.global_batch_size / setup.training.micro_batch_size
        gpus = layout.world_size / layout.tensor_model_parallel_size / layout.context_parallel_size
        return samples * (total.forward.total + total.backward.total) / gpus

    def step(self, setup: Setup, links: Links, *, with_intervals: bool = False) -> _Step:
        """A step whose transfers take as long as over `links`."""
        device = self._device(setup, links)
        chunks, guesses = _chunks(setup, self._parts.of(device))
        forward, backward = _durations(chunks)
        transfers, number = _transfers(device), setup.layout.num_microbatches
        timeline = replay(forward, backward, number, transfers, with_intervals=with_intervals)
        exposed = data_parallel_time(setup, forward, backward, timeline, device.links)
        return _Step(device, chunks, guesses, timeline, exposed)

    def _device(self, setup: Setup, links: Links) -> Device:
        separates = self._documents and setup.separates_documents
        lengths = self._documents if separates else (setup.model.seq_length,)
        groups = Groups.of(setup.layout, self._machine.nvlink_devices)
        return Device(setup, kernels_of(self._machine), links, groups, lengths, self._imbalance)


def schedule(setup: Setup, machine: Machine) -> Schedule:
    """When the stages of a pipeline compute in a step of `setup`, which takes as long as in `estimate_step_time`."""
    step = Estimator(machine).step(setup, Links(machine), with_intervals=True)
    return Schedule(
        gather=step.data_parallel.gather,
        passes=step.timeline,
        reduction=step.data_parallel.reduction,
        optimizer=tuple(optimizer_time(step.device, stage) for stage in range(len(step.chunks))),
    )


def transfers(setup: Setup, machine: Machine) -> list[Transfer]:
    """The data that ranks exchange in a step of `setup`, by parallel axis, without axes that send nothing."""
    sent = _sent(Estimator(machine).step(setup, SentBytes(machine)))
    in_network = _sent(Estimator(machine).step(setup, NetworkBytes(machine)))
    groups = vars(Groups.of(setup.layout, machine.nvlink_devices))
    return [Transfer(axis, groups[axis], size, in_network[axis]) for axis, size in sent.items() if size]


def workload(setup: Setup, machine: Machine) -> tuple[Kernels, set[tuple[Collective, Group]]]:
    """The kernels of a machine after they were asked for a step of `setup`, and the kinds of its transfers."""
    links = NotedLinks(machine, set())
    optimizer_time(Estimator(machine).step(setup, links).device, 0)
    return kernels_of(machine), links.noted


def _sent(step: _Step) -> dict[str, float]:
    """Bytes that a rank of the busiest stage sends, by its group. Links of `step` take one second per byte."""
    setup, links = step.device.setup, step.device.links
    stages = [added(stage) for stage in step.chunks]
    passes = [(stage.forward + stage.backward).times(setup.layout.num_microbatches) for stage in stages]
    weights = [weight_transfers(setup, links, stage) for stage in range(len(stages))]
    of_experts = max(each.expert_parallel for each in passes)
    has_ep = setup.layout.expert_model_parallel_size > 1
    return {
        "tensor": max(each.tensor_parallel for each in passes),
        "context": max(each.context_parallel for each in passes),
        "expert" if has_ep else "expert_tensor": of_experts,
        "pipeline": max(
            hidden + each.tied_embedding
            for hidden, each in zip(step.timeline.transferring, weights, strict=True)
        ),
        "data": max(each.dense for each in weights),
        "expert_data": max(each.experts for each in weights),
    }


@record
class _Step:
    """A step before its parts are added up."""

    device: Device
    chunks: list[list[Passes]]
    """The time of each model chunk by stage."""
    guesses: list[Constant]
    """Times of the host that the chunks use."""
    timeline: Timeline
    data_parallel: DataParallel


def _chunks(setup: Setup, parts: Parts) -> tuple[list[list[Passes]], list[Constant]]:
    """The time of each model chunk by stage, and the times of the host that it uses."""
    kinds, guesses = layer_kinds(setup), [*parts.guesses]
    waits = Passes()
    if len(kinds) > 1 == len(kinds[0]) and setup.training.cuda_graph_impl == "none":
        waits = Passes(Seconds(host=AFTER_TRANSFERS.value), Seconds(host=AFTER_TRANSFERS.value))
        guesses.append(AFTER_TRANSFERS)

    @functools.cache  # most chunks are equal
    def chunk_of(layers: Sequence[bool]) -> Passes:
        return chunk_time(setup, parts.layers, layers) + waits

    chunks = [[chunk_of(layers) for layers in stage] for stage in kinds]
    if parts.frozen_layers:
        first = 0
        for chunk, number in enumerate(setup.layout.chunk_layers):
            saved = saved_time(setup, parts.layers, parts.frozen_layers, range(first, first + number))
            chunks[chunk % len(kinds)][chunk // len(kinds)] += Passes(backward=saved.times(-1))
            first += number
    chunks[0][0] += parts.embedding
    if setup.model.mtp_num_layers is not None:
        chunks[mtp_stage(setup.parallelism)][-1] += parts.mtp
    chunks[-1][-1] += parts.output
    return chunks, guesses


def _durations(chunks: list[list[Passes]]) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of the forward and of the backward passes."""
    forward = [[chunk.forward.total for chunk in stage] for stage in chunks]
    backward = [[chunk.backward.total for chunk in stage] for stage in chunks]
    return forward, backward


def _transfers(device: Device) -> list[float]:
    """Seconds to send a hidden state from each stage to the next one.

    If the loss is on the stage after the MTP layers, it receives the outputs of all of them.
    """
    setup = device.setup
    size = setup.tokens * setup.sharded_hidden_bytes
    sizes = [size] * setup.layout.pipeline_model_parallel_size
    if setup.model.mtp_num_layers is not None and mtp_chunk(setup.parallelism) != -1:
        sizes[mtp_stage(setup.parallelism)] *= 1 + setup.model.mtp_num_layers
    send = functools.cache(device.links.send)
    return [send(each, device.groups.pipeline) for each in sizes]


def _guesses(device: Device) -> list[Constant]:
    """The constants of kernels and links, and assumptions about what a run file does not contain."""
    setup = device.setup
    precisions = dict.fromkeys((device.precision, device.precision_outside_layers))
    constants = [*device.kernels.guesses(precisions), *device.links.guesses(device.groups), OVERHEAD]
    if setup.model.num_moe_experts is not None:
        meaning = f"the busiest device's experts receive {device.imbalance:g} times the mean number of tokens"
        constants += [Constant(device.imbalance, meaning, "assumed; it depends on the router"), AFTER_ROUTING]
    return [*constants, *(Constant(1.0, meaning, source) for meaning, source in _assumptions(device))]


def _assumptions(device: Device) -> Iterator[tuple[str, str]]:
    """Assumptions of the estimate for settings whose effect was not measured, with the reasons."""
    setup, training = device.setup, device.setup.training
    if setup.parallelism.tp_comm_overlap:
        source = "guessed: Hopper machines were seen to hide between nothing and all"
        yield "tp_comm_overlap hides a transfer behind its product, except for one piece", source
    if setup.layout.virtual_pipeline_model_parallel_size > 1:
        source = (
            "guessed: VPP 4 to 12 of two stages on H100s fits it, and so does a gap of 0.1 ms after each pass"
        )
        yield "a stage computes nothing while it sends, also in the interleaved schedule", source
    if setup.parallelism.use_sharp:
        source = "assumed: each NIC carries as many bytes as in a ring"
        yield "use_sharp does not change the time to reduce-scatter gradients", source
    if setup.separates_documents and tuple(device.documents) == (setup.model.seq_length,):
        yield "one document per sample", "assumed; shorter documents take less time"
    equally_fast = {
        "torch's kernels": not setup.uses_engine,
        "deterministic kernels": training.deterministic_mode,
        "attention with dropout": setup.model.attention_dropout > 0,
    }
    for what, is_used in equally_fast.items():
        if is_used:
            yield f"{what} as fast as Transformer Engine's default", "assumed; slower in fact"
