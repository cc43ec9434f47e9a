"""Rules for training on chats (data.sft)."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.problem import Problem
from trainer.contract.rules.facts import Facts, Rule, unread

OF_DOCUMENTS = ("data.reset_attention_mask", "data.reset_position_ids", "data.eod_mask_loss", "data.eod_id")
"""Keys about documents that an end-of-document token ends."""


def chats_are_tokenized(facts: Facts) -> Iterator[Problem]:
    """sft needs pairs (hpcgen's rule: mock samples have no loss mask, and own samples bring theirs)."""
    if facts.data.sft and facts.data.dataset is not None:
        yield Problem(
            path="data.sft",
            reason="requires pairs with a loss mask, but data.dataset makes the samples",
            hint="remove it, and return a loss_mask with each sample",
            candidates=[False],
            about=("data.dataset",),
        )
    if facts.data.sft and facts.data.mock:
        yield Problem(
            path="data.sft",
            reason="requires pairs with a loss mask, but data.mock = true makes samples without one",
            candidates=[False],
            about=("data.mock",),
        )


def chats_are_separate(facts: Facts) -> Iterator[Problem]:
    """The keys of documents do not apply to chats, whose boundaries come from their lengths (hpcgen's rule)."""
    if facts.data.sft:
        reason = (
            "has no effect with data.sft = true, which always separates chats and learns only their answers"
        )
        yield from unread(facts, OF_DOCUMENTS, reason, about=("data.sft",))


def packing_needs_chats(facts: Facts) -> Iterator[Problem]:
    """sft_packing needs sft (hpcgen's rule: it would have no effect)."""
    if not facts.data.sft:
        yield from unread(
            facts, ["data.sft_packing"], "has no effect without data.sft = true", about=("data.sft",)
        )


def samples_hold_chats(facts: Facts) -> Iterator[Problem]:
    """A chat needs a token to predict from and one to learn (hpcgen's rule)."""
    if facts.data.sft and facts.model.seq_length < 2:
        yield Problem(
            path="model.seq_length",
            reason="is too short for a chat",
            hint="use the length of a long chat",
            about=("data.sft",),
        )


def predicting_layers_see_masks(facts: Facts) -> Iterator[Problem]:
    """No experts in MTP layers with sft or with samples of your own, which may have a loss mask (gpt_model.py,
    _postprocess, passes them no padding_mask)."""
    model, data = facts.model, facts.data
    if not (data.sft or data.dataset) or model.mtp_num_layers is None or model.num_moe_experts is None:
        return
    key = "data.sft" if data.sft else "data.dataset"
    yield Problem(
        path="model.mtp_num_layers",
        reason=f"is not supported with {key} and experts: Megatron-Core would balance the experts of these layers over "
        "tokens that are not learned",
        candidates=[None],
        about=(key, "model.num_moe_experts"),
    )


def chats_have_no_capacity(facts: Facts) -> Iterator[Problem]:
    """No moe_expert_capacity_factor with chats: padding would take the place of tokens that are learned."""
    named = (f"data.validation[{index}].sft" for index, each in enumerate(facts.data.validation) if each.sft)
    key = "data.sft" if facts.data.sft else next(named, None)
    if key is not None and facts.model.moe_expert_capacity_factor is not None:
        yield Problem(
            path="model.moe_expert_capacity_factor",
            reason=f"is not supported with {key} = true: padding and questions would fill the experts, which would "
            "then drop tokens of answers",
            candidates=[None],
            about=(key,),
        )


def validation_sets_of_chats_are_separate(facts: Facts) -> Iterator[Problem]:
    """A validation set of chats needs a model that separates documents (hpcgen's rule: its attention is built so)."""
    for index, each in enumerate(facts.data.validation):
        if each.sft and not facts.data.separates_documents:
            yield Problem(
                path=f"data.validation[{index}].sft",
                reason="requires data.sft or data.reset_attention_mask, since the attention of a model that is trained "
                "without them does not separate chats",
                hint="remove the set, and evaluate a checkpoint on it instead",
                about=("data.reset_attention_mask", "data.sft"),
            )


OF_SAMPLES: tuple[Rule, ...] = (
    chats_are_tokenized,
    chats_are_separate,
    packing_needs_chats,
    samples_hold_chats,
    validation_sets_of_chats_are_separate,
)
"""Rules for reading samples, which do not depend on the model."""

RULES: tuple[Rule, ...] = (*OF_SAMPLES, predicting_layers_see_masks, chats_have_no_capacity)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
