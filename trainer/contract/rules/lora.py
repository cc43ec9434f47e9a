"""Rules for LoRA adapters."""

from __future__ import annotations

from collections.abc import Iterator

from trainer.contract.model.adapters import (
    LINEARS,
    PEFT_NAMES,
    Linear,
    advice_for_peft,
    linears,
    matches,
    targets,
)
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.problem import Problem
from trainer.contract.rules.experts import ETP, GROUPED_GEMM
from trainer.contract.rules.facts import Facts, Rule, unread
from trainer.contract.wording import few

RANK = "lora.rank"
TARGETS = "lora.target_modules"


def keys_of_adapters_need_rank(facts: Facts) -> Iterator[Problem]:
    """The other keys need rank (hpcgen's rule: unused keys are errors)."""
    if facts.lora.rank is None:
        keys = ["lora.alpha", "lora.dropout", TARGETS]
        yield from unread(
            facts, keys, f"has no effect, because {RANK} is null", "set lora.rank", about=(RANK,)
        )


def adapters_need_model(facts: Facts) -> Iterator[Problem]:
    """checkpoint.load names the base model (hpcgen's rule: adapters of random weights are useless)."""
    if facts.lora.rank is not None and facts.checkpoint.load is None:
        reason = f"is null, but {RANK} is set, and the adapters need the weights of a trained model"
        hint = "name the checkpoint of a model, such as one that hpcgen checkpoint import has written"
        yield Problem("checkpoint.load", reason, hint, about=(RANK,))


def adapters_need_layers_of_core(facts: Facts) -> Iterator[Problem]:
    """No layers or models of users, and no MTP (trainer/lora/adapter.py: the parts follow from the section `model`)."""
    if facts.lora.rank is None:
        return
    for key in ("layer_spec", "model_provider"):
        if getattr(facts.model, key) is not None:
            reason = f"is not supported with {RANK}, which knows only the linear layers of the trainer's own models"
            yield Problem(f"model.{key}", reason, "remove one of them", about=(RANK,))
    if facts.model.mtp_num_layers is not None:
        reason = f"is not supported with {RANK}: the layers that predict further tokens would not follow the adapters"
        hint = "use null. The checkpoint may have such layers, which are then left out"
        yield Problem("model.mtp_num_layers", reason, hint, about=(RANK,))


def adapters_freeze_the_rest(facts: Facts) -> Iterator[Problem]:
    """No training.freeze (hpcgen's rule: it would have no effect, or freeze adapters)."""
    if facts.lora.rank is not None and facts.training.freeze:
        reason = f"is not used with {RANK}, which freezes all weights of the model"
        hint = "remove it, and choose the layers that have adapters in lora.target_modules"
        yield Problem("training.freeze", reason, hint, about=(RANK, TARGETS))


def targets_are_linear_layers(facts: Facts) -> Iterator[Problem]:
    """Each entry of target_modules chooses a linear layer (hpcgen's rule)."""
    if facts.lora.rank is None:
        return
    names = [linear.name for linear in linears(facts.resolved_model)]
    kinds = dict.fromkeys(name.rpartition(".")[2] for name in names)
    layer = ", ".join(name for name in names if ".layers.0." in name)
    named = facts.lora.target_modules or ()
    advice = advice_for_peft(named, kinds)
    if advice:
        foreign = [name for name in named if name in PEFT_NAMES]
        yield Problem(
            TARGETS, f"has PEFT's names of modules in Hugging Face's models: {few(foreign)}", advice
        )
    for index, pattern in enumerate(named):
        if not (advice and pattern in PEFT_NAMES) and not any(matches(pattern, name) for name in names):
            known = f"{', '.join(kinds)}, or a pattern for names such as {layer}"
            reason = "matches no linear layer that can have an adapter"
            if pattern in LINEARS:
                reason = "is not a linear layer of this model"
            yield Problem(f"{TARGETS}[{index}]", reason, f"use {known}")
    if facts.lora.target_modules == ():
        yield Problem(
            TARGETS, "is empty, so nothing would be trained", "name linear layers, or use null for all"
        )


def rank_is_low(facts: Facts) -> Iterator[Problem]:
    """rank < both sides of each part (hpcgen's rule: otherwise the adapter is larger than the weight)."""
    if facts.lora.rank is None:
        return
    sides = [
        (min(part.inputs, part.outputs), part.name, linear.name)
        for linear in _targets(facts)
        for part in linear.parts
    ]
    smallest, part, name = min(sides, default=(facts.lora.rank + 1, "", ""))
    if facts.lora.rank >= smallest:
        reason = f"is not below {smallest}, the smaller side of the weight of {part} in {name}"
        yield Problem(RANK, f"{reason}, so its adapter is no smaller than the weight", "use a lower rank")


def adapters_need_plain_kernels(facts: Facts) -> Iterator[Problem]:
    """No FP8, CUDA graphs or overlap in Transformer Engine (hpcgen's rule: losses have not been compared)."""
    if facts.lora.rank is None:
        return
    reason = f"is not tested with {RANK}"
    if facts.training.fp8 is not None:
        yield Problem("training.fp8", reason, candidates=[None], about=(RANK,))
    if facts.training.cuda_graph_impl != "none":
        yield Problem("training.cuda_graph_impl", reason, candidates=["none"], about=(RANK,))
    if facts.parallelism.tp_comm_overlap:
        reason = f"does not return the normalized input, which {RANK} needs"
        yield Problem("parallelism.tp_comm_overlap", reason, candidates=[False], about=(RANK,))


def adapters_of_experts_are_complete(facts: Facts) -> Iterator[Problem]:
    """Adapters of experts need ETP = 1 and separate experts (trainer/lora/adapter.py)."""
    if facts.lora.rank is None or not any(linear.num_experts for linear in _targets(facts)):
        return
    layout, without = facts.parallelism, "choose linear layers without experts in lora.target_modules"
    etp = expert_tensor_parallel_size(layout)
    if etp > 1:
        reason = f"divides each expert over {etp} ranks, but the adapters of experts are not divided"
        yield Problem(ETP, reason, without, candidates=[1], about=(RANK, TARGETS))
    chosen = not facts.model.add_bias_linear if layout.moe_grouped_gemm is None else layout.moe_grouped_gemm
    if chosen and not facts.engine_problem:
        reason = "computes all experts in one product, but each expert has adapters of its own"
        yield Problem(GROUPED_GEMM, reason, without, candidates=[False], about=(RANK, TARGETS))


def _targets(facts: Facts) -> list[Linear]:
    return targets(facts.lora, facts.resolved_model)


RULES: tuple[Rule, ...] = (
    keys_of_adapters_need_rank,
    adapters_need_model,
    adapters_need_layers_of_core,
    adapters_freeze_the_rest,
    targets_are_linear_layers,
    rank_is_low,
    adapters_need_plain_kernels,
    adapters_of_experts_are_complete,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
