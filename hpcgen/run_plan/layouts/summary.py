"""Layouts as JSON data for scripts, and as sentences for people."""

from __future__ import annotations

from typing import Any

from hpcgen.planning.layouts.reasons import why
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.memory import OTHER_GIB
from hpcgen.run_plan.layouts.find import own_mistake
from hpcgen.run_plan.layouts.result import NodesLayouts, RunLayouts
from hpcgen.run_plan.prediction import Prediction
from hpcgen.run_plan.prediction_summary import PARTS, figures, num_measurable
from hpcgen.text import apart, counted, rough
from trainer.contract.model.flops import sample_flops

RISK = (
    "which fragments or NCCL may need. A recipe of NVIDIA for 70B at this edge ran out of memory in 30 to 60% of its "
    "starts"
)
"""Source: NVIDIA-NeMo/Megatron-Bridge, pull request 3107."""


def in_json(found: RunLayouts) -> dict[str, Any]:
    """All layouts. Names of keys include the units."""
    goal = found.goal
    return {
        "goal": goal and {"of": goal.of, "limit": goal.limit},
        "chosen": found.chosen and found.chosen.num_nodes,
        "nodes": [_of_nodes(each) for each in found.on],
    }


def _of_nodes(found: NodesLayouts) -> dict[str, Any]:
    return {
        "nodes": found.num_nodes,
        "gpus": found.num_gpus,
        "valid": found.search.num_valid,
        "fitting": found.search.num_fitting,
        "layouts": [row(found, layout) for layout in found.search.best],
        "own": found.search.own and row(found, found.search.own),
        "own_mistake": own_mistake(found) or None,
        "why": reason(found),
        "prediction": found.prediction and figures(found.prediction),
        "no_prediction": found.no_prediction or None,
    }


def row(found: NodesLayouts, layout: RankedLayout) -> dict[str, Any]:
    """A layout with its predictions."""
    facts, memory = layout.facts, layout.memory
    of_sample = sample_flops(facts.resolved_model, facts.training.freeze, facts.lora)
    flops = of_sample * facts.training.global_batch_size / layout.step.total
    tflops = flops / found.num_gpus / 1e12
    precision = "fp8" if facts.training.fp8 else facts.training.precision
    return {
        "name": layout.name,
        "changes": dict(layout.changes),
        "tokens_per_s": layout.tokens_per_s,
        "tokens_per_s_per_gpu": layout.tokens_per_s / found.num_gpus,
        "tflops_per_gpu": tflops,
        "mfu": tflops / found.run.node_type.peak_tflops[precision],
        "step_time_s": layout.step.total,
        "step_parts_s": {name: getattr(layout.step, name) for name in PARTS},
        "memory_gib": memory.total_gib,
        "cuda_gib": OTHER_GIB,
        "free_gib": layout.free_gib,
        "nccl_gib": layout.nccl_gib,
        "gpu_memory_gib": layout.device_gib,
        "free_share": layout.free_share,
        "is_risky": layout.is_risky,
    }


def reason(found: NodesLayouts) -> str | None:
    """Why the first layout is faster than the next one; None without two layouts."""
    best = found.search.best
    return why(best[0], best[1]) if len(best) > 1 else None


def gain(layout: RankedLayout, other: RankedLayout) -> str:
    """How much faster a layout is than another one: "12% faster than TP2 PP8 DP16 MBS1"."""
    ratio = layout.tokens_per_s / other.tokens_per_s
    if round(abs(ratio - 1), 3) == 0:
        return f"as fast as {other.name}"
    if ratio >= 2:
        return f"{ratio:.1f} times as fast as {other.name}"
    share = f"{ratio - 1:.0%}" if ratio > 1 else f"{1 - ratio:.0%}"
    return f"{share} {'faster' if ratio > 1 else 'slower'} than {other.name}"


def written_reason(found: NodesLayouts, layout: RankedLayout) -> str:
    """The comment for the run file: the predicted speed, compared with the layout of the run or the next one."""
    own, best = found.search.own, found.search.best
    others = [each for each in (own, *best) if each is not None and each.changes != layout.changes]
    rate = rough(layout.tokens_per_s / found.num_gpus, 3)
    compared = f", {gain(layout, others[0])}" if others else ""
    return f"hpcgen layouts: {rate} tokens/s per GPU predicted{compared}"


def guesses(prediction: Prediction) -> str:
    """The constants that were not measured, without their sources."""
    constants = "; ".join(guess.partition(" (")[0] for guess in prediction.guesses)
    unmeasured = "" if prediction.is_measured else f"all kernels of {prediction.gpu_model}; "
    number = num_measurable(prediction.guesses)
    measured = f"hpcgen tune measures {number} of them, and " if number else ""
    return f"{unmeasured}{constants}. {measured}--json has the sources"


def of_own(found: NodesLayouts) -> str:
    """How the run's own layout compares with the first one."""
    own, first = found.search.own, found.first
    assert first is not None
    if own is None:
        return f"the layout of the run file cannot be used on these nodes: {own_mistake(found)}"
    if not first.changes:
        return f"its own layout, {own.name}, is row 1"
    return f"row 1 is {gain(first, own)}, the layout of the run file"


def risk(found: NodesLayouts, layout: RankedLayout) -> str:
    """The risk of a layout that leaves little memory."""
    return f"{layout.name} leaves {layout.free_gib:.1f} GiB ({layout.free_share:.1%}) of a GPU free, {RISK}"


def of_goal(found: RunLayouts) -> tuple[str, str]:
    """A heading and which number of nodes meets the goal, or how close the best one comes."""
    assert found.goal is not None
    is_time = found.goal.of == "time"
    heading, limit = "deadline" if is_time else "budget", amount(found, found.goal.limit)
    shown = found.chosen or found.closest
    assert shown.prediction is not None
    likely = amount(found, found.goal.value(shown.prediction))
    nodes = counted(shown.num_nodes, "node")
    if found.chosen is None:
        aim = f"finishes in {limit}" if is_time else f"stays within {limit}"
        comes = "comes" if shown.num_nodes == 1 else "come"
        return heading, f"no number of nodes that was tried {aim}; {nodes} {comes} closest, with {likely}"
    highest = found.goal.value(shown.prediction, shown.prediction.high)
    missed = "too late" if is_time else "too much"
    verdict = "which is still enough" if highest <= found.goal.limit else f"which is {missed}"
    aim = f"in {limit}" if is_time else f"within {limit}"
    if len(found.on) > 1:
        meets = f", the {'fewest of those tried that finish' if is_time else 'fastest of those tried'} {aim}"
    else:
        one, many = ("finishes", "finish") if is_time else ("stays", "stay")
        meets = f" {one if shown.num_nodes == 1 else many} {aim}"
    return (
        heading,
        f"{nodes}{meets}: {likely} are likely, and at worst {amount(found, highest)}, {verdict}",
    )


def of_slower(found: RunLayouts) -> list[str]:
    """The numbers of nodes on which a run takes longer than on fewer, which costs more GPU-hours."""
    told: list[str] = []
    fastest: NodesLayouts | None = None
    for each in found.on:
        if each.first is None:
            continue
        if fastest is None or fastest.first is None or each.first.tokens_per_s > fastest.first.tokens_per_s:
            fastest = each
        else:
            told.append(
                f"{each.num_nodes} nodes are no faster than {fastest.num_nodes}, and use more GPU-hours"
            )
    return told


def amount(found: RunLayouts, value: float) -> str:
    """A time, a price or a number of GPU-hours of the goal's kind."""
    assert found.goal is not None
    limit = found.goal.limit
    if found.goal.of == "time":
        unit, seconds = ("day", 86400) if value >= 2 * 86400 else ("hour", 3600)
        number = apart(value / seconds, limit / seconds)
        return f"{number} {unit}" if number == "1" else f"{number} {unit}s"
    unit = found.run.cluster.currency if found.goal.of == "cost" else "GPU-hours"
    return f"{apart(value, limit)} {unit}"
