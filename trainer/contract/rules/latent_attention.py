"""Rules for multi-head latent attention (MLA)."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.attention import attention_of
from trainer.contract.attention.latent import LATENT
from trainer.contract.attention.visibility import limiting_key
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors
from trainer.contract.rules.parallelism import CP

KEY = f"model.{LATENT.key}"
WHAT = f"{KEY} = true"


def _is_latent(facts: Facts) -> bool:
    return attention_of(facts.model) is LATENT


def latent_attention_needs_sequence_parallel(facts: Facts) -> Iterator[Problem]:
    """MLA with TP > 1 needs sequence_parallel (hpcgen's rule, which the trainer checks as well).

    All heads share the rotated part of the keys, and each rank only computes the gradients of its own heads. Core adds
    them up over tensor-parallel ranks with sequence parallelism only (megatron/core/distributed/
    finalize_model_grads.py). Otherwise, the ranks train different weights.
    """
    axes = facts.parallelism
    size = axes.tensor_model_parallel_size
    if _is_latent(facts) and size > 1 and not axes.sequence_parallel:
        yield Problem(
            path="parallelism.sequence_parallel",
            reason=f"must be true for {KEY} with TP = {size}, because Megatron-Core leaves out "
            "gradients otherwise",
            candidates=[True],
            about=("model.multi_latent_attention",),
        )


def latent_attention_has_no_communication_overlap(facts: Facts) -> Iterator[Problem]:
    """No tp_comm_overlap with MLA.

    Source: megatron/core/extensions/transformer_engine.py, TELinear, which disables the overlap because Transformer
    Engine has no buffers for the projections of MLA.
    """
    if _is_latent(facts) and facts.parallelism.tp_comm_overlap:
        yield Problem(
            path="parallelism.tp_comm_overlap",
            reason=f"has no effect with {WHAT}",
            candidates=[False],
            about=("model.multi_latent_attention",),
        )


def yarn_of_latent_attention_divides_context(facts: Facts) -> Iterator[Problem]:
    """original_max_position_embeddings % (2 x CP) == 0 with MLA and YaRN.

    Source: megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py, _set_cos_sin_cache, which divides the
    rotations of the original sequence over the context-parallel ranks.
    """
    scaling, size = facts.model.yarn, facts.parallelism.context_parallel_size
    if not _is_latent(facts) or scaling is None or size == 1:
        return
    length = scaling.original_max_position_embeddings
    if length is not None and length % (2 * size):
        yield Problem(
            path=CP,
            reason=f"requires that model.rope_scaling.original_max_position_embeddings = {length} is a multiple of "
            f"2 x {size} with {WHAT} ({length} / {2 * size})",
            candidates=divisors(max(1, length // 2), near=size) if length % 2 == 0 else [1],
            about=("model.rope_scaling.original_max_position_embeddings", "model.multi_latent_attention"),
        )


def windows_of_latent_attention_are_on_one_rank(facts: Facts) -> Iterator[Problem]:
    """No windows with MLA and CP > 1 on GPUs.

    Source: Transformer Engine, context_parallel.py, attn_forward_func_with_cp: windows need all_gather, which does not
    support values and keys of different widths.
    """
    key, size = limiting_key(facts.model), facts.parallelism.context_parallel_size
    if _is_latent(facts) and key is not None and size > 1 and not facts.engine_problem:
        yield Problem(
            path=f"model.{key}",
            reason=f"is not supported by Transformer Engine with {WHAT} and "
            f"parallelism.context_parallel_size = {size}",
            candidates=[None],
            settings=(Setting(CP, 1),),
            about=("model.multi_latent_attention", "parallelism.context_parallel_size"),
        )


def latent_attention_exchanges_around_a_ring(facts: Facts) -> Iterator[Problem]:
    """No cp_comm_type all_gather or a2a with MLA on GPUs, unless the trainer gathers keys and values of documents.

    Source: Transformer Engine before 2.16, context_parallel.py, attn_forward_func_with_cp, which refuses values and
    keys of different widths.
    """
    model, kind = facts.resolved_model, facts.parallelism.cp_comm_type
    if (
        _is_latent(facts)
        and kind in ("all_gather", "a2a")
        and LATENT.value_width(model) != model.kv_channels
        and not facts.engine_problem
        and not facts.data.separates_documents
    ):
        yield Problem(
            path="parallelism.cp_comm_type",
            reason=f"is not supported by Transformer Engine before 2.16 with {WHAT}",
            candidates=[None, "p2p", "a2a+p2p"],
            about=("model.multi_latent_attention",),
        )


RULES: tuple[Rule, ...] = (
    latent_attention_needs_sequence_parallel,
    latent_attention_has_no_communication_overlap,
    yarn_of_latent_attention_divides_context,
    windows_of_latent_attention_are_on_one_rank,
    latent_attention_exchanges_around_a_ring,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
