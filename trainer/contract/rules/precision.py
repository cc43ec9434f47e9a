"""Rules for the precision of matrix products, their kernels, and the loss scale of fp16."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.attention import attention_of
from trainer.contract.attention.kind import MatrixWidth
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, multiples, unread

FP8_MULTIPLE = 16
"""Required divisor of the widths of TE's FP8 matrix products, and of their tokens in the backward pass.

Source: transformer_engine/common/gemm/cublaslt_gemm.cu, CanonicalizeGemmInput. In the backward pass, the output width
and the number of tokens become leading dimensions on GPUs before Blackwell.
"""
FP8_SHARED_TOKENS = 8
"""Required divisor of the tokens per rank that sequence parallelism gathers before each product.

Source: transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec.
"""

DELAYED_SCALING_KEYS = ("training.fp8_amax_history_len", "training.fp8_amax_compute_algo")
ADAPTIVE_SCALE_KEYS = (
    "optimizer.initial_loss_scale",
    "optimizer.min_loss_scale",
    "optimizer.loss_scale_window",
    "optimizer.hysteresis",
)


def fp8_needs_transformer_engine(facts: Facts) -> Iterator[Problem]:
    """fp8 needs a GPU and Transformer Engine's layers (megatron/core/fp8_utils.py)."""
    if facts.training.fp8 is None:
        return
    if facts.device != "cuda":
        yield Problem(
            path="training.fp8", reason=f"requires GPUs, but {facts.why_no_gpus}", candidates=[None]
        )
    elif facts.training.transformer_impl == "torch":
        yield Problem(
            path="training.transformer_impl",
            reason=f"does not support training.fp8 = {facts.training.fp8}",
            candidates=["transformer_engine", None],
            about=("training.fp8",),
        )


def transformer_engine_needs_gpus(facts: Facts) -> Iterator[Problem]:
    """Kernels of Transformer Engine need a GPU (the trainer's rule, `trainer.model.kernels`)."""
    chosen = {
        "training.transformer_impl": facts.training.transformer_impl == "transformer_engine",
        "training.cross_entropy_fusion_impl": facts.training.cross_entropy_fusion_impl == "te",
    }
    for path, is_engine in chosen.items():
        if is_engine and facts.device != "cuda":
            yield Problem(
                path=path,
                reason=f"requires Transformer Engine, but {facts.why_no_gpus}",
                candidates=[None],
            )


def cross_entropy_is_deterministic(facts: Facts) -> Iterator[Problem]:
    """No cross entropy of Transformer Engine with deterministic_mode, which the trainer would not use
    (`trainer.model.kernels`)."""
    if facts.training.deterministic_mode and facts.training.cross_entropy_fusion_impl == "te":
        yield Problem(
            path="training.cross_entropy_fusion_impl",
            reason="has no effect, because training.deterministic_mode = true uses Megatron-Core's cross entropy",
            candidates=[None],
            settings=(Setting("training.deterministic_mode", False),),
            about=("training.deterministic_mode",),
        )


def fp8_needs_half_precision(facts: Facts) -> Iterator[Problem]:
    """fp8 needs bf16 or fp16 weights (hpcgen's rule: FP8 products defeat the purpose of fp32)."""
    if facts.training.fp8 is not None and facts.training.precision == "fp32":
        yield Problem(
            path="training.precision",
            reason=f"cannot be combined with training.fp8 = {facts.training.fp8}, which discards its precision",
            candidates=["bf16"],
            settings=(Setting("training.fp8", None),),
            about=("training.fp8",),
        )


def fp8_fits_widths(facts: Facts) -> Iterator[Problem]:
    """FP8 limits the widths of each rank's matrices, and its number of tokens, to multiples of 16 or 8.

    FP8_MULTIPLE and FP8_SHARED_TOKENS name the sources. Projections that tensor parallelism does not divide do not
    gather the tokens of other ranks.
    """
    if facts.training.fp8 is None:
        return
    for (key, width, what, about), unit in _matrix_widths(facts):
        if width % FP8_MULTIPLE:
            near = getattr(facts.resolved_model, key)
            yield Problem(
                path=f"model.{key}",
                reason=f"{what.strip() + ' ' if what else ''}results in matrices {width} wide, but training.fp8 = "
                f"{facts.training.fp8} requires multiples of {FP8_MULTIPLE}",
                candidates=multiples(FP8_MULTIPLE * unit, near=near),
                offers=2,
                settings=(Setting("training.fp8", None),),
                about=("training.fp8", *about),
            )
    model, axes = facts.resolved_model, facts.parallelism
    tensor = axes.tensor_model_parallel_size
    shares = axes.context_parallel_size * (tensor if axes.sequence_parallel else 1)
    tokens = facts.training.micro_batch_size * model.seq_length // shares
    products = attention_of(model).projections(model)
    is_gathered = axes.sequence_parallel and all(product.divided != "none" for product in products)
    unit = FP8_SHARED_TOKENS if is_gathered else FP8_MULTIPLE
    if tokens % unit:
        yield Problem(
            path="model.seq_length",
            reason=f"x micro_batch_size results in {tokens} tokens per rank, but training.fp8 = "
            f"{facts.training.fp8} requires a multiple of {unit}",
            candidates=multiples(unit * shares, near=model.seq_length),
            offers=2,
            settings=(Setting("training.fp8", None),),
            about=("training.fp8",),
        )


def _matrix_widths(facts: Facts) -> Iterator[tuple[MatrixWidth, int]]:
    """Widths of each rank's matrices, each with the number of ranks that divide the value of its key."""
    model, axes = facts.resolved_model, facts.parallelism
    assert model.ffn_hidden_size
    tensor, of_expert = axes.tensor_model_parallel_size, expert_tensor_parallel_size(axes)
    over_tensor, of_tensor = f" over TP = {tensor}", ("parallelism.tensor_model_parallel_size",)
    yield MatrixWidth("hidden_size", model.hidden_size), 1
    if facts.has_dense_layers:
        yield MatrixWidth("ffn_hidden_size", model.ffn_hidden_size // tensor, over_tensor, of_tensor), tensor
    for found in attention_of(model).matrix_widths(model, tensor):
        yield found, 1
    if model.moe_ffn_hidden_size is not None:
        width, keys = model.moe_ffn_hidden_size // of_expert, ("parallelism.expert_tensor_parallel_size",)
        yield MatrixWidth("moe_ffn_hidden_size", width, f" over ETP = {of_expert}", keys), of_expert
    if (shared := model.moe_shared_expert_intermediate_size) is not None:
        key = "moe_shared_expert_intermediate_size"
        yield MatrixWidth(key, shared // tensor, over_tensor, of_tensor), tensor


def fp8_details_need_their_recipe(facts: Facts) -> Iterator[Problem]:
    """A recipe needs fp8, and the keys of delayed scaling need that recipe (hpcgen's rule: unused keys are errors)."""
    training = facts.training
    needed = (Setting("training.fp8", "hybrid"),) if training.fp8 is None else ()
    if needed:
        reason = "has no effect, because training.fp8 is null"
        yield from unread(facts, ["training.fp8_recipe"], reason, about=("training.fp8",), settings=needed)
    if needed or training.fp8_recipe != "delayed":
        reason = "is used only with training.fp8_recipe = delayed"
        settings = (*needed, Setting("training.fp8_recipe", "delayed"))
        yield from unread(
            facts, DELAYED_SCALING_KEYS, reason, about=("training.fp8_recipe",), settings=settings
        )


def loss_scale_needs_fp16(facts: Facts) -> Iterator[Problem]:
    """The loss is scaled only for fp16, and a fixed scale does not change.

    Source: megatron/core/optimizer, _get_megatron_optimizer_based_on_param_groups.
    """
    if facts.training.precision != "fp16":
        reason = f"is used only with training.precision = fp16, not {facts.training.precision}"
        yield from unread(
            facts, ["optimizer.loss_scale", *ADAPTIVE_SCALE_KEYS], reason, about=("training.precision",)
        )
    elif facts.optimizer.loss_scale is not None:
        reason = (
            f"has no effect, because optimizer.loss_scale = {facts.optimizer.loss_scale:g} does not change"
        )
        yield from unread(
            facts,
            ADAPTIVE_SCALE_KEYS,
            reason,
            about=("optimizer.loss_scale",),
            settings=(Setting("optimizer.loss_scale", None),),
        )


def loss_scale_starts_above_its_minimum(facts: Facts) -> Iterator[Problem]:
    """min_loss_scale <= initial_loss_scale (megatron/core/optimizer/grad_scaler.py, DynamicGradScaler)."""
    optimizer = facts.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield Problem(
            path="optimizer.min_loss_scale",
            reason=f"is greater than optimizer.initial_loss_scale = {optimizer.initial_loss_scale:g}",
            candidates=[1.0],
            about=("optimizer.initial_loss_scale",),
        )


def bf16_is_as_fast(facts: Facts) -> Iterator[Problem]:
    """bf16 in place of fp16 (hpcgen's rule: GPUs since A100 are as fast in bf16, which needs no loss scale)."""
    if facts.training.precision == "fp16" and facts.device == "cuda":
        yield Problem(
            path="training.precision",
            reason="skips a step whenever gradients overflow, and is not faster than bf16",
            candidates=["bf16"],
        )


RULES: tuple[Rule, ...] = (
    fp8_needs_transformer_engine,
    transformer_engine_needs_gpus,
    cross_entropy_is_deterministic,
    fp8_needs_half_precision,
    fp8_fits_widths,
    fp8_details_need_their_recipe,
    loss_scale_needs_fp16,
    loss_scale_starts_above_its_minimum,
)

WARNINGS: tuple[Rule, ...] = (bf16_is_as_fast,)

OF_MODEL: tuple[Rule, ...] = ()
