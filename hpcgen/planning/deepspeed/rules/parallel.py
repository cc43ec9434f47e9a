"""Rules for tensor, sequence, pipeline and expert parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import ZERO, Facts, problem

EXPERT = "expert_parallel"


def sequence_parallel_divides_ranks(facts: Facts) -> Iterator[Problem]:
    """The ranks form a mesh of data_parallel_size x sequence_parallel_size (deepspeed/__init__.py, initialize).
    data_parallel_size alone has no effect."""
    copies = facts.ranks // facts.model_parallel_size
    size, data = facts.get("sequence_parallel_size", 1), facts.get("data_parallel_size")
    if copies % size:
        yield problem("sequence_parallel_size", f"does not divide the {copies} ranks", "use a divisor")
    elif data is not None and not facts.has("sequence_parallel_size"):
        reason = "has no effect without sequence_parallel_size"
        yield problem("data_parallel_size", reason, "remove it; DeepSpeed computes it")
    elif data is not None and data * size != copies:
        reason = f"times sequence_parallel_size = {size} is {data * size}, but there are {copies} ranks"
        yield problem("data_parallel_size", reason, f"use {copies // size}")


def tensor_parallel_divides_ranks(facts: Facts) -> Iterator[Problem]:
    """autotp_size divides the ranks (utils/groups.py, _init_tp_mesh_device), and tp_size repeats it
    (runtime/engine.py, _apply_autotp_partitioning)."""
    size = facts.get("tensor_parallel.autotp_size", 0)
    if size > 1 and facts.ranks % size:
        yield problem(
            "tensor_parallel.autotp_size", f"does not divide the {facts.ranks} ranks", "use a divisor"
        )
    for alias in ("tp", "tensor_parallel"):
        inner = facts.get(f"tensor_parallel.{alias}.tp_size", 1)
        if size and inner not in (1, size):
            reason = f"differs from tensor_parallel.autotp_size = {size}"
            yield problem(f"tensor_parallel.{alias}.tp_size", reason, "remove it")


def one_spelling_of_each_key(facts: Facts) -> Iterator[Problem]:
    """A key and its alias are the same field, which pydantic accepts once (runtime/tensor_parallel/config.py)."""
    for name, alias in (("tensor_parallel", "tp"), ("replace_with_kernel_inject", "kernel_inject")):
        if facts.has(f"tensor_parallel.{name}") and facts.has(f"tensor_parallel.{alias}"):
            yield problem(f"tensor_parallel.{name}", f"is the same key as {alias}", "remove one of them")


def pipeline_needs_stage_1(facts: Facts) -> Iterator[Problem]:
    """Pipelines support ZeRO up to stage 1 (runtime/pipe/engine.py, PipelineEngine.__init__)."""
    stages = facts.get("pipeline.stages", 1)
    if facts.stage >= 2 and stages > 1:
        yield problem(
            "pipeline.stages", f"is not supported by ZeRO stage {facts.stage}", f"set {ZERO}.stage to 1"
        )


def experts_divide_ranks(facts: Facts) -> Iterator[Problem]:
    """The experts' ranks divide the ranks of a stage, and each expert is on one rank
    (module_inject/auto_ep_folding.py, build_folding_spec and validate_folding_global)."""
    if not facts.get(f"{EXPERT}.enabled", False):
        return
    size = facts.get(f"{EXPERT}.autoep_size", 1)
    if facts.ranks % size:
        yield problem(f"{EXPERT}.autoep_size", f"does not divide the {facts.ranks} ranks", "use a divisor")
    if facts.get(f"{EXPERT}.expert_tensor_parallel_size", 1) != 1:
        yield problem(f"{EXPERT}.expert_tensor_parallel_size", "is not supported yet", "use 1")
    if facts.get("tensor_parallel.autotp_size", 0) > 1 and size == 1:
        yield problem(
            f"{EXPERT}.autoep_size", "is 1 together with AutoTP", "use more than 1, or disable AutoTP"
        )


def expert_kernels(facts: Facts) -> Iterator[Problem]:
    """Fused paths need their backends (module_inject/auto_ep_config.py, validate_autoep_config)."""
    if not facts.get(f"{EXPERT}.enabled", False):
        return
    backend = facts.get(f"{EXPERT}.comm_backend", "comm")
    if facts.get(f"{EXPERT}.gate_up_impl") == "fused" and not facts.get(f"{EXPERT}.use_grouped_mm", True):
        yield problem(f"{EXPERT}.gate_up_impl", "needs use_grouped_mm", "set use_grouped_mm to true")
    if facts.get(f"{EXPERT}.row_weighting_impl") == "fused" and backend != "deepep":
        yield problem(f"{EXPERT}.row_weighting_impl", "needs comm_backend = deepep", "use auto")
    if backend == "deepep" and not facts.get(f"{EXPERT}.comm_max_tokens_per_rank", 0):
        hint = "set it to the micro-batch size times the maximum sequence length"
        yield problem(f"{EXPERT}.comm_backend", "needs comm_max_tokens_per_rank", hint)


RULES = (
    sequence_parallel_divides_ranks,
    tensor_parallel_divides_ranks,
    one_spelling_of_each_key,
    pipeline_needs_stage_1,
    experts_divide_ranks,
    expert_kernels,
)
