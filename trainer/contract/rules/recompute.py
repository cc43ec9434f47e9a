"""Rules for recomputing activations. The sources are files of megatron/core/transformer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from trainer.contract.attention import KINDS
from trainer.contract.config import DISCARDS_OUTPUT
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors
from trainer.contract.wording import counted


def full_recompute_needs_method(facts: Facts) -> Iterator[Problem]:
    """recompute_granularity full needs a method (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_method is None:
        yield Problem(
            path="training.recompute_method",
            reason="must be set with training.recompute_granularity = full",
            candidates=["uniform", "block"],
            about=("training.recompute_granularity",),
        )


def full_recompute_needs_num_layers(facts: Facts) -> Iterator[Problem]:
    """recompute_granularity full needs a number of layers (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.recompute_granularity == "full" and training.recompute_num_layers is None:
        yield Problem(
            path="training.recompute_num_layers",
            reason="must be set with training.recompute_granularity = full",
            candidates=[1],
            about=("training.recompute_granularity",),
        )


def recompute_details_need_full(facts: Facts) -> Iterator[Problem]:
    """Method and number of layers need full recomputation.

    Core refuses a number of layers with selective (transformer_config.py, __post_init__) and ignores the other cases.
    Here all of them are errors.
    """
    training = facts.training
    if training.recompute_granularity == "full":
        return
    granularity = training.recompute_granularity or "null"
    for key, value in (
        ("recompute_method", training.recompute_method),
        ("recompute_num_layers", training.recompute_num_layers),
    ):
        if value is not None:
            yield Problem(
                path=f"training.{key}",
                reason=f"is used only with recompute_granularity = full, not {granularity}",
                candidates=[None],
                settings=(Setting("training.recompute_granularity", "full"),),
                about=("training.recompute_granularity",),
            )


def recompute_fits_chunk(facts: Facts) -> Iterator[Problem]:
    """Groups of recompute_num_layers fill a model chunk (transformer_block.py, _checkpointed_forward).

    An incomplete group with uniform would run past the last layer, and block would recompute layers that do not exist.
    A chunk is the layers of one pipeline stage or one virtual stage.
    """
    training, chunks = facts.training, facts.chunk_layers
    num_layers = training.recompute_num_layers
    if training.recompute_granularity != "full" or num_layers is None or chunks is None:
        return
    sizes = sorted({layers for layers in chunks if layers})
    if training.recompute_method == "uniform":
        chunk = next((size for size in sizes if size % num_layers), None)
        if chunk is not None:
            yield Problem(
                path="training.recompute_num_layers",
                reason=f"does not divide the {counted(chunk, 'layer')} of a model chunk ({chunk} / {num_layers})",
                candidates=divisors(math.gcd(*sizes), near=num_layers),
            )
    if training.recompute_method == "block" and num_layers > sizes[0]:
        yield Problem(
            path="training.recompute_num_layers",
            reason=f"is more than the {counted(sizes[0], 'layer')} of a model chunk",
            candidates=[sizes[0]],
            hint="use fewer layers",
        )


def modules_need_selective(facts: Facts) -> Iterator[Problem]:
    """recompute_modules needs recompute_granularity selective (transformer_config.py, __post_init__), and a module."""
    training = facts.training
    if training.recompute_modules is not None and training.recompute_granularity != "selective":
        granularity = training.recompute_granularity or "null"
        yield Problem(
            path="training.recompute_modules",
            reason=f"is used only with recompute_granularity = selective, not {granularity}",
            candidates=[None],
            settings=(Setting("training.recompute_granularity", "selective"),),
            about=("training.recompute_granularity",),
        )
    elif training.recompute_modules == ():
        yield Problem(
            path="training.recompute_modules",
            reason="is empty, so selective recomputation recomputes nothing",
            hint="list modules, or remove it to recompute core_attn",
        )


NEEDED_BY_MODULE = {
    "moe": ("num_moe_experts",),
    "moe_act": ("num_moe_experts",),
    "layernorm": ("num_moe_experts",),
}
"""Module -> keys of the model. The module needs one of them. Keys of attention that has the module are added.
Transformer Engine computes the norms of other models inside the projections (gpt_layer_specs.py,
get_gpt_layer_with_transformer_engine_spec), so recomputing them would do nothing."""


def modules_exist(facts: Facts) -> Iterator[Problem]:
    """The model has the modules to recompute (transformer_config.py, __post_init__; transformer_layer.py)."""
    for module in facts.training.recompute_modules or ():
        kinds = [str(kind.key) for kind in KINDS if module in kind.recomputable]
        keys = (*NEEDED_BY_MODULE.get(module, ()), *kinds)
        if keys and not any(getattr(facts.model, key) for key in keys):
            needed = [f"model.{key}" for key in keys]
            yield _without(facts, module, f"requires {' or '.join(needed)}", needed)


def modules_can_be_recomputed(facts: Facts) -> Iterator[Problem]:
    """Modules that discard outputs need Transformer Engine, mlp an MLP without biases, and moe_act grouped experts.

    Sources: tensor_parallel/random.py, CheckpointWithoutOutputFunction, which reads Transformer Engine's state;
    transformer_layer.py, _forward_mlp, whose checkpoint returns the bias itself, so its backward pass would never end;
    transformer_config.py, __post_init__ (moe_act).
    """
    modules = facts.training.recompute_modules or ()
    for module in modules:
        if module in DISCARDS_OUTPUT and facts.engine_problem:
            yield _without(facts, module, "requires GPUs and Transformer Engine's layers")
        elif module == "mlp" and facts.model.add_bias_linear:
            yield _without(facts, module, "requires model.add_bias_linear = false", ["model.add_bias_linear"])
        elif module == "moe_act" and not _has_grouped_gemm(facts):
            reason = "requires moe_grouped_gemm = true and model.add_bias_linear = false"
            yield _without(facts, module, reason, ["parallelism.moe_grouped_gemm", "model.add_bias_linear"])


def _has_grouped_gemm(facts: Facts) -> bool:
    """True if the experts of a rank are computed together. By default they are, unless they have biases."""
    chosen = facts.parallelism.moe_grouped_gemm
    return not facts.model.add_bias_linear if chosen is None else chosen


def delayed_scaling_keeps_outputs(facts: Facts) -> Iterator[Problem]:
    """FP8 with delayed scaling cannot recompute layernorm and moe_act (transformer_config.py, __post_init__)."""
    training = facts.training
    if training.fp8 is None or training.fp8_recipe != "delayed":
        return
    for module in training.recompute_modules or ():
        if module in ("layernorm", "moe_act"):
            yield _without(
                facts, module, "does not support training.fp8_recipe = delayed", ["training.fp8_recipe"]
            )


def _without(facts: Facts, module: str, reason: str, about: Sequence[str] = ()) -> Problem:
    """The violation of a rule that only one of recompute_modules breaks."""
    others = tuple(other for other in facts.training.recompute_modules or () if other != module)
    return Problem(
        path="training.recompute_modules",
        reason=f"contains {module}, which {reason}",
        candidates=[others or None],
        about=tuple(about),
    )


RULES: tuple[Rule, ...] = (
    full_recompute_needs_method,
    full_recompute_needs_num_layers,
    recompute_details_need_full,
    recompute_fits_chunk,
    modules_need_selective,
    modules_exist,
    modules_can_be_recomputed,
    delayed_scaling_keeps_outputs,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
