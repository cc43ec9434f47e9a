"""Rules for the offload of parameters and optimizer state to host memory and NVMe."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import ZERO, Facts, problem

OPTIMIZER = f"{ZERO}.offload_optimizer"
PARAM = f"{ZERO}.offload_param"


def offload_needs_its_stage(facts: Facts) -> Iterator[Problem]:
    """Parameters are offloaded by stage 3, optimizer state by stages 1 to 3 (runtime/zero/offload_config.py).

    Only stage 3 swaps optimizer state to NVMe. Stages 1 and 2 treat every device as host memory
    (runtime/zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__).
    """
    if facts.offload("param") != "none" and facts.stage != 3:
        yield problem(f"{PARAM}.device", f"has no effect with stage {facts.stage}", "use stage 3, or none")
    device = facts.offload("optimizer")
    if device != "none" and facts.stage == 0:
        yield problem(f"{OPTIMIZER}.device", "needs ZeRO", "use stage 1, 2 or 3, or none")
    elif device == "nvme" and facts.stage != 3:
        reason = f"is ignored by stage {facts.stage}, which keeps the state in host memory"
        yield problem(f"{OPTIMIZER}.device", reason, "use stage 3, or cpu")


def nvme_needs_a_path(facts: Facts) -> Iterator[Problem]:
    """The swap files are below nvme_path (runtime/zero/stage3.py, _configure_tensor_swapping;
    runtime/swap_tensor/partitioned_param_swapper.py, _configure_aio)."""
    for path, device in ((OPTIMIZER, facts.offload("optimizer")), (PARAM, facts.offload("param"))):
        given = facts.get(f"{path}.nvme_path")
        if device == "nvme" and facts.stage == 3:
            if given is None:
                hint = 'set it to the directory of a local disk, such as "{SCRATCH}"'
                yield problem(path, "has device: nvme without nvme_path", hint)
            elif not given.startswith(("/", "{")):
                hint = 'use an absolute path, such as "{SCRATCH}"'
                yield problem(f"{path}.nvme_path", "is a relative path", hint)


def partial_offload_needs_stage_3(facts: Facts) -> Iterator[Problem]:
    """ratio < 1 needs stage 3 and CPU Adam (runtime/zero/config.py, offload_ratio_check; runtime/zero/stage3.py,
    DeepSpeedZeroOptimizer_Stage3.__init__). super_offload needs stage 3 (runtime/zero/offload_config.py)."""
    if facts.zero("offload_optimizer.ratio", 1.0) < 1:
        if facts.stage != 3:
            yield problem(
                f"{OPTIMIZER}.ratio", f"is not supported by stage {facts.stage}", "use stage 3, or 1.0"
            )
        elif facts.offload("optimizer") != "none" and not facts.uses_cpu_adam:
            yield problem(
                f"{OPTIMIZER}.ratio", "needs DeepSpeed's CPU Adam", "use optimizer type AdamW, or 1.0"
            )
    if facts.zero("offload_optimizer.super_offload", False) and (
        facts.stage != 3 or facts.offload("optimizer") != "cpu"
    ):
        yield problem(
            f"{OPTIMIZER}.super_offload", "needs stage 3 with device: cpu", "change these, or remove it"
        )


def zenflow_needs_cpu_offload(facts: Facts) -> Iterator[Problem]:
    """ZenFlow updates some parameters on the GPU and leaves the rest to the CPU
    (runtime/zenflow/zenflow_stage_1_and_2.py, __init__ and _configure_zenflow; runtime/zenflow/engine.py,
    configure_zenflow)."""
    if facts.zero("zenflow") is None:
        return
    path = f"{ZERO}.zenflow"
    if facts.offload("optimizer") == "none" or facts.stage == 0:
        yield problem(
            path, "needs an optimizer that is offloaded to the CPU", f"set {OPTIMIZER}.device to cpu"
        )
    strategy, interval = (
        facts.zero("zenflow.select_strategy", "auto"),
        facts.zero("zenflow.select_interval", "auto"),
    )
    if strategy == "auto" and interval != "auto":
        yield problem(f"{path}.select_interval", "is a number, but select_strategy is auto", "use auto")
    if strategy != "auto" and interval == "auto":
        yield problem(path, f"has select_strategy = {strategy} without select_interval", "set a number")
    if facts.zero("zenflow.offload", False) and not facts.zero("overlap_comm", facts.stage == 3):
        yield problem(f"{path}.offload", "needs overlap_comm", f"set {ZERO}.overlap_comm to true")
    if facts.zero("zenflow.steps_per_epoch") is not None:
        yield problem(f"{path}.steps_per_epoch", "is set by DeepSpeed itself", "remove it")


RULES = (offload_needs_its_stage, nvme_needs_a_path, partial_offload_needs_stage_3, zenflow_needs_cpu_offload)
