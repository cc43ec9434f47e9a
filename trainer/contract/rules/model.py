"""Rules for the shape of the model.

If a docstring names a function of Megatron-LM, that function refuses the same values, but only after the job has
started.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.contract.attention import attention_of, attention_problems
from trainer.contract.code.imports import IMPORT_PATH
from trainer.contract.config import RopeScaling
from trainer.contract.config.resolve import YARN_BETA_FAST, YARN_BETA_SLOW, pad_vocab_size
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors, indivisible, unread


def heads_divide_hidden_size(facts: Facts) -> Iterator[Problem]:
    """hidden_size % num_attention_heads == 0 unless kv_channels is set, or the heads have widths of their own.

    Source: megatron/training/arguments.py, validate_args.
    """
    model = facts.model
    if (
        model.kv_channels is None
        and attention_of(model).has_complete_heads
        and model.hidden_size % model.num_attention_heads
    ):
        yield Problem(
            path="model.num_attention_heads",
            reason=f"does not divide model.hidden_size = {model.hidden_size} "
            f"({model.hidden_size} / {model.num_attention_heads}), and model.kv_channels is null",
            candidates=divisors(model.hidden_size, near=model.num_attention_heads),
            offers=4,
            about=("model.hidden_size", "model.kv_channels"),
        )


def query_groups_divide_heads(facts: Facts) -> Iterator[Problem]:
    """num_attention_heads % num_query_groups == 0.

    Source: megatron/core/transformer/attention.py, get_query_key_value_tensors, which rounds down and then fails
    because the shapes do not match.
    """
    model = facts.model
    if model.num_query_groups is not None and model.num_attention_heads % model.num_query_groups:
        heads = "model.num_attention_heads"
        yield indivisible("model.num_query_groups", model.num_query_groups, heads, model.num_attention_heads)


def rotary_head_width_is_even(facts: Facts) -> Iterator[Problem]:
    """kv_channels % 2 == 0 with rope, if it rotates complete heads. `keys_fit_attention` checks other widths.

    Source: megatron/core/models/common/embeddings/rope_utils.py, _rotate_half.
    """
    model = facts.model
    width = facts.resolved_model.kv_channels
    assert width is not None
    is_rotated = model.position_embedding_type == "rope" and attention_of(model).has_complete_heads
    if not is_rotated or width % 2 == 0:
        return
    if model.kv_channels is not None:
        yield Problem(
            path="model.kv_channels",
            reason="is odd, but position_embedding_type = rope rotates channels in pairs",
            candidates=[width - 1, width + 1] if width > 1 else [2],
            about=("model.position_embedding_type",),
        )
    else:
        yield Problem(
            path="model.num_attention_heads",
            reason=f"results in heads of {width} channels ({model.hidden_size} / {model.num_attention_heads}), "
            "but position_embedding_type = rope rotates channels in pairs",
            candidates=divisors(model.hidden_size, near=model.num_attention_heads),
            offers=4,
            about=("model.position_embedding_type",),
        )


def rotary_base_needs_rope(facts: Facts) -> Iterator[Problem]:
    """rotary_base needs rope (hpcgen's rule: it would have no effect)."""
    kind = facts.model.position_embedding_type
    if kind != "rope":
        reason = f"has no effect, because model.position_embedding_type is {kind}"
        yield from unread(
            facts,
            ["model.rotary_base"],
            reason,
            settings=(Setting("model.position_embedding_type", "rope"),),
            about=("model.position_embedding_type",),
        )


def positions_cover_sequence(facts: Facts) -> Iterator[Problem]:
    """max_position_embeddings >= seq_length (megatron/training/arguments.py, validate_args)."""
    model = facts.model
    if model.max_position_embeddings is not None and model.max_position_embeddings < model.seq_length:
        yield Problem(
            path="model.max_position_embeddings",
            reason=f"is less than model.seq_length = {model.seq_length}",
            candidates=[model.seq_length],
            hint="reduce seq_length",
            about=("model.seq_length",),
        )


def padded_vocabulary_covers_vocabulary(facts: Facts) -> Iterator[Problem]:
    """padded_vocab_size >= vocab_size (hpcgen's rule: every token needs a row of the embedding)."""
    padded, vocab_size = facts.model.padded_vocab_size, facts.model.vocab_size
    if padded is not None and vocab_size is not None and padded < vocab_size:
        yield Problem(
            path="model.padded_vocab_size",
            reason=f"is less than model.vocab_size = {vocab_size}",
            candidates=[pad_vocab_size(vocab_size)],
            hint="set it to null, which pads vocab_size to a multiple of 128",
            about=("model.vocab_size",),
        )


def activation_is_used(facts: Facts) -> Iterator[Problem]:
    """swiglu has its own activation function (hpcgen's rule: unused keys are errors)."""
    if facts.model.swiglu and facts.model.activation_func is not None:
        yield Problem(
            path="model.activation_func",
            reason="has no effect, because swiglu = true uses SiLU",
            hint="set swiglu to false or remove it",
            about=("model.swiglu",),
        )


def keys_fit_attention(facts: Facts) -> Iterator[Problem]:
    """The keys of a kind of attention are set only with it, and no other key contradicts it
    (trainer/contract/attention)."""
    yield from attention_problems(facts.model)


def scaling_needs_rope(facts: Facts) -> Iterator[Problem]:
    """rope_scaling needs rope."""
    if facts.model.rope_scaling is not None:
        yield from requires_rope(facts, "rope_scaling")


def requires_rope(facts: Facts, key: str) -> Iterator[Problem]:
    """A violation if the positions are learned."""
    kind = facts.model.position_embedding_type
    if kind != "rope":
        yield Problem(
            path=f"model.{key}",
            reason=f"requires position_embedding_type = rope, but it is {kind}",
            hint=f"set position_embedding_type to rope or remove {key}",
            about=("model.position_embedding_type",),
        )


def scaling_has_its_keys(facts: Facts) -> Iterator[Problem]:
    """rope_scaling has only the keys of its rope_type (transformers, modeling_rope_utils.py)."""
    if facts.model.rope_scaling is not None:
        yield from _scaling_problems(facts.model.rope_scaling)


ROPE_SCALING_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "llama3": (("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"), ()),
    "yarn": (
        ("original_max_position_embeddings",),
        ("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
    ),
}
"""Keys of each rope_type besides factor: required and optional. Source: transformers' modeling_rope_utils.py."""


def _scaling_problems(scaling: RopeScaling) -> Iterator[Problem]:
    kind = scaling.rope_type
    required, optional = ROPE_SCALING_KEYS[kind]
    if missing := [key for key in required if getattr(scaling, key) is None]:
        reason = f"has no {', '.join(missing)}, which rope_type = {kind} requires"
        extends = missing == ["original_max_position_embeddings"]
        own = "set it to the seq_length of the first training, or " if extends else ""
        yield Problem("model.rope_scaling", reason, f"{own}take the value from the model's config.json")
    for field in dataclasses.fields(scaling):
        is_used = field.name in ("rope_type", "factor", *required, *optional)
        if not is_used and getattr(scaling, field.name) is not None:
            yield Problem(
                f"model.rope_scaling.{field.name}",
                f"is not used by rope_type = {kind}",
                "remove it",
                about=("model.rope_scaling.rope_type",),
            )
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    if low is not None and high is not None and low >= high:
        reason = f"must be greater than low_freq_factor = {low:g}"
        yield Problem(
            "model.rope_scaling.high_freq_factor",
            reason,
            f"use more than {low:g}",
            about=("model.rope_scaling.low_freq_factor",),
        )
    slow, fast = scaling.beta_slow or YARN_BETA_SLOW, scaling.beta_fast or YARN_BETA_FAST
    if fast < slow:
        yield Problem(
            "model.rope_scaling.beta_fast",
            f"must be at least beta_slow = {slow:g}",
            f"use {slow:g} or more",
            about=("model.rope_scaling.beta_slow",),
        )


def yarn_uses_its_scales(facts: Facts) -> Iterator[Problem]:
    """mscale and mscale_all_dim are both above 0, without attention_factor (hpcgen's rule).

    Otherwise they have no effect, as in transformers (modeling_rope_utils.py, _compute_yarn_parameters). Other
    scales, of heads that are rotated in part, are checked in trainer/contract/attention.
    """
    scaling = facts.model.yarn
    if scaling is None or not attention_of(facts.model).has_complete_heads:
        return
    scales = {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    given = next((key for key, value in scales.items() if value is not None), None)
    if given is None:
        return
    if scaling.attention_factor is not None:
        yield Problem(
            path=f"model.rope_scaling.{given}",
            reason="has no effect, because model.rope_scaling.attention_factor is set",
            hint="remove one of the two",
            about=("model.rope_scaling.attention_factor",),
        )
    elif not all(scales.values()):
        yield Problem(
            path=f"model.rope_scaling.{given}",
            reason="has no effect unless both mscale and mscale_all_dim are above 0",
            hint="set both, or remove it",
            about=("model.rope_scaling.mscale", "model.rope_scaling.mscale_all_dim"),
        )


def yarn_reaches_sequence(facts: Facts) -> Iterator[Problem]:
    """factor x original_max_position_embeddings >= seq_length with YaRN, which stretches to that length.

    Source: transformers, modeling_rope_utils.py, which warns if the factor differs from the ratio of the lengths. With
    llama3, the factor is not such a ratio.
    """
    scaling, length = facts.model.yarn, facts.model.seq_length
    if scaling is None or scaling.original_max_position_embeddings is None:
        return
    original = scaling.original_max_position_embeddings
    if scaling.factor * original < length:
        yield Problem(
            path="model.rope_scaling.factor",
            reason=f"extends {original} tokens to {scaling.factor * original:g}, but model.seq_length is {length}",
            hint=f"use {length / original:g} or more",
            about=("model.seq_length",),
        )


def architecture_is_an_import_path(facts: Facts) -> Iterator[Problem]:
    """layer_spec and model_provider are package.module:function or file.py:function (contract/code/imports.py)."""
    yield from import_path("model.layer_spec", facts.model.layer_spec)
    yield from import_path("model.model_provider", facts.model.model_provider)


def import_path(path: str, value: str | None) -> Iterator[Problem]:
    """Checks only the syntax, because the function may be available only where the job runs."""
    if value is not None and IMPORT_PATH.fullmatch(value) is None:
        yield Problem(
            path=path,
            reason="is not an import path",
            hint="use package.module:function or file.py:function",
        )


OF_MODEL: tuple[Rule, ...] = (
    activation_is_used,
    keys_fit_attention,
    scaling_needs_rope,
    scaling_has_its_keys,
)
"""Rules of keys of the section `model` that contradict each other."""

RULES: tuple[Rule, ...] = (
    heads_divide_hidden_size,
    query_groups_divide_heads,
    rotary_head_width_is_even,
    rotary_base_needs_rope,
    positions_cover_sequence,
    padded_vocabulary_covers_vocabulary,
    *OF_MODEL,
    yarn_uses_its_scales,
    architecture_is_an_import_path,
)

WARNINGS: tuple[Rule, ...] = (yarn_reaches_sequence,)
