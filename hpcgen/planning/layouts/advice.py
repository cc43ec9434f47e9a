"""Warnings about slow layouts that name a faster one and its predicted gain.

Only runs with such a warning import this module, since others need no prediction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from hpcgen.config.loader import Run
from hpcgen.planning import resources
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import search
from hpcgen.planning.predicted_step import NoPrediction, machine_of_run
from hpcgen.planning.step_time import Machine
from trainer.contract.problem import Problem
from trainer.contract.record import record
from trainer.contract.rules import context_parallel, experts
from trainer.contract.rules.facts import Facts, Rule
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
    found = [
        told for warning in warnings for told in _told(facts, machine, warning, rules.get(_identity(warning)))
    ]
    peak_tflops = machine.peak_flops[facts.training.precision_of_layers] / 1e12
    if resources.microbatch_may_be_small(facts, peak_tflops):
        found += _small_microbatch(facts, machine)
    if resources.tensor_parallelism_may_dominate(facts, peak_tflops, nvlink_gb_s):
        found += _much_tensor_parallelism(facts, machine)
    return found


def _identity(problem: Problem) -> tuple[str, str]:
    return problem.path, problem.reason


def _told(facts: Facts, machine: Machine, warning: Problem, rule: Rule | None) -> Iterator[Problem]:
    """Yields the warning, with a faster layout if there is one.

    Recomputation that costs little is not told, and neither is context parallelism over the network that is faster than
    what it replaces: attention hides much of its exchange.
    """
    is_recomputation = rule is resources.recomputation_is_needed
    faster = _faster(facts, machine, AXES[rule], MUCH if is_recomputation else WORTH_NAMING) if rule else None
    if faster is not None:
        yield dataclasses.replace(warning, hint=f"{warning.hint}. {faster}" if warning.hint else str(faster))
    elif not (is_recomputation or (rule is not None and warning.path == CP)):
        yield warning


def _small_microbatch(facts: Facts, machine: Machine) -> Iterator[Problem]:
    """Yields a warning if the run with larger microbatches fits and is much faster."""
    faster = _faster(facts, machine, ("MBS",), MUCH)
    if faster is not None and faster.micro_batch_size > facts.training.micro_batch_size:
        yield Problem(
            path=resources.MICRO_BATCH,
            reason="is too small to fill the GPUs",
            hint=f"use {faster.micro_batch_size}. {faster}",
        )


def _much_tensor_parallelism(facts: Facts, machine: Machine) -> Iterator[Problem]:
    """Yields a warning if the run with less tensor parallelism fits and is much faster."""
    faster = _faster(facts, machine, ("TP", "PP", "VPP", "MBS"), MUCH)
    if faster is not None and faster.tensor_parallel_size < facts.parallelism.tensor_model_parallel_size:
        share = faster.own.step.tensor_parallel / faster.own.step.total
        yield Problem(
            path=TP,
            reason=f"is more than needed: tensor-parallel transfers are predicted to take {share:.0%} of a step",
            hint=str(faster),
        )


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
