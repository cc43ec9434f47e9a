"""Rules for fp16, bf16, loss scales and the data types of gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.facts import Facts, problem


def one_precision(facts: Facts) -> Iterator[Problem]:
    """fp16 and bf16 exclude each other (runtime/config.py, _initialize_params). The section bfloat16 is an old name of
    bf16 and ignored next to it (runtime/precision_config.py, get_bfloat16_config)."""
    if facts.has("bf16") and facts.has("bfloat16"):
        yield problem("bfloat16", "is ignored, because there is a section bf16", "remove it")
    section = "bf16" if facts.has("bf16") else "bfloat16"
    if facts.get("fp16.enabled", False) and facts.get(f"{section}.enabled", False):
        yield problem("fp16.enabled", f"and {section}.enabled exclude each other", "set one of them to false")


def dynamic_loss_scale_can_change(facts: Facts) -> Iterator[Problem]:
    """A dynamic loss scale needs a positive window and minimum (runtime/precision_config.py,
    _validate_dynamic_loss_scale_params)."""
    if facts.get("fp16.enabled", False) and facts.get("fp16.loss_scale", 0) == 0:
        for name in ("loss_scale_window", "min_loss_scale"):
            if facts.get(f"fp16.{name}", 1) <= 0:
                yield problem(f"fp16.{name}", "must be at least 1 for a dynamic loss scale", "remove it")


def low_precision_masters(facts: Facts) -> Iterator[Problem]:
    """Master weights in 16 bits need ZeRO. They need CPU Adam too, except with bf16_optimizer_states on the GPU
    (runtime/config.py, _do_error_check; runtime/base_optimizer.py, _configure_master_weights)."""
    bf16 = "bf16" if facts.has("bf16") else "bfloat16"
    states = facts.get(f"{bf16}.bf16_optimizer_states", False)
    keys = {
        "fp16.fp16_master_weights_and_grads": True,
        f"{bf16}.bf16_master_weights_and_grads": not states or facts.offload("optimizer") != "none",
    }
    for key, needs_cpu_adam in keys.items():
        if not facts.get(key, False):
            continue
        if facts.stage == 0:
            yield problem(key, "needs ZeRO", "use stage 1, 2 or 3, or remove it")
        elif needs_cpu_adam and not facts.uses_cpu_adam:
            hint = "set zero_optimization.offload_optimizer.device to cpu with optimizer type AdamW, or remove it"
            yield problem(key, "needs an optimizer that is offloaded to DeepSpeed's CPU Adam", hint)
    if all(facts.get(key, False) for key in keys):
        yield problem("fp16.fp16_master_weights_and_grads", "and its counterpart for bf16 exclude each other")
    if states and not facts.get(f"{bf16}.bf16_master_weights_and_grads", False):
        reason = "needs bf16_master_weights_and_grads"
        yield problem(f"{bf16}.bf16_optimizer_states", reason, "set bf16_master_weights_and_grads to true")


def gradients_without_zero(facts: Facts) -> Iterator[Problem]:
    """Without ZeRO, gradients accumulate in the data type of the parameters (runtime/engine.py,
    _do_optimizer_sanity_check)."""
    if facts.stage == 0 and not facts.precision_is_auto and facts.grad_accum_dtype != facts.precision:
        reason = f"differs from the data type of the parameters, {facts.precision}, which needs ZeRO"
        yield problem("data_types.grad_accum_dtype", reason, "use ZeRO stage 1, 2 or 3, or remove it")


def parameters_have_the_enabled_type(facts: Facts) -> Iterator[Problem]:
    """param_dtype repeats the enabled precision (runtime/engine.py, _assert_valid_mixed_precision_config)."""
    given = facts.dtype("param_dtype")
    if given not in (None, facts.precision) and not facts.precision_is_auto:
        reason = f"conflicts with the enabled precision, {facts.precision}"
        yield problem("data_types.param_dtype", reason, "remove it, or enable the matching section")


def autocast_keeps_weights(facts: Facts) -> Iterator[Problem]:
    """torch_autocast excludes quantized weights (runtime/torch_autocast.py, _validate_auto_cast_settings)."""
    if facts.get("torch_autocast.enabled", False) and facts.zero("zero_quantized_weights", False):
        yield problem(
            "torch_autocast.enabled", "is not supported with zero_quantized_weights", "disable one of them"
        )


RULES = (
    one_precision,
    dynamic_loss_scale_can_change,
    low_precision_masters,
    gradients_without_zero,
    parameters_have_the_enabled_type,
    autocast_keeps_weights,
)
