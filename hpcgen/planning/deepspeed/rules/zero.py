"""Rules for ZeRO: stages, communication and gradient norms."""

from __future__ import annotations

import math
from collections.abc import Iterator

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import ZERO, Facts, problem
from hpcgen.planning.deepspeed.keys import STAGE3_KEYS

HPZ = f"{ZERO}.zero_hpz_partition_size"
STAGE_3_ONLY = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def stage_exists(facts: Facts) -> Iterator[Problem]:
    """Stages are 0 to 3 (runtime/zero/config.py, ZeroStageEnum)."""
    if facts.stage > 3:
        yield problem(f"{ZERO}.stage", "is not a stage of ZeRO", "use 0, 1, 2 or 3")


def one_spelling_of_each_key(facts: Facts) -> Iterator[Problem]:
    """A key and its alias are the same field, which pydantic accepts once (runtime/config_utils.py, model_config)."""
    for name in STAGE3_KEYS:
        if facts.has(f"{ZERO}.{name}") and facts.has(f"{ZERO}.stage3_{name}"):
            yield problem(f"{ZERO}.{name}", f"is the same key as stage3_{name}", "remove one of them")


def quantized_communication_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """ZeRO++ is part of stage 3. Other stages ignore its keys (runtime/engine.py, _configure_zero_optimizer)."""
    keys = [name for name in STAGE_3_ONLY if facts.zero(name, False)]
    keys += ["zero_hpz_partition_size"] if facts.zero("zero_hpz_partition_size", 1) > 1 else []
    for name in keys if facts.stage != 3 else ():
        yield problem(
            f"{ZERO}.{name}", f"has no effect with stage {facts.stage}", "use stage 3, or remove it"
        )


def hpz_partition_fits_nvlink(facts: Facts) -> Iterator[Problem]:
    """The secondary partition divides the ranks (utils/groups.py, _create_zero_param_parallel_group) that NVLink
    connects (hpcgen's rule: its purpose is to gather parameters over NVLink, arXiv 2306.10209, section 3.2)."""
    size, connected = facts.zero("zero_hpz_partition_size", 1), facts.ranks_per_node * facts.nvlink_nodes
    most = math.gcd(facts.ranks, connected)
    if facts.stage == 3 and size > 1 and most % size:
        where = (
            "a node" if facts.nvlink_nodes == 1 else f"the {facts.nvlink_nodes} nodes that NVLink connects"
        )
        yield problem(HPZ, f"does not divide the {connected} ranks of {where}", f"use {most}")


def allgather_bucket_is_even(facts: Facts) -> Iterator[Problem]:
    """Buckets are aligned to two elements (runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__)."""
    size = facts.zero("allgather_bucket_size", 0)
    if facts.stage in (1, 2) and size % 2:
        yield problem(f"{ZERO}.allgather_bucket_size", "is an odd number", f"use {int(size) + 1}")


def scaled_gradients_need_all_reduce(facts: Facts) -> Iterator[Problem]:
    """Reduce-scatter does not scale gradients before it adds them (runtime/zero/stage_1_and_2.py and stage3.py,
    __init__)."""
    if facts.stage < 2 or not facts.zero("reduce_scatter", True):
        return
    if facts.stage == 2 and facts.get("gradient_allreduce_op", "mean").lower() == "sum":
        return
    hint = f"remove it, or set {ZERO}.reduce_scatter to false"
    if facts.get("prescale_gradients", False):
        yield problem(
            "prescale_gradients", f"is not supported by stage {facts.stage} with reduce_scatter", hint
        )
    if facts.get("gradient_predivide_factor", 1.0) != 1.0:
        reason = f"is not supported by stage {facts.stage} with reduce_scatter"
        yield problem("gradient_predivide_factor", reason, hint)


def summed_gradients(facts: Facts) -> Iterator[Problem]:
    """Stage 3, ZenFlow and DeepCompile only average gradients (runtime/config.py, _do_error_check)."""
    if facts.get("gradient_allreduce_op", "mean").lower() != "sum":
        return
    features = (
        ("ZeRO stage 3", facts.stage == 3),
        ("ZenFlow", facts.zero("zenflow") is not None),
        ("DeepCompile", facts.get("compile.deepcompile", False)),
    )
    for name, is_used in features:
        if is_used:
            yield problem("gradient_allreduce_op", f"is not supported with {name}", "use mean")


def gradient_norm_can_be_skipped(facts: Facts) -> Iterator[Problem]:
    """compute_grad_norm: false needs stage 1 or 2, no clipping, no offload and no ZenFlow (runtime/zero/config.py,
    compute_grad_norm_valid; runtime/zero/stage_1_and_2.py, __init__; runtime/engine.py, _do_optimizer_sanity_check)."""
    if facts.zero("compute_grad_norm", True):
        return
    path = f"{ZERO}.compute_grad_norm"
    if facts.stage not in (1, 2):
        yield problem(path, f"is supported by stages 1 and 2, not {facts.stage}", "remove it")
    elif facts.get("gradient_clipping", 1.0) > 0:
        reason = "needs gradient clipping to be off, but DeepSpeed clips at 1.0 by default"
        yield problem(path, reason, "set gradient_clipping to 0")
    elif facts.zero("zenflow") is not None or facts.offload("optimizer") != "none":
        yield problem(path, "is not supported with ZenFlow or an offloaded optimizer", "remove it")
    elif facts.stage == 1 and facts.precision == "bf16" and facts.grad_accum_dtype == "fp32":
        reason = "is not supported by stage 1 in bf16 with gradients that accumulate in fp32"
        yield problem(path, reason, "remove it, or use stage 2")


def old_stage_1(facts: Facts) -> Iterator[Problem]:
    """The old implementation of stage 1 does not exist any more (runtime/engine.py, _configure_zero_optimizer)."""
    if facts.zero("legacy_stage1", False) and facts.stage:
        yield problem(f"{ZERO}.legacy_stage1", "is not supported since DeepSpeed 0.5.9", "remove it")


def unmanaged_accumulation(facts: Facts) -> Iterator[Problem]:
    """managed_gradient_accumulation: false needs stage 2 or 3 for overlap_comm, and excludes DeepCompile
    (runtime/engine.py, _do_sanity_check)."""
    if facts.get("managed_gradient_accumulation", True):
        return
    if facts.stage < 2 and facts.zero("overlap_comm", False):
        reason = f"is not supported by stage {facts.stage} with managed_gradient_accumulation = false"
        yield problem(f"{ZERO}.overlap_comm", reason, "set it to false")
    if facts.get("compile.deepcompile", False):
        yield problem("managed_gradient_accumulation", "is not supported with DeepCompile", "remove it")


RULES = (
    stage_exists,
    one_spelling_of_each_key,
    quantized_communication_needs_stage_3,
    hpz_partition_fits_nvlink,
    allgather_bucket_is_even,
    scaled_gradients_need_all_reduce,
    summed_gradients,
    gradient_norm_can_be_skipped,
    old_stage_1,
    unmanaged_accumulation,
)
