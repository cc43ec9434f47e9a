"""Compares memory estimates with the nodes, for the configuration and for other stages and offloads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpcgen.config.node_type import NodeType
from hpcgen.config.program import DeepSpeedConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.deepspeed.facts import Device, Facts, problem
from hpcgen.planning.deepspeed.memory import Estimate, ModelSize, estimate, setup_of
from hpcgen.planning.deepspeed.model import model_size
from hpcgen.planning.memory import GIB

MIB = 1024**2
CHOICES: tuple[tuple[int, Device, Device], ...] = (
    (0, "none", "none"),
    (1, "none", "none"),
    (1, "cpu", "none"),
    (2, "none", "none"),
    (2, "cpu", "none"),
    (3, "none", "none"),
    (3, "cpu", "none"),
    (3, "cpu", "cpu"),
    (3, "nvme", "cpu"),
    (3, "nvme", "nvme"),
)
"""Stage, device of the optimizer state, and device of the parameters."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The estimate of one setup, and the memory of the nodes."""

    stage: int
    offload_optimizer: Device
    offload_param: Device
    estimate: Estimate
    gpu_bytes: float | None
    """Memory of a GPU; None if unknown."""
    host_bytes: float | None
    """Memory of a node; None if unknown."""

    @property
    def fits(self) -> bool | None:
        """False if the setup needs more than a GPU or a node has; None if neither is known."""
        pairs = ((self.estimate.gpu, self.gpu_bytes), (self.estimate.host, self.host_bytes))
        known = [needed <= available for needed, available in pairs if available is not None]
        return all(known) if known else None


def configured_fit(section: DeepSpeedConfig, allocation: Allocation, node_type: NodeType) -> Fit | None:
    """The estimate for the configuration; None if the size of the model is unknown.

    Raises:
        HpcgenError: the model's config.json cannot be read.
    """
    size = model_size(section)
    return None if size is None else _fit(size, _facts(section, section.config, allocation), node_type)


def all_fits(section: DeepSpeedConfig, allocation: Allocation, node_type: NodeType) -> Iterator[Fit]:
    """Yields an estimate for each of CHOICES. Other values come from the configuration.

    Raises:
        HpcgenError: the model's config.json cannot be read.
    """
    size = model_size(section)
    for stage, optimizer, param in CHOICES if size is not None else ():
        zero = dict(section.config.get("zero_optimization", {}))
        zero["stage"] = stage
        zero["offload_optimizer"] = {**(zero.get("offload_optimizer") or {}), "device": optimizer}
        zero["offload_param"] = {**(zero.get("offload_param") or {}), "device": param}
        config = {**section.config, "zero_optimization": zero}
        assert size is not None
        yield _fit(size, _facts(section, config, allocation), node_type)


def _facts(section: DeepSpeedConfig, config: Mapping[str, Any], allocation: Allocation) -> Facts:
    ranks_per_node = allocation.ranks_per_node
    return Facts(
        config=config,
        ranks=allocation.nodes * ranks_per_node,
        ranks_per_node=ranks_per_node,
        model_parallel_size=section.model_parallel_size,
    )


def _fit(size: ModelSize, facts: Facts, node_type: NodeType) -> Fit:
    gpu_gib, health = node_type.gpu_memory_gib, node_type.health
    memory_mb = health.memory_mb if health else None
    return Fit(
        stage=facts.stage,
        offload_optimizer=facts.offload("optimizer"),
        offload_param=facts.offload("param"),
        estimate=estimate(size, setup_of(facts)),
        gpu_bytes=gpu_gib * GIB if gpu_gib else None,
        host_bytes=memory_mb * MIB if memory_mb else None,
    )


def fit_problems(section: DeepSpeedConfig, fit: Fit) -> Iterator[Problem]:
    """Yields a problem if the GPUs have too little memory, and one for the hosts. Both point to the ZeRO stage."""
    found, hint = fit.estimate, "compare the stages and offloads with hpcgen memory"
    has_stage = "stage" in section.config.get("zero_optimization", {})
    path = "zero_optimization.stage" if has_stage else ""
    if fit.gpu_bytes is not None and found.gpu > fit.gpu_bytes:
        reason = (
            f"results in about {found.gpu / GIB:.1f} GiB on a GPU with {fit.gpu_bytes / GIB:g} GiB, even without "
            f"activations: {found.gpu_states / GIB:.1f} GiB of weights, gradients and optimizer state, and "
            f"{found.gpu_buffers / GIB:.1f} GiB of DeepSpeed's buffers"
        )
        yield problem(path, reason, hint)
    if fit.host_bytes is not None and found.host > fit.host_bytes:
        reason = f"results in about {found.host / GIB:.0f} GiB on a node with {fit.host_bytes / GIB:.0f} GiB of memory"
        yield problem(path, reason, hint)
