"""Warnings about slow layouts that name a faster one and its predicted gain.

Only runs with such a warning import this module, since others need no prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hpcgen.config.loader import Run
from hpcgen.planning import resources
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import search
from hpcgen.planning.predicted_step import NoPrediction, machine_of_run
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, estimate_step_time
from trainer.contract.model.adapters import outside_of_experts
from trainer.contract.problem import Problem
from trainer.contract.record import record, replaced
from trainer.contract.rules import context_parallel, experts
from trainer.contract.rules.experts import GROUPED_GEMM
from trainer.contract.rules.facts import Facts, Rule
from trainer.contract.rules.lora import RANK, TARGETS
from trainer.contract.rules.parallelism import CP, TP

WORTH_NAMING = 0.05
"""Smallest predicted gain of a layout that a warning names: the median error of predictions (docs/planning.md)."""
MUCH = 0.1
"""Smallest predicted gain that is the reason of a warning: twice the median error."""
AXES: Mapping[Rule, Sequence[str]] = {
    resources.pipeline_is_mostly_busy: ("TP", "PP", "VPP"),
    context_parallel.tensor_and_context_parallel_stay_in_node: ("TP", "CP"),
    experts.experts_stay_in_node: ("EP", "ETP"),
    resources.recomputation_is_needed: ("recompute",),
}
"""The axes that a faster layout may change, by the rule that finds the run slow. A search over all axes would take too
long for a warning of `render`."""


def with_faster_layouts(
    run: Run, facts: Facts, allocation: Allocation, warnings: list[Problem], nvlink_gb_s: float | None
) -> list[Problem]:
    """The warnings of a run, of which those about its speed name a faster layout, and warnings about microbatches that
    are too small and tensor parallelism that is too large. Unchanged if the time of a step cannot be predicted.
    """
    try:
        machine = machine_of_run(run, facts.training, allocation)
        return _advised(facts, machine, warnings, nvlink_gb_s)
    except NoPrediction:
        return warnings


def _advised(
    facts: Facts, machine: Machine, warnings: Sequence[Problem], nvlink_gb_s: float | None
) -> list[Problem]:
    """See `with_faster_layouts`.

    Raises:
        NoPrediction: see `search`.
    """
    rules = {_identity(violation): rule for rule in AXES for violation in rule(facts)}
    advice = [_of_warning(facts, machine, each, rules.get(_identity(each))) for each in warnings]
    peak_tflops = machine.peak_flops[facts.training.precision_of_layers] / 1e12
    if resources.microbatch_may_be_small(facts, peak_tflops):
        advice.append(_small_microbatch(facts, machine))
    if resources.adapts_experts(facts):
        advice.append(_adapters_of_experts(facts, machine))
    if resources.tensor_parallelism_may_dominate(facts, peak_tflops, nvlink_gb_s):
        advice.append(_much_tensor_parallelism(facts, machine))
    agreed = _agreed(facts, machine, advice)
    return [told for each in agreed if (told := each.tell(each.faster)) is not None]


def _agreed(facts: Facts, machine: Machine, advice: Sequence[_Advice]) -> Sequence[_Advice]:
    """The advice, in which all warnings of a run name the same layout: one that may change the axes of all of them."""
    naming = [each for each in advice if each.faster is not None and each.tell(each.faster) is not None]
    if len({str(each.faster) for each in naming}) < 2:
        return advice
    axes = tuple(dict.fromkeys(axis for each in naming for axis in each.axes))
    common = _faster(facts, machine, axes, WORTH_NAMING)
    if common is None:
        return advice
    told = [each for each in naming if each.tell(common) is not None]
    if not told:  # a remedy for none of them in particular, but the run still needs a warning
        told = [max(naming, key=_gain)]
        common = told[0].faster
    left = [each for each in advice if each in told or each not in naming]
    return [replaced(each, faster=common) if each in told else each for each in left]


def _gain(advice: _Advice) -> float:
    return advice.faster.gain if advice.faster is not None else 0.0


def _identity(problem: Problem) -> tuple[str, str]:
    return problem.path, problem.reason


def _of_warning(facts: Facts, machine: Machine, warning: Problem, rule: Rule | None) -> _Advice:
    """The advice of a warning, which names a faster layout if there is one.

    Recomputation that costs little is not told, and neither is context parallelism over the network that is faster than
    what it replaces: attention hides much of its exchange.
    """
    is_recomputation = rule is resources.recomputation_is_needed
    needs_faster = is_recomputation or (rule is not None and warning.path == CP)

    def tell(faster: _Faster | None) -> Problem | None:
        if faster is None:
            return None if needs_faster else warning
        if is_recomputation and faster.layout.facts.training.recompute_granularity is not None:
            return None  # the warning advises against any
        hint = f"{warning.hint}. {faster}" if warning.hint else str(faster)
        return dataclasses.replace(warning, hint=hint)

    if rule is None:
        return _Advice(None, (), tell)
    axes = AXES[rule]
    return _Advice(_faster(facts, machine, axes, MUCH if is_recomputation else WORTH_NAMING), axes, tell)


def _small_microbatch(facts: Facts, machine: Machine) -> _Advice:
    """A warning, if the run with larger microbatches fits and is much faster."""

    def tell(faster: _Faster | None) -> Problem | None:
        if faster is None or faster.micro_batch_size <= facts.training.micro_batch_size:
            return None
        hint = f"use {faster.micro_batch_size}. {faster}"
        return Problem(path=resources.MICRO_BATCH, reason="is too small to fill the GPUs", hint=hint)

    return _Advice(_faster(facts, machine, ("MBS",), MUCH), ("MBS",), tell)


def _much_tensor_parallelism(facts: Facts, machine: Machine) -> _Advice:
    """A warning, if the run with less tensor parallelism fits and is much faster."""

    def tell(faster: _Faster | None) -> Problem | None:
        own = facts.parallelism.tensor_model_parallel_size
        if faster is None or faster.tensor_parallel_size >= own:
            return None
        share = faster.own.step.tensor_parallel / faster.own.step.total
        reason = f"is more than needed: tensor-parallel transfers are predicted to take {share:.0%} of a step"
        return Problem(path=TP, reason=reason, hint=str(faster))

    axes = ("TP", "PP", "VPP", "MBS")
    return _Advice(_faster(facts, machine, axes, MUCH), axes, tell)


def _adapters_of_experts(facts: Facts, machine: Machine) -> _Advice:
    """A warning, if training all weights is much faster. It names the linear layers outside of experts."""

    def milliseconds(run: Facts) -> float:
        assert run.layout is not None  # the rules have accepted it
        return 1e3 * estimate_step_time(Setup.of_facts(run, run.layout), machine).total

    grouped = facts.with_value(GROUPED_GEMM, None)
    names = outside_of_experts(facts.resolved_model)
    own, of_all = milliseconds(facts), milliseconds(grouped.with_value(RANK, None))
    remedy = milliseconds(grouped.with_value(TARGETS, names))
    reason = (
        f"includes experts: a step is predicted to take {own:,.0f} ms, and {of_all:,.0f} ms if all weights were "
        "trained, because the host launches the kernels of each expert one after another"
    )
    chosen = ", ".join(f'"{name}"' if "*" in name else name for name in names)
    hint = (
        f"leave out the experts: with [{chosen}] and without {GROUPED_GEMM}, {remedy:,.0f} ms are predicted"
    )
    problem = Problem(TARGETS, reason, hint if remedy < own else "", about=(RANK, GROUPED_GEMM))
    return _Advice(None, (), lambda _: problem if own > (1 + MUCH) * of_all else None)


@record
class _Advice:
    """A warning about speed, and the layout that it names."""

    faster: _Faster | None
    axes: Sequence[str]
    """The axes that the layout may change."""
    tell: Callable[[_Faster | None], Problem | None]
    """Writes the warning for a layout; None if that is no remedy for it."""


@record
class _Faster:
    """A layout that is faster than that of the run."""

    layout: RankedLayout
    own: RankedLayout
    """The layout of the run."""

    @property
    def gain(self) -> float:
        """Share by which its predicted throughput is higher."""
        return self.own.step.total / self.layout.step.total - 1

    @property
    def tensor_parallel_size(self) -> int:
        return self.layout.layout.tensor_model_parallel_size

    @property
    def micro_batch_size(self) -> int:
        return self.layout.facts.training.micro_batch_size

    def __str__(self) -> str:
        much = f"{self.gain:.0%} faster" if self.gain < 1 else f"{1 + self.gain:.1f} times as fast"
        return f"{self.layout.name} is predicted {much}. hpcgen layouts lists the fastest"


def _faster(facts: Facts, machine: Machine, vary: Sequence[str], least_gain: float) -> _Faster | None:
    """The fastest layout that leaves enough memory. None if it gains too little, or if the run itself does not fit."""
    found = search(facts, machine, vary=vary)
    best = next((layout for layout in found.best if not layout.is_risky), None)
    if best is None or found.own is None:
        return None
    faster = _Faster(best, found.own)
    return faster if faster.gain >= least_gain else None
