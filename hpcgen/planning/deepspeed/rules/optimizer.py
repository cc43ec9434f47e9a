"""Rules for the optimizer and the learning-rate scheduler."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import ZERO, Facts, problem
from hpcgen.planning.deepspeed.keys import parameters
from hpcgen.planning.deepspeed.types import Key
from hpcgen.text import did_you_mean, one_of

DEEPSPEED_OPTIMIZERS = (*parameters("optimizer"), "muadam", "muadamw", "musgd")
"""Types that DeepSpeed recognizes in upper or lower case (runtime/config.py, DEEPSPEED_OPTIMIZERS). The last three are
from the package mup."""
TORCH_OPTIMIZERS = (
    *("ASGD", "Adadelta", "Adafactor", "Adamax", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop", "Rprop"),
    *("SGD", "SparseAdam"),
)
"""Classes of torch.optim for which DeepSpeed has no optimizer of its own. Their names are case-sensitive."""
REMOVED_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")
"""Optimizers of earlier versions (runtime/config.py of 0.17)."""
SCHEDULERS = parameters("scheduler")
"""Type of the scheduler -> its parameters."""
TORCH_SCHEDULERS = (
    *("ConstantLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts", "CyclicLR", "ExponentialLR"),
    *("LambdaLR", "LinearLR", "MultiStepLR", "MultiplicativeLR", "OneCycleLR", "PolynomialLR", "StepLR"),
)
"""Classes of torch.optim.lr_scheduler that a configuration can describe (runtime/engine.py, _scheduler_from_config)."""
TESTED_WITH_ZERO = ("adam", "adamw", "adagrad", "lion", "muon")
"""Types whose classes are in ZERO_SUPPORTED_OPTIMIZERS (runtime/zero/utils.py)."""


def optimizer_exists(facts: Facts) -> Iterator[Problem]:
    """The type is one of DeepSpeed's, or a class of torch.optim (runtime/engine.py, _is_supported_optimizer)."""
    given, kind = facts.get("optimizer.type"), facts.optimizer_type
    if kind is None:
        if facts.has("optimizer"):
            yield problem("optimizer", "has no type, so DeepSpeed ignores the section", "set type: AdamW")
    elif kind in REMOVED_OPTIMIZERS:
        yield problem("optimizer.type", "was removed from DeepSpeed", "use AdamW")
    elif kind not in DEEPSPEED_OPTIMIZERS and given not in TORCH_OPTIMIZERS:
        known = ("AdamW", "Adam", "Adagrad", "Lamb", "Lion", "Muon", *TORCH_OPTIMIZERS)
        hint = did_you_mean(given, known) or f"use {one_of(known)}"
        yield problem(
            "optimizer.type", "is neither an optimizer of DeepSpeed nor a class of torch.optim", hint
        )


def zero_knows_the_optimizer(facts: Facts) -> Iterator[Problem]:
    """With ZeRO, other optimizers must be allowed explicitly (runtime/engine.py, _do_optimizer_sanity_check)."""
    kind = facts.optimizer_type
    exists = kind in DEEPSPEED_OPTIMIZERS or facts.get("optimizer.type") in TORCH_OPTIMIZERS
    if (
        facts.stage
        and exists
        and kind not in TESTED_WITH_ZERO
        and not facts.get("zero_allow_untested_optimizer", False)
    ):
        hint = "set zero_allow_untested_optimizer to true, or use AdamW"
        yield problem("optimizer.type", "has not been tested with ZeRO, so DeepSpeed refuses it", hint)


def optimizer_runs_on_its_device(facts: Facts) -> Iterator[Problem]:
    """LAMB has only a CUDA kernel (ops/lamb/fused_lamb.py) and needs the dynamic loss scale of fp16
    (runtime/engine.py, _do_sanity_check). Muon with stage 3 needs all-reduce (runtime/zero/stage3.py, __init__)."""
    if facts.optimizer_type == "lamb":
        if facts.offload("optimizer") != "none":
            yield problem(
                "optimizer.type",
                "has no kernel for the CPU, to which the optimizer is offloaded",
                "use AdamW",
            )
        if facts.get("fp16.loss_scale", 0) != 0:
            yield problem("fp16.loss_scale", "is static, but LAMB needs a dynamic loss scale", "use 0")
    if facts.optimizer_type == "muon" and facts.stage == 3 and facts.zero("reduce_scatter", True):
        reason = "is not supported by stage 3 with reduce_scatter"
        yield problem("optimizer.type", reason, f"set {ZERO}.reduce_scatter to false")


def amsgrad_is_torchs(facts: Facts) -> Iterator[Problem]:
    """The fused optimizers refuse amsgrad (ops/adam/fused_adam.py; ops/lamb/fused_lamb.py)."""
    is_fused = facts.optimizer_type == "lamb" or (
        facts.optimizer_type in ("adam", "adamw")
        and facts.offload("optimizer") == "none"
        and not facts.get("optimizer.params.torch_adam", False)
    )
    if is_fused and facts.get("optimizer.params.amsgrad", False):
        reason = "is not supported by DeepSpeed's fused optimizers"
        yield problem("optimizer.params.amsgrad", reason, "set torch_adam to true, or remove it")


def scheduler_exists(facts: Facts) -> Iterator[Problem]:
    """The type is one of DeepSpeed's or a class of torch.optim.lr_scheduler, and params a mapping (runtime/engine.py,
    _scheduler_from_config)."""
    if not facts.has("scheduler"):
        return
    kind, params = facts.get("scheduler.type"), facts.get("scheduler.params")
    if kind is None:
        yield problem("scheduler", "has no type, so DeepSpeed ignores the section", "set type: WarmupDecayLR")
        return
    if kind not in SCHEDULERS and kind not in TORCH_SCHEDULERS:
        hint = did_you_mean(kind, (*SCHEDULERS, *TORCH_SCHEDULERS)) or f"use {one_of(tuple(SCHEDULERS))}"
        reason = "is neither a scheduler of DeepSpeed nor a class of torch.optim.lr_scheduler"
        yield problem("scheduler.type", reason, hint)
    elif params is None:
        yield problem("scheduler", "has no params", "add params, even if it is empty: {}")
    else:
        keys = SCHEDULERS[kind].keys if kind in SCHEDULERS else {}
        for name, key in keys.items():
            if isinstance(key, Key) and key.required and name not in params:
                yield problem("scheduler.params", f"has no {name}, which {kind} needs", "set it")


RULES = (
    optimizer_exists,
    zero_knows_the_optimizer,
    optimizer_runs_on_its_device,
    amsgrad_is_torchs,
    scheduler_exists,
)
