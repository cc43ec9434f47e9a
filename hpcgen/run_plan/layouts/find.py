"""The search on each number of nodes, and the numbers that are tried."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from hpcgen.config.cluster import price_per_gpu_hour, within_limit
from hpcgen.config.loader import Run, with_values
from hpcgen.config.starter import TIME
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.planning.layouts.nodes import powers, quarters
from hpcgen.planning.layouts.result import Search
from hpcgen.planning.layouts.search import search
from hpcgen.planning.paths import absolute_paths, trainer_data
from hpcgen.planning.predicted_step import NoPrediction, machine_of_run
from hpcgen.planning.request import make_allocation
from hpcgen.planning.step_time.machine import Machine
from hpcgen.run_plan.layouts.batch import unsuitable_batch
from hpcgen.run_plan.layouts.result import (
    NODES,
    ORIGIN,
    TIME_LIMIT,
    Goal,
    Kind,
    NodesLayouts,
    RunLayouts,
    with_layout,
)
from hpcgen.run_plan.layouts.sizes import most_nodes_of, possible_runs, require_possible, sized
from hpcgen.run_plan.plan import Plan, located_in, plan
from hpcgen.run_plan.prediction import Prediction, predict
from hpcgen.run_plan.training import training_facts
from hpcgen.stages.train import TRAIN
from hpcgen.text import counted

OnSearch = Callable[[int], object]
"""Is called with the number of nodes before each search."""


def find_layouts(
    run: Run,
    nodes: Sequence[int] = (),
    top: int = 10,
    finish_in_s: float | None = None,
    budget: float | None = None,
    gpu_hours: float | None = None,
    on_search: OnSearch = lambda num_nodes: None,
) -> RunLayouts:
    """Finds the layouts with which a run trains fastest, on each of several numbers of nodes.

    `nodes` are the numbers to try. Default: the run's own number. With a goal, the default is 1, 2, 3, 4, 6, 8, 12, 16
    and so on, up to the limit of the partition and as far as is needed, and numbers between before the first that meets
    a deadline.
    At most one goal is given: `finish_in_s` is a deadline in seconds, `budget` an amount in the profile's currency, and
    `gpu_hours` a number of GPU-hours. `on_search` is called with the number of nodes before each search.

    Raises:
        NoPrediction: the time of the run's steps is unknown, or the run is finished.
        ConfigErrors: the run has mistakes that no layout corrects.
        HpcgenError: no layout fits into memory.
    """
    require_training(run)
    run = _with_assumptions(run)
    goal = _goal(run, finish_in_s, budget, gpu_hours)
    if goal is None or nodes:
        runs = [sized(run, count) for count in sorted(set(nodes))] or [run]
        require_possible(runs)
        found = [_layouts(each, top, on_search) for each in runs]
    else:
        tried = sorted(_tried(run, goal, top, on_search), key=lambda each: each.num_nodes)
        found = [each for each in tried if each.search.best] or tried
    if not any(each.search.best for each in found):
        raise _no_layout(found, on_search)
    if not any(each.prediction for each in found):
        raise NoPrediction(next(each.no_prediction for each in found if each.no_prediction))
    return RunLayouts(run=run, on=tuple(found), goal=goal, chosen=_chosen(found, goal))


def find_curve(found: RunLayouts, on_search: OnSearch = lambda num_nodes: None) -> tuple[NodesLayouts, ...]:
    """The layouts in `found`, and the fastest one on each power of two of fewer and of more nodes that Slurm accepts.

    The curve ends with a number of nodes on which no layout fits or is valid, if there is one.
    """
    sizes, first, last = powers(most_nodes_of(found.run)), found.on[0], found.on[-1]
    fewer = _neighbors(first, [size for size in reversed(sizes) if size < first.num_nodes], on_search)
    more = _neighbors(last, [size for size in sizes if size > last.num_nodes], on_search)
    return (*reversed([*fewer]), *found.on, *more)


def _neighbors(known: NodesLayouts, sizes: Iterable[int], on_search: OnSearch) -> Iterator[NodesLayouts]:
    """Yields the fastest layout on each number of nodes, up to the first number without any."""
    for size in sizes:
        if known.first is None:
            return
        known = _layouts(sized(known.run, size), 1, on_search)
        yield known


def _chosen(found: Sequence[NodesLayouts], goal: Goal | None) -> NodesLayouts | None:
    """See `RunLayouts.chosen`."""
    if goal is None:
        return found[0] if len(found) == 1 else None
    meeting = [(each, each.prediction) for each in found if each.prediction and goal.is_met(each.prediction)]
    if goal.of != "time":
        meeting.sort(key=lambda each: each[1].likely.total_s)
    return meeting[0][0] if meeting else None


def require_training(run: Run) -> None:
    """Checks that the run file describes a training run of hpcgen's trainer.

    Raises:
        HpcgenError: it does not.
    """
    if run.document.get("program") is not None:
        raise NoPrediction(
            "layouts are those of hpcgen's own trainer, but the run file has the section program"
        )
    if run.omitted:
        plan(run, [TRAIN.name])  # names the missing keys


def _with_assumptions(run: Run) -> Run:
    """The run with mock data and a time limit, unless it has others. Layouts are chosen before data and jobs."""
    values: dict[str, object] = {}
    data = trainer_data(run.config)
    if not any((data.datasets, data.train, data.valid, data.test, data.dataset, data.mock)):
        values["data.mock"] = True
    settings = make_allocation(TRAIN, run.config, run.cluster, run.node_type).settings
    if settings.time is None:
        values[TIME_LIMIT] = within_limit(TIME, settings, run.cluster)
    return with_values(run, values, ORIGIN) if values else run


def _goal(run: Run, finish_in_s: float | None, budget: float | None, gpu_hours: float | None) -> Goal | None:
    """The goal with this limit.

    Raises:
        HpcgenError: several limits are given, or a budget without a price.
    """
    limits: dict[Kind, float | None] = {"time": finish_in_s, "cost": budget, "gpu_hours": gpu_hours}
    goals = [Goal(of, limit) for of, limit in limits.items() if limit is not None]
    if len(goals) > 1:
        raise HpcgenError(
            "a deadline and a budget exclude each other", "give one, and read the other in the table"
        )
    settings = make_allocation(TRAIN, run.config, run.cluster, run.node_type).settings
    if budget is not None and price_per_gpu_hour(settings, run.cluster) is None:
        raise HpcgenError(
            f"a budget of {budget:g} {run.cluster.currency} needs a price, but cluster profile {run.cluster_name} sets "
            "no price_per_gpu_hour",
            "set it in the profile, or give the budget in GPU-hours",
        )
    return goals[0] if goals else None


def _layouts(run: Run, top: int, on_search: OnSearch) -> NodesLayouts:
    """The fastest layouts of a run on its nodes, and the prediction with the first.

    Raises:
        HpcgenError: see `find_layouts`.
    """
    on_search(make_allocation(TRAIN, run.config, run.cluster, run.node_type).nodes)
    machine, found = search_for(run, top)
    prediction, reason = _prediction(run, found)
    return NodesLayouts(run=run, machine=machine, search=found, prediction=prediction, no_prediction=reason)


def search_for(run: Run, top: int) -> tuple[Machine, Search]:
    """The machine of a run, and the search for its `top` fastest layouts.

    Raises:
        HpcgenError: see `find_layouts`.
    """
    config = absolute_paths(run.config, run.directory)
    allocation = make_allocation(TRAIN, config, run.cluster, run.node_type)
    facts, unknown = training_facts(run, config, allocation)
    if unknown:
        raise ConfigErrors([located_in(run, problem) for problem in unknown])
    machine = machine_of_run(run, config.training, allocation)
    return machine, search(facts, machine, top=top)


def _prediction(run: Run, found: Search) -> tuple[Prediction | None, str]:
    """The prediction with the first layout, or why there is none."""
    if not found.best:
        return None, ""
    try:
        prediction = predict(_planned(with_layout(run, found.best[0])))
    except NoPrediction as reason:
        return None, str(reason)
    if run.document.origin(TIME_LIMIT) == ORIGIN:
        guess = f"jobs of {run.document.get(TIME_LIMIT)}, since the run file sets no time limit"
        prediction = dataclasses.replace(prediction, guesses=(*prediction.guesses, guess))
    return prediction, ""


def _planned(run: Run) -> Plan:
    """The plan of training. Its data may be missing, since layouts are chosen long before data is prepared."""
    return plan(run, [TRAIN.name], exists=lambda path: True)


def own_mistake(found: NodesLayouts) -> str:
    """Why the layout of the run file cannot be used on these nodes; empty if it can."""
    if found.search.own is not None:
        return ""
    try:
        _planned(found.run)
    except ConfigErrors as error:
        return error.mistakes[0].sentence
    return "it does not fit into memory"  # a warning with memory_check: warning


def _tried(run: Run, goal: Goal, top: int, on_search: OnSearch) -> Iterator[NodesLayouts]:
    """Yields the layouts on more and more nodes, until the goal is met or more nodes cannot meet it.

    Leaves out numbers of nodes that would miss a deadline even at the peak of their GPUs.
    """
    values: list[float] = []
    known: Prediction | None = None
    runs = possible_runs(run)
    for before, each in zip([runs[0], *runs], runs, strict=False):
        if goal.of == "time" and known is not None and _shortest_s(known, each) > goal.limit:
            continue
        found = _layouts(each, top, on_search)
        yield found
        if not found.search.best:
            continue
        known = found.prediction or known
        values.append(goal.value(found.prediction) if found.prediction else math.inf)
        if goal.of == "time" and values[-1] <= goal.limit:
            yield from _between(before, found, goal, top, on_search)
            return
        newest = values[-2:]
        if goal.of != "time" and min(newest) > goal.limit and min(newest) > min(values):
            return  # the price rises with the number of nodes


def _between(
    before: Run, enough: NodesLayouts, goal: Goal, top: int, on_search: OnSearch
) -> Iterator[NodesLayouts]:
    """Yields the layouts on the fewest nodes that meet a deadline as well, of those between two numbers of nodes."""
    assert enough.prediction is not None
    fewer = make_allocation(TRAIN, before.config, before.cluster, before.node_type).nodes
    for count in quarters(fewer, enough.num_nodes):
        run = sized(enough.run, count)
        if _shortest_s(enough.prediction, run) <= goal.limit:
            found = _layouts(run, top, on_search)
            if found.prediction is not None and goal.is_met(found.prediction):
                yield found
                return


def _shortest_s(known: Prediction, run: Run) -> float:
    """Time of the remaining steps at the peak of the GPUs of `run`, from the prediction on other nodes."""
    peak = known.trainer.peak_tflops
    assert peak is not None  # without it, there is no prediction
    num_gpus = make_allocation(TRAIN, run.config, run.cluster, run.node_type).num_tasks
    share = known.tflops_per_gpu / peak * known.trainer.world_size / num_gpus
    return known.remaining_tokens / known.tokens_per_s * share


def _no_layout(found: Sequence[NodesLayouts], on_search: OnSearch) -> HpcgenError:
    """The error if no layout is valid and fits on any number of nodes that was tried."""
    valid = [each for each in found if each.search.num_valid]
    if valid:
        return _nothing_fits(valid[-1], on_search)
    unsuitable = unsuitable_batch(found[-1], lambda run: bool(search_for(run, 1)[1].num_valid))
    if unsuitable is not None:
        return unsuitable
    try:
        _planned(found[-1].run)
    except ConfigErrors as error:
        return error  # the broken rules, with values that correct them
    return HpcgenError("no layout obeys the rules on any of these nodes", where=found[-1].run.file or "")


def _nothing_fits(found: NodesLayouts, on_search: OnSearch) -> HpcgenError:
    """The error if no layout fits on the largest number of nodes that was tried. It names nodes on which one does."""
    memory_gib = found.run.node_type.gpu_memory_gib
    reason = f"is too few: no layout fits into {memory_gib:g} GiB of GPU memory"
    larger = (_layouts(run, 1, on_search) for run in possible_runs(found.run, found.num_nodes + 1))
    enough = next((each for each in larger if each.first), None)
    most = counted(most_nodes_of(found.run), "node")
    hint = f"use a smaller model, or GPUs with more memory; tried up to {most}"
    if enough is not None and enough.first is not None:
        hint = f"use --nodes {enough.num_nodes}, on which {enough.first.name} fits"
    return HpcgenError(located_in(found.run, Problem(NODES, reason, hint)))
