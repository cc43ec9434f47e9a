"""Rules about the precision of matrix products, and the loss scale that fp16 needs."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.planning.rules.facts import Facts, Rule, Violation, multiples, unread

FP8_TOKENS = 8
FP8_WIDTH = 16
"""What TE's matrix products in FP8 want multiples of: transformer_engine/pytorch/utils.py, assert_dim_for_fp8_exec."""

OF_DELAYED_SCALING = ("training.fp8_amax_history_len", "training.fp8_amax_compute_algo")
OF_LOSS_SCALING = (
    "optimizer.loss_scale",
    "optimizer.initial_loss_scale",
    "optimizer.min_loss_scale",
    "optimizer.loss_scale_window",
    "optimizer.hysteresis",
)


def fp8_needs_transformer_engine(facts: Facts) -> Iterator[Violation]:
    """fp8 needs a GPU and Transformer Engine's layers (megatron/core/fp8_utils.py)."""
    if facts.training.fp8 is None:
        return
    if facts.device != "cuda":
        yield Violation(
            path="training.fp8", reason="needs GPUs, and the cluster's nodes have none", candidates=[None]
        )
    elif facts.training.transformer_impl == "torch":
        yield Violation(
            path="training.transformer_impl",
            reason="has no matrix products in FP8, which training.fp8 asks for",
            candidates=["transformer_engine", None],
        )


def fp8_is_for_half_precision(facts: Facts) -> Iterator[Violation]:
    """fp8 over bf16 or fp16 weights (ours: over fp32 it would round what fp32 was asked for to keep)."""
    if facts.training.fp8 is not None and facts.training.precision == "fp32":
        yield Violation(
            path="training.precision",
            reason="is what training.fp8 would round away",
            candidates=["bf16"],
            advice="training.fp8: null",
        )


def fp8_fits_widths(facts: Facts) -> Iterator[Violation]:
    """Widths of each rank's matrices % 16 == 0, its tokens % 8 == 0 (FP8_TOKENS has the source)."""
    model, axes = facts.resolved_model, facts.parallelism
    if facts.training.fp8 is None:
        return
    assert model.kv_channels
    assert model.num_query_groups
    assert model.ffn_hidden_size
    tensor = axes.tensor_model_parallel_size
    query = model.kv_channels * model.num_attention_heads
    for key, width, what in (
        ("hidden_size", model.hidden_size, ""),
        ("ffn_hidden_size", model.ffn_hidden_size // tensor, f" over TP = {tensor}"),
        ("kv_channels", query // tensor, f" x num_attention_heads over TP = {tensor}"),
    ):
        if width % FP8_WIDTH:
            near = getattr(model, key)
            yield Violation(
                path=f"model.{key}",
                depends_on=("parallelism", "training"),
                reason=f"{what.strip() + ' ' if what else ''}makes matrices {width} wide, and training.fp8 = "
                f"{facts.training.fp8} needs multiples of {FP8_WIDTH}",
                candidates=multiples(FP8_WIDTH * (tensor if key == "ffn_hidden_size" else 1), near=near),
                offers=2,
                advice="training.fp8: null",
            )
    shares = axes.context_parallel_size * (tensor if axes.sequence_parallel else 1)
    tokens = facts.training.micro_batch_size * model.seq_length // shares
    if tokens % FP8_TOKENS:
        yield Violation(
            path="model.seq_length",
            depends_on=("parallelism", "training"),
            reason=f"x micro_batch_size leaves {tokens} tokens on a rank, and training.fp8 = {facts.training.fp8} "
            f"needs a multiple of {FP8_TOKENS}",
            candidates=multiples(FP8_TOKENS * shares, near=model.seq_length),
            offers=2,
            advice="training.fp8: null",
        )


def fp8_details_need_their_recipe(facts: Facts) -> Iterator[Violation]:
    """What nothing would read is refused: a recipe without fp8, and keys of delayed scaling without it (ours)."""
    training = facts.training
    if training.fp8 is None:
        reason = "says how to scale in FP8, and training.fp8 is null"
        yield from unread(facts, ["training.fp8_recipe"], reason, "training.fp8: hybrid")
    if training.fp8 is None or training.fp8_recipe != "delayed":
        reason = "is read with training.fp8_recipe = delayed alone"
        yield from unread(facts, OF_DELAYED_SCALING, reason, "fp8_recipe: delayed")


def loss_scale_needs_fp16(facts: Facts) -> Iterator[Violation]:
    """The loss is scaled for fp16 alone (megatron/core/optimizer, _get_megatron_optimizer_based_on_param_groups)."""
    if facts.training.precision != "fp16":
        reason = f"is for training.precision = fp16, and it is {facts.training.precision}"
        yield from unread(facts, OF_LOSS_SCALING, reason, depends_on=("training",))


def loss_scale_starts_above_its_least(facts: Facts) -> Iterator[Violation]:
    """min_loss_scale <= initial_loss_scale (megatron/core/optimizer/grad_scaler.py, DynamicGradScaler)."""
    optimizer = facts.optimizer
    if optimizer.min_loss_scale > optimizer.initial_loss_scale:
        yield Violation(
            path="optimizer.min_loss_scale",
            reason=f"is greater than optimizer.initial_loss_scale = {optimizer.initial_loss_scale:g}",
            candidates=[1.0],
        )


def bf16_is_as_fast(facts: Facts) -> Iterator[Violation]:
    """fp16 on GPUs (ours): every GPU since A100 is as fast in bf16, whose range needs no loss scale."""
    if facts.training.precision == "fp16" and facts.device == "cuda":
        yield Violation(
            path="training.precision",
            reason="skips a step whenever gradients overflow, and is no faster than bf16",
            candidates=["bf16"],
        )


RULES: tuple[Rule, ...] = (
    fp8_needs_transformer_engine,
    fp8_is_for_half_precision,
    fp8_fits_widths,
    fp8_details_need_their_recipe,
    loss_scale_needs_fp16,
    loss_scale_starts_above_its_least,
)

WARNINGS: tuple[Rule, ...] = (bf16_is_as_fast,)
