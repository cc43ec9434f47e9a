"""The HTML page of one run, or of several side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcgen.report import words
from hpcgen.report.comparability import differences_of_meaning
from hpcgen.report.essentials import differences, essentials
from hpcgen.report.evaluations import with_error
from hpcgen.report.html import Table, Tile, rendered
from hpcgen.report.labels import MAX_NAMED, heading, labels
from hpcgen.report.panels import NamedHistory, draw_charts
from hpcgen.report.run import Run
from hpcgen.report.summary import AttemptSummary, Summary, summarize
from hpcgen.report.time_bars import time_bars
from hpcgen.runs.answers import Answer, at_iteration
from hpcgen.text import counted
from trainer.contract.evaluation import EvaluationResult
from trainer.contract.files.metrics_line import Event, number_or_none

MAX_LISTED = 8
"""Number of iterations whose answers are listed."""
MAX_TEXT = 600
"""Number of characters of a prompt or an answer that a table shows."""
MAX_ROWS = 25
"""Maximum number of rows in a table. Longer tables have only the newest or the worst ones."""
MAX_CHARACTERS = 50_000
"""Maximum length of a configuration. Thousands of corpora would make it larger than the rest of the page."""


def render_page(runs: Sequence[Run]) -> str:
    """Renders the complete page. Its content security policy forbids all network requests."""
    names = labels(runs)
    summaries = [summarize(run) for run in runs]
    charts = draw_charts(
        [
            NamedHistory(name=name, history=run.history, results=run.results)
            for name, run in zip(names, runs, strict=True)
        ]
    )
    is_one = len(runs) == 1
    return rendered(
        "page.html.j2",
        title=heading(names),
        names=names,
        max_named=MAX_NAMED,
        summaries=summaries,
        ended=[_ended(summary) for summary in summaries],
        created=words.moment(runs[0].now),
        tiles=list(_tiles(summaries[0])) if is_one else [],
        comparison=None if is_one else _comparison(names, summaries, runs),
        time_bars=time_bars(names, [run.ledger for run in runs]),
        charts=charts,
        tables=list(_tables(runs[0], summaries[0])) if is_one else list(_comparison_tables(names, runs)),
        essentials=essentials(runs[0]) if is_one else [],
        configs=[(name, _as_json(run.config)) for name, run in zip(names, runs, strict=True) if run.config],
        formulas=list(_formulas(summaries)),
        counted=counted,
        words=words,
    )  # fmt: skip


def _tiles(summary: Summary) -> Iterator[Tile]:
    losses = tuple(f"{split} {words.figure(loss)}" for split, loss in summary.evaluations.items())
    yield Tile(
        title="Loss", value=words.figure(summary.loss), notes=(*losses, f"lowest {words.figure(summary.lowest_loss)}")
    )  # fmt: skip
    total = summary.train_iters
    tokens = f"{words.count_in_short(summary.consumed_tokens)} tokens" if summary.consumed_tokens else ""
    left = f"{words.duration(summary.remaining_s)} left at this rate" if summary.remaining_s else ""
    yield Tile(
        title="Iteration",
        value=f"{summary.iteration:,}",
        unit=f"of {total:,}" if total else "",
        notes=tuple(filter(None, (tokens, left))),
        share=min(1.0, summary.iteration / total) if total else None,
    )
    yield Tile(
        title="Throughput",
        value=words.count_in_short(summary.tokens_per_s),
        unit="tokens/s",
        notes=tuple(
            filter(
                None,
                (
                    f"{words.duration(summary.step_time_s)} per step",
                    words.compared_with_prediction(summary.step_time_s, summary.predicted_step_time_s),
                ),
            )
        ),
    )
    mfu = f"MFU {words.percent(summary.mfu)}" if summary.mfu is not None else "MFU unknown: no peak was set"
    yield Tile(
        title="Per device", value=words.figure(summary.tflops_per_device, 3), unit="TFLOP/s", notes=(mfu,)
    )
    yield Tile(
        title="Peak memory", value=words.figure(summary.peak_memory_gib, 3), unit="GiB", notes=("rank 0",)
    )
    yield Tile(
        title="Time in jobs",
        value=words.duration(summary.job_time_s),
        notes=tuple(_time_notes(summary)),
    )
    trouble = (f"loss spikes: {summary.spikes}", f"skipped steps: {summary.skipped_steps}")
    yield Tile(
        title="Attempts", value=str(summary.starts), notes=trouble if summary.spikes or summary.skipped_steps else ()
    )  # fmt: skip
    stall = f"{words.duration(summary.checkpoint_stall_s)} pause, {words.duration(summary.checkpoint_write_s)} to write"
    yield Tile(
        title="Checkpoints", value=str(summary.checkpoints), notes=(stall,) if summary.checkpoints else ()
    )


def _time_notes(summary: Summary) -> Iterator[str]:
    if summary.productive_share is not None:
        yield f"{words.percent(summary.productive_share)} in steps that were kept"
    if summary.starts > 1 and summary.wall_clock_s is not None:
        yield f"{words.duration(summary.wall_clock_s)} with the time between jobs"


def _tables(run: Run, summary: Summary) -> Iterator[Table]:
    yield _attempts(summary)
    if run.results:
        yield _newest_result(run.results[-1])
    if run.answers:
        yield from _answers(run.answers)
    if run.history.checkpoints:
        yield _checkpoints(run.history.checkpoints)
    if run.history.spikes:
        yield _spikes(run.history.spikes)
    if summary.stragglers:
        rows = tuple(
            (
                f"{each.rank}",
                each.host,
                f"{each.times:,}",
                f"{each.worst:.2f} × the median",
                f"{each.last_iteration:,}",
            )
            for each in summary.stragglers[:MAX_ROWS]
        )
        yield Table(
            title="Stragglers",
            heads=("rank", "host", "times seen", "slowest", "last at iteration"),
            rows=rows,
            note=_rest(len(summary.stragglers), "ranks"),
        )


def _answers(answers: Sequence[Answer]) -> Iterator[Table]:
    """The first and the last answer to each prompt, and a list of those between them."""
    iterations = list(dict.fromkeys(answer.iteration for answer in answers))
    first, last = at_iteration(answers, iterations[0]), at_iteration(answers, iterations[-1])
    rows = tuple(
        (
            _in_short(answer.prompt),
            _in_short(first[number].answer) if number in first else "",
            _in_short(answer.answer),
        )
        for number, answer in sorted(last.items())
    )
    heads = ("prompt", f"iteration {iterations[0]:,}", f"iteration {iterations[-1]:,}")
    yield Table(title="Answers", heads=heads, rows=rows)
    if len(iterations) > 2:
        # spread evenly, so that a long run shows its course
        chosen = {iterations[len(iterations) * index // MAX_LISTED] for index in range(MAX_LISTED)}
        listed = [answer for answer in answers if answer.iteration in chosen]
        yield Table(
            title="All answers" if len(chosen) == len(iterations) else "Answers along the way",
            heads=("prompt", "iteration", "answer"),
            rows=tuple(
                (_in_short(answer.prompt), f"{answer.iteration:,}", _in_short(answer.answer))
                for answer in sorted(listed, key=lambda each: (each.number, each.iteration))
            ),
            note="hpcgen answers shows complete texts at all iterations",
            is_open=False,
        )


def _in_short(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}…"


def _attempts(summary: Summary) -> Table:
    rows = tuple(
        (
            str(attempt.number),
            words.moment(attempt.began),
            words.duration(attempt.waited_s) if attempt.waited_s is not None else "",
            f"{attempt.from_iteration:,}: {_origin(attempt)}",
            _reached(attempt),
            f"{attempt.world_size or '?'}" + (_on_hosts(len(attempt.hosts))),
            attempt.end,
        )
        for attempt in summary.attempts[-MAX_ROWS:]
    )
    changes = "; ".join(
        f"attempt {attempt.number}: {name} {old} → {new}"
        for attempt in summary.attempts
        for name, old, new in attempt.changed
    )
    broken = " ".join(
        f"Attempt {attempt.number} skipped {what}."
        for attempt in summary.attempts
        for what in attempt.passed_over
    )
    return Table(
        title="Attempts",
        heads=(
            "attempt",
            "started",
            "after a gap of",
            "from iteration",
            "to iteration",
            "ranks",
            "why it ended",
        ),
        rows=rows,
        note=" ".join(
            filter(
                None, (_rest(len(summary.attempts), "attempts"), changes and f"Changed: {changes}.", broken)
            )
        ),
    )


def _reached(attempt: AttemptSummary) -> str:
    counts = (
        f"{attempt.last_iteration:,}" if attempt.last_iteration > attempt.from_iteration else "no step kept"
    )
    return f"{counts}; {counted(attempt.lost_steps, 'step')} lost" if attempt.lost_steps else counts


def _on_hosts(count: int) -> str:
    return f" on {counted(count, 'host')}" if count else ""


def _origin(attempt: AttemptSummary) -> str:
    return (
        Path(attempt.checkpoint).name
        if attempt.checkpoint
        else "random weights"
        if not attempt.from_iteration
        else "?"
    )


def _checkpoints(events: Sequence[Event]) -> Table:
    rows = tuple(
        (
            f"{event['iteration']:,}",
            words.moment(number_or_none(event.get("time"))),
            words.duration(number_or_none(event.get("stall_s"))),
            words.duration(number_or_none(event.get("write_s")))
            + (" in the background" if event.get("asynchronous") else ""),
            words.size(number_or_none(event.get("bytes"))),
            str(event.get("path", "")),
        )
        for event in reversed(events[-MAX_ROWS:])
    )  # fmt: skip
    return Table(
        title="Checkpoints",
        heads=("iteration", "completed", "training paused", "written in", "size", "path"),
        rows=rows,
        note=_rest(len(events), "checkpoints", "newest"),
        is_open=len(events) <= 8,
    )


def _newest_result(result: EvaluationResult) -> Table:
    limit = result.settings.limit
    texts = [
        (
            text.name,
            "loss",
            f"{words.figure(text.loss)} (perplexity {words.figure(text.perplexity)})",
            f"{text.tokens:,} tokens" + (f" in {counted(text.sequences, 'window')}" if limit else ""),
        )
        for text in result.data
    ]
    tasks = [
        (
            task.name,
            ", ".join((metric.name, *([metric.filter] if metric.filter != "none" else []))),
            with_error(metric),
            f"{task.documents:,} documents",
        )
        for task in result.tasks
        for metric in task.metrics
    ]
    rows = (*texts, *tasks)
    return Table(
        title=f"Evaluation of iteration {result.iteration:,}"
        + (f", of a part (evaluation.limit = {limit})" if limit else ""),
        heads=("text or task", "metric", "value ± standard error", "size"),
        rows=rows[:MAX_ROWS],
        note=_rest(len(rows), "metrics", "first"),
    )


def _spikes(events: Sequence[Event]) -> Table:
    worst = sorted(events, key=lambda event: -(number_or_none(event.get("height")) or 0.0))[:MAX_ROWS]
    rows = tuple(
        (
            f"{event['iteration']:,}",
            words.figure(number_or_none(event.get("loss"))),
            f"{words.figure(number_or_none(event.get('height')), 3)} × the median",
            " to ".join(words.count(number_or_none(event.get(name))) for name in ("first_sample", "last_sample")),
            "skipped" if event.get("skipped") else "trained on",
        )
        for event in sorted(worst, key=lambda event: event["iteration"])
    )  # fmt: skip
    return Table(
        title="Loss spikes",
        heads=("iteration", "loss", "height", "samples", "the batch was"),
        rows=rows,
        note=_rest(len(events), "spikes", "highest"),
    )


def _comparison(names: Sequence[str], summaries: Sequence[Summary], runs: Sequence[Run]) -> Table:
    notes = differences_of_meaning(names, runs)
    is_valid_marked = any(note.startswith("The validation") for note in notes)
    figures: list[tuple[str, list[str]]] = [
        ("state", [_ended_how(each) for each in summaries]),
        ("iteration", [f"{each.iteration:,}" for each in summaries]),
        ("tokens consumed", [words.count_in_short(each.consumed_tokens) for each in summaries]),
        ("last loss", [words.figure(each.loss) for each in summaries]),
        ("lowest loss", [words.figure(each.lowest_loss) for each in summaries]),
        (
            "validation loss" + (" (not comparable)" if is_valid_marked else ""),
            [words.figure(each.evaluations.get("valid")) for each in summaries],
        ),
        ("tokens/s", [words.count_in_short(each.tokens_per_s) for each in summaries]),
        ("TFLOP/s per device", [words.figure(each.tflops_per_device, 3) for each in summaries]),
        ("MFU", [words.percent(each.mfu) for each in summaries]),
        ("step time", [words.duration(each.step_time_s) for each in summaries]),
        ("predicted step time", [words.duration(each.predicted_step_time_s) for each in summaries]),
        ("peak memory, GiB", [words.figure(each.peak_memory_gib, 3) for each in summaries]),
        ("attempts", [str(each.starts) for each in summaries]),
        ("directory", [each.directory for each in summaries]),
    ]
    return Table(
        title="Side by side",
        heads=("", *names),
        rows=tuple((title, *values) for title, values in figures),
        note=" ".join(f"{note}." for note in notes),
    )


def _comparison_tables(names: Sequence[str], runs: Sequence[Run]) -> Iterator[Table]:
    rows = tuple((key, *values) for key, values in differences(runs))
    if rows:
        yield Table(title="Configuration differences", heads=("key", *names), rows=rows)


def _formulas(summaries: Sequence[Summary]) -> Iterator[str]:
    for formula in dict.fromkeys(summary.flop_formula for summary in summaries if summary.flop_formula):
        yield f"Model FLOPs: {formula}."
    for peak in dict.fromkeys(summary.peak_tflops for summary in summaries if summary.peak_tflops):
        yield f"MFU = TFLOP/s per device / {peak:g} TFLOP/s, the dense peak set for the run."


def _ended(summary: Summary) -> str:
    return "stopped, can be resumed" if summary.state == "stopped" else summary.state


def _ended_how(summary: Summary) -> str:
    """State of the run, with the reason if it ended before its last iteration."""
    why = summary.word if summary.state in ("failed", "hung", "died", "done") else ""
    return f"{_ended(summary)}: {why}" if why else _ended(summary)


def _as_json(config: dict[str, Any]) -> str:
    text = json.dumps(config, indent=1, ensure_ascii=False)
    left_out = len(text) - MAX_CHARACTERS
    return f"{text[:MAX_CHARACTERS]}\n... and {left_out:,} more characters" if left_out > 0 else text


def _rest(total: int, what: str, which: str = "") -> str:
    return f"The {which} {MAX_ROWS} of {total:,} {what}.".replace("  ", " ") if total > MAX_ROWS else ""
