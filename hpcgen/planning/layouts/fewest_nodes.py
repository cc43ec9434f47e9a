"""The fewest nodes that hold a model, and the fastest layout on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import search
from hpcgen.planning.layouts.space import KEYS
from hpcgen.planning.memory import GIB
from hpcgen.planning.step_time import Machine
from trainer.contract.model.model_size import parameter_count
from trainer.contract.optimizers import optimizer_of
from trainer.contract.rules.facts import Facts

WEIGHT_AND_GRADIENT_BYTES = 4
"""Lower bound per parameter, next to the optimizer's fp32 weight."""


def layout_on_fewest_nodes(
    facts_on: Callable[[int], Facts], machine: Machine, numbers: Iterable[int]
) -> RankedLayout | None:
    """The fastest layout that leaves enough memory, on the first of several ascending `numbers` of nodes that has one.

    A layout that recomputes other activations than the run does is taken only if twice as many nodes do not avoid it.

    Raises:
        NoPrediction: see `search`.
    """
    recomputing: RankedLayout | None = None
    for number in numbers:
        if recomputing is not None and number > 2 * recomputing.facts.world.count:
            break
        facts = facts_on(number)
        best = search(facts, machine).best if _may_fit(facts) else ()
        layout = next((layout for layout in best if not layout.is_risky), None)
        if layout is not None and layout.changes.keys().isdisjoint(KEYS["recompute"]):
            return layout
        recomputing = recomputing or layout
    return recomputing


def _may_fit(facts: Facts) -> bool:
    """False if weights, gradients and optimizer state are larger than the memory of all devices."""
    assert facts.device_memory_gib is not None  # otherwise `search` has raised
    per_parameter = WEIGHT_AND_GRADIENT_BYTES + optimizer_of(facts.optimizer).state_bytes("layer")
    return (
        parameter_count(facts.resolved_model) * per_parameter
        <= facts.world.size * facts.device_memory_gib * GIB
    )
