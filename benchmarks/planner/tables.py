"""The tables of `python -m benchmarks.planner`, as rows of text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from benchmarks.planner.accuracy import Accuracy, by_group, compare
from benchmarks.planner.expected import expected
from benchmarks.planner.memory import stages
from benchmarks.planner.orderings import orderings
from benchmarks.planner.own import GPU, own_steps, planned_case
from benchmarks.planner.predictions import FROZEN_COMMIT, Prediction, frozen, predict, predict_planned
from benchmarks.planner.published import configurations, steps
from benchmarks.planner_cases import CASES
from hpcgen.planning.memory import estimate_memory

Row = dict[str, str]
"""A row by the titles of its columns."""


@functools.cache
def predictions() -> tuple[Prediction, ...]:
    """The predictions for all published configurations that were measured, and for our own cases."""
    own = (predict_planned(case.name, planned_case(case.name, GPU)) for case in CASES)
    return (*(predict(configurations()[name]) for name in steps()), *own)


def accuracy() -> list[Row]:
    """Errors by group: of the frozen predictions, and of today's."""
    now = by_group(compare({each.configuration: each.step_s for each in predictions()}))
    before = by_group(compare(frozen()))
    return [
        {
            "group": title,
            "configurations (rows)": f"{of_now.num_configurations} ({of_now.num_rows})",
            **{f"{FROZEN_COMMIT}: {name}": value for name, value in _errors(before.get(title)).items()},
            **{f"now: {name}": value for name, value in _errors(of_now).items()},
        }
        for title, of_now in now.items()
    ]


def configuration_table() -> list[Row]:
    """Every configuration: measured and predicted steps, and the parts of the prediction."""
    predicted = {each.configuration: each for each in predictions()}
    before = frozen()
    rows = []
    for each in compare({name: one.step_s for name, one in predicted.items()}):
        prediction = predicted[each.configuration]
        rows.append(
            {
                "configuration": each.configuration,
                "rows": ", ".join(step.row for step in each.measured),
                "measured s": f"{each.measured_s:.2f}",
                "releases differ": percent(each.software_band) if len(each.measured) > 1 else "",
                "frozen s": _seconds(before.get(each.configuration)),
                "now s": f"{each.predicted_s:.2f}",
                "error": signed(each.error),
                "compute": percent(prediction.parts["compute"] / prediction.step_s),
                "host": percent(prediction.parts["host"] / prediction.step_s),
                "transfers": percent(prediction.transfers_s / prediction.step_s),
                "pipeline": percent(prediction.pipeline_s / prediction.step_s),
                "optimizer": percent(prediction.parts["optimizer"] / prediction.step_s),
            }
        )
    return rows


def own_table() -> list[Row]:
    """Our own measured runs: time, and memory of the fullest GPU."""
    before = frozen()
    rows = []
    for each in own_steps():
        planned = planned_case(each.case, each.gpu)
        now_s = predict_planned(each.case, planned).step_s
        frozen_s = before.get(each.case) if each.gpu == GPU else None
        estimated = estimate_memory(planned.setup).total_gib
        rows.append(
            {
                "run": each.case,
                "GPUs": str(planned.setup.layout.world_size),
                "measured ms": f"{1e3 * each.step_s:.1f}",
                f"{FROZEN_COMMIT}: ms": "" if frozen_s is None else f"{1e3 * frozen_s:.1f}",
                f"{FROZEN_COMMIT}: error": "" if frozen_s is None else signed(frozen_s / each.step_s - 1),
                "now: ms": f"{1e3 * now_s:.1f}",
                "now: error": signed(now_s / each.step_s - 1),
                "allocated GiB": f"{each.allocated_gib:.1f}",
                "estimated GiB": f"{estimated:.1f}",
                "reserved GiB": f"{each.reserved_gib:.1f}",
            }
        )
    return rows


def ordering_table() -> list[Row]:
    """Pairs of runs, with their ratios."""
    return [
        {
            "change": each.says,
            "source": each.source,
            "published": each.published if isinstance(each.published, str) else signed(each.published - 1),
            "predicted": signed(each.predicted - 1),
            "verdict": "right" if each.is_right else "wrong",
        }
        for each in orderings()
    ]


def expected_table() -> list[Row]:
    """The guide's table of expected performance."""
    return [
        {
            "model": each.configuration.removeprefix("expected-").upper(),
            "layout": each.layout,
            "guide: MFU": percent(each.mfu),
            "guide: tokens/s": f"{each.tokens_s:,.0f}",
            "MFU if of all GPUs": percent(each.implied_mfu),
            "MFU if of each GPU": percent(each.implied_mfu_per_gpu),
            "predicted MFU": percent(each.predicted_mfu),
            "predicted tokens/s": f"{each.predicted_tokens_s:,.0f}",
            "memory GiB": f"{each.memory_gib:.1f}",
        }
        for each in expected()
    ]


def memory_table() -> list[Row]:
    """Stages of which others measured the memory."""
    return [
        {
            "model": each.model,
            "layout": each.layout,
            "sequence": f"{each.seq_length:,}",
            "stage": str(each.stage),
            "allocated GiB": f"{each.allocated_gib:.2f}",
            "estimated GiB": f"{each.estimated_gib:.2f}",
            "error": signed(each.error),
            "reserved GiB": f"{each.reserved_gib:.2f}",
        }
        for each in stages()
    ]


TABLES: dict[str, Callable[[], list[Row]]] = {
    "accuracy": accuracy,
    "configurations": configuration_table,
    "own": own_table,
    "orderings": ordering_table,
    "expected": expected_table,
    "memory": memory_table,
}


def markdown(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown."""
    if not rows:
        return "nothing was measured"
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def percent(share: float) -> str:
    """A share as text: 3.4%."""
    return f"{100 * share:.1f}%"


def signed(share: float) -> str:
    """A difference as text: +3.4%."""
    return f"{100 * share:+.1f}%"


def _errors(accuracy: Accuracy | None) -> Row:
    if accuracy is None:
        return {"median": "", "worst": "", "bias": ""}
    return {
        "median": percent(accuracy.median),
        "worst": signed(accuracy.worst),
        "bias": signed(accuracy.bias),
    }


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
