"""Time of the parts of a model for one microbatch. It does not depend on how the pipeline divides the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar, cast

from hpcgen.planning.frozen import frozen_shares
from hpcgen.planning.step_time.adapters import adapter_parts
from hpcgen.planning.step_time.attention import attention_parts
from hpcgen.planning.step_time.host import host_time, outside_time, with_waits
from hpcgen.planning.step_time.layer import Layer
from hpcgen.planning.step_time.machine import Constant, Machine
from hpcgen.planning.step_time.mlp import expert_parts, mlp_parts
from hpcgen.planning.step_time.output import embedding_time, mtp_time, output_time
from hpcgen.planning.step_time.work import Device, Part, Passes
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.model_size import last_layer_has_experts
from trainer.contract.record import record

T = TypeVar("T")


@record
class Parts:
    """The parts of a model on a device."""

    layers: Mapping[bool, Layer]
    """A layer with experts (True) and a dense one (False), if the model has them."""
    frozen_layers: Mapping[bool, Layer]
    """These layers if none of their weights is trained. Empty without training.freeze."""
    embedding: Passes
    mtp: Passes
    output: Passes
    guesses: tuple[Constant, ...]
    """Times of the host that the layers use."""


class KnownParts:
    """The parts of one model on devices of one machine, each computed once.

    The runs of the devices may differ in TP, CP, EP, ETP and in how these exchange data, in the micro-batch size and in
    recomputation. Their other keys are the same, except for those of the pipeline and the number of ranks.
    """

    def __init__(self, machine: Machine, host: float) -> None:
        self._machine = machine
        self._host = host
        self._known: dict[Hashable, Any] = {}

    def of(self, device: Device) -> Parts:
        """The parts on a device."""
        training = device.setup.training
        recomputed = training.recompute_granularity, training.recompute_modules, training.recompute_method
        key = "parts", _tokens_key(device), _experts_key(device), recomputed
        return self._once(key, lambda: self._parts(device))

    def _parts(self, device: Device) -> Parts:
        tokens, setup = _tokens_key(device), device.setup
        frozen, kept = dataclasses.replace(device, is_frozen=True), frozen_shares(setup)
        launches = {has_experts: self._launches(device, has_experts) for has_experts in _kinds(device)}
        layers, frozen_layers = (
            {
                has_experts: Layer.of(setup, self._layer_parts(each, has_experts), self._host * launch.value)
                for has_experts, launch in (launches.items() if each is device or kept.layers else ())
            }
            for each in (device, frozen)
        )
        of_embedding, of_output = (frozen if is_kept else device for is_kept in (kept.embedding, kept.output))
        embedding = self._once(("embedding", tokens), lambda: embedding_time(of_embedding))
        output = self._once(("output", tokens), lambda: self._output(of_output))
        mtp = Passes()
        if setup.model.mtp_num_layers is not None:
            mtp = mtp_time(device, layers[last_layer_has_experts(setup.model)], embedding)
        return Parts(layers, frozen_layers, embedding, mtp, output, tuple(launches.values()))

    def _layer_parts(self, device: Device, has_experts: bool) -> list[Part]:
        tokens = _tokens_key(device), device.is_frozen
        attention = self._once(("attention", tokens), lambda: attention_parts(device))
        key = "adapters", has_experts, tokens, _experts_key(device)
        adapters = self._once(key, lambda: adapter_parts(device, has_experts=has_experts))
        if has_experts:
            key = "experts", has_experts, tokens, _experts_key(device)
            return attention + self._once(key, lambda: expert_parts(device)) + adapters
        return attention + self._once(("mlp", tokens), lambda: mlp_parts(device)) + adapters

    def _output(self, device: Device) -> Passes:
        """The output, and the waits for the host outside the layers, which launches most of it there."""
        host = self._host * outside_time(device.setup, self._machine)
        return with_waits(output_time(device), host)

    def _launches(self, device: Device, has_experts: bool) -> Constant:
        has_tensor_ranks = device.setup.layout.tensor_model_parallel_size > 1
        key = "host", has_experts, has_tensor_ranks, _experts_key(device)
        return self._once(key, lambda: host_time(device.setup, self._machine, has_experts=has_experts))

    def _once(self, key: Hashable, compute: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = compute()
        return cast(T, self._known[key])


def _kinds(device: Device) -> list[bool]:
    return sorted(set(moe_layer_pattern(device.setup.model)))


def _tokens_key(device: Device) -> Hashable:
    """Values that differ between the runs and on which the parts outside experts depend."""
    layout, axes = device.setup.layout, device.setup.parallelism
    return (
        type(device.links),
        layout.tensor_model_parallel_size,
        layout.context_parallel_size,
        axes.sequence_parallel,
        axes.tp_comm_overlap,
        axes.cp_comm_type,
        axes.hierarchical_context_parallel_sizes,
        device.setup.training.micro_batch_size,
    )


def _experts_key(device: Device) -> Hashable:
    """Further such values, for experts."""
    layout = device.setup.layout
    return layout.expert_model_parallel_size, layout.expert_tensor_parallel_size
