"""Rules for the exchange of keys and values between context-parallel ranks.

Unless a docstring names another source, the source is Transformer Engine's attention with context parallelism
(transformer_engine/pytorch/attention/dot_product_attention/context_parallel.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from trainer.contract.attention import attention_of
from trainer.contract.attention.visibility import exchanges, limiting_key
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors, unread
from trainer.contract.rules.parallelism import CP, TP

KIND = "parallelism.cp_comm_type"
SIZES = "parallelism.hierarchical_context_parallel_sizes"


def exchange_needs_context_parallel(facts: Facts) -> Iterator[Problem]:
    """cp_comm_type needs CP > 1 (hpcgen's rule: it would have no effect)."""
    if facts.parallelism.context_parallel_size == 1:
        yield from unread(
            facts,
            [KIND],
            f"has no effect, because {CP} is 1",
            f"set {CP}",
            about=("parallelism.context_parallel_size",),
        )


def exchange_fits_kernels(facts: Facts) -> Iterator[Problem]:
    """torch's kernels gather keys and values (trainer/model/attention/core.py)."""
    if facts.parallelism.cp_comm_type not in (None, "all_gather") and facts.engine_problem:
        yield Problem(
            path=KIND,
            reason=f"requires Transformer Engine, but {facts.engine_problem}",
            about=("training.transformer_impl",),
            candidates=[None, "all_gather"],
        )


def exchange_fits_attention(facts: Facts) -> Iterator[Problem]:
    """Windows need all_gather or a2a (attn_forward_func_with_cp), and documents all_gather.

    With documents, the trainer gathers keys and values itself (trainer/model/packing.py): all_gather and a2a+p2p refuse
    packed documents, and p2p and a2a need each of them padded to a multiple of 2 x CP.
    """
    kind = facts.parallelism.cp_comm_type
    if facts.data.separates_documents and kind not in (None, "all_gather"):
        key = facts.data.separating_key
        yield Problem(
            path=KIND,
            reason=f"does not support {key} = true",
            candidates=[None, "all_gather"],
            about=(key,),
        )
    elif kind is not None and kind not in exchanges(facts.model):
        yield Problem(
            path=KIND,
            reason=f"does not support model.{limiting_key(facts.model)}",
            candidates=[None, *exchanges(facts.model)],
        )


def heads_fit_kernels(facts: Facts) -> Iterator[Problem]:
    """The widths of queries and values in a head % 8 == 0 with CP > 1 on GPUs.

    Source: Transformer Engine, dot_product_attention/utils.py, get_attention_backend. FlashAttention and cuDNN need it,
    and the backend without this condition has no context parallelism. With documents, the trainer gathers the keys.
    """
    model = facts.resolved_model
    if facts.parallelism.context_parallel_size == 1 or facts.engine_problem or facts.data.separates_documents:
        return
    values = attention_of(model).value_width(model)
    for name, width in (("queries and keys", model.kv_channels or 0), ("values", values)):
        if width % 8:
            yield Problem(
                path=CP,
                reason=f"requires Transformer Engine's attention, which supports only multiples of 8 as the width of a "
                f"head, but heads of {name} have width {width}",
                candidates=[1],
            )
            return


def exchange_divides_heads(facts: Facts) -> Iterator[Problem]:
    """a2a divides the heads of a tensor-parallel rank by CP, and a2a+p2p by the first of its sizes.

    Source: AttnFuncWithCPAndQKVOA2A.forward, for queries, keys and values.
    """
    kind, sizes = facts.parallelism.cp_comm_type, facts.parallelism.hierarchical_context_parallel_sizes
    if kind not in ("a2a", "a2a+p2p") or (kind == "a2a+p2p" and not sizes):
        return
    tensor = facts.parallelism.tensor_model_parallel_size
    groups = facts.resolved_model.num_query_groups
    assert groups is not None
    ranks = facts.parallelism.context_parallel_size if kind == "a2a" or sizes is None else sizes[0]
    for key, heads in (
        ("num_attention_heads", facts.model.num_attention_heads // tensor),
        ("num_query_groups", max(1, groups // tensor)),
    ):
        if heads % ranks:
            yield Problem(
                path=KIND if kind == "a2a" else SIZES,
                reason=f"divides heads by {ranks}, but model.{key} / TP = {heads} is not a multiple of it "
                f"({heads} / {ranks})",
                candidates=["all_gather", "p2p"] if kind == "a2a" else _sizes(facts),
                offers=2,
            )
            return


def hierarchy_fits_ranks(facts: Facts) -> Iterator[Problem]:
    """a2a+p2p needs two sizes with the product CP.

    Sources: attn_forward_func_with_cp, and megatron/core/parallel_state.py, initialize_model_parallel.
    """
    kind, sizes = facts.parallelism.cp_comm_type, facts.parallelism.hierarchical_context_parallel_sizes
    if kind != "a2a+p2p":
        reason, needed = f"is used only with {KIND} = a2a+p2p", (Setting(KIND, "a2a+p2p"),)
        yield from unread(facts, [SIZES], reason, about=(KIND,), settings=needed)
        return
    size = facts.parallelism.context_parallel_size
    if sizes is None or len(sizes) != 2 or math.prod(sizes) != size:
        wrong = "is missing, but" if sizes is None else "does not fit:"
        reason = f"{wrong} {KIND} = a2a+p2p needs two sizes with the product {CP} = {size}"
        yield Problem(
            path=SIZES,
            reason=reason,
            candidates=_sizes(facts),
            offers=2,
            about=("parallelism.cp_comm_type", "parallelism.context_parallel_size"),
        )


def _sizes(facts: Facts) -> list[tuple[int, int]]:
    """Pairs of sizes with the product CP. Pairs whose groups fill what NVLink connects come first."""
    size, tensor = facts.parallelism.context_parallel_size, facts.parallelism.tensor_model_parallel_size
    inner = divisors(size, near=max(1, facts.nvlink_devices // tensor))
    return [(group, size // group) for group in inner]


def tensor_and_context_parallel_stay_in_node(facts: Facts) -> Iterator[Problem]:
    """TP x CP divides the number of devices connected by NVLink (hpcgen's rule).

    Both exchange activations in every layer, which is limited by the network between nodes (arXiv 2104.04473,
    section 3.2, on tensor parallelism). With hierarchical context parallelism, this applies to its groups.
    """
    axes, connected = facts.parallelism, facts.nvlink_devices
    tensor, context = axes.tensor_model_parallel_size, axes.context_parallel_size
    if axes.hierarchical_context_parallel_sizes:
        context = axes.hierarchical_context_parallel_sizes[0]
    if facts.crosses_network(tensor):
        is_large = tensor > connected
        reason = (
            f"is {facts.too_large(tensor)}" if is_large else f"does not divide the {facts.connected_devices}"
        )
        yield Problem(
            path=TP,
            reason=f"{reason}, so every layer waits for the network",
            candidates=[
                size
                for size in divisors(facts.model.num_attention_heads, near=min(tensor, connected))
                if not facts.crosses_network(size)
            ],
            offers=1,
        )
    elif facts.crosses_network(tensor * context) and context > 1:
        yield Problem(
            path=CP,
            reason=f"results in TP x CP = {tensor} x {context} = {tensor * context}, "
            f"{facts.too_large(tensor * context)}, so every layer waits for the network",
            candidates=[
                size for size in divisors(context, near=context) if not facts.crosses_network(tensor * size)
            ],
            offers=1,
            settings=_hierarchy(facts),
        )


def _hierarchy(facts: Facts) -> tuple[Setting, ...]:
    """The settings that exchange by heads over NVLink; none if the model, its data or the kernels do not allow it."""
    axes = facts.parallelism
    group = facts.nvlink_devices // axes.tensor_model_parallel_size
    if group < 2 or axes.context_parallel_size % group or axes.hierarchical_context_parallel_sizes:
        return ()
    sizes = (group, axes.context_parallel_size // group)
    changed = facts.with_value(KIND, "a2a+p2p").with_value(SIZES, sizes)
    if any(violation for check in RULES for violation in check(changed)):
        return ()
    return Setting(KIND, "a2a+p2p"), Setting(SIZES, sizes)


RULES: tuple[Rule, ...] = (
    exchange_needs_context_parallel,
    exchange_fits_kernels,
    exchange_fits_attention,
    hierarchy_fits_ranks,
    heads_fit_kernels,
    exchange_divides_heads,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
