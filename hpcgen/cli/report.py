"""hpcgen report: summarize training runs in one HTML file."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcgen.cli.options import write_output
from hpcgen.cli.run_argument import run_directory
from hpcgen.cli.status_rows import color_of
from hpcgen.files import shared_as_directory
from hpcgen.report.words import compared_with_prediction, count_in_short, duration, figure, percent
from hpcgen.text import counted, harmless
from trainer.contract.files.metrics_line import number_or_none

if TYPE_CHECKING:
    from hpcgen.report.run import Run
    from hpcgen.report.summary import Summary


@click.command("report")
@click.argument(
    "run_dirs",
    metavar="RUN_DIR...",
    nargs=-1,
    required=True,
    type=click.Path(path_type=Path),
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="File to write; - is standard output.  [default: report.html in RUN_DIR, or in the current directory "
    "for several runs]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON. Writes HTML only with -o.")
def command(run_dirs: tuple[Path, ...], output: Path | None, as_json: bool) -> None:
    """RUN_DIR is a run directory, or a run file with the directory in paths.run_dir.

    Shows loss, throughput, memory, restarts and checkpoints, with several runs side by side. The file is
    self-contained. A run that is still training is shown up to its latest step.
    """
    from hpcgen.report import comparability, labels, page, run, summary

    run_dirs = tuple(map(run_directory, run_dirs))
    runs = [run.read_run(directory, time.time()) for directory in run_dirs]
    summaries = [summary.summarize(each) for each in runs]
    names = labels.labels(runs)
    notes = comparability.differences_of_meaning(names, runs)
    if as_json:
        found = [{**dataclasses.asdict(each), "not_comparable": notes} for each in summaries]
        click.echo(json.dumps(found, indent=1))
    elif str(output) != "-":
        for shown in zip(names, runs, summaries, strict=True):
            _show(*shown)
        for note in notes:
            click.echo(harmless(note))
    if output is not None or not as_json:
        default = Path("report.html") if len(runs) > 1 else run_dirs[0] / "report.html"
        target = output or default
        with shared_as_directory(target.parent):
            write_output(target, page.render_page(runs), mode=0o666)


def _show(label: str, run: Run, summary: Summary) -> None:
    """Prints the run in a few lines."""
    from hpcgen.report import curve, evaluations

    of = f" of {summary.train_iters:,}" if summary.train_iters else ""
    click.echo(
        f"{click.style(harmless(label), bold=True)}: {click.style(summary.state, fg=color_of(summary.state))}, "
        f"iteration {summary.iteration:,}{of}" + (f": {harmless(summary.word)}" if summary.word else "")
    )
    losses = {
        int(iteration): float(loss)
        for iteration, loss in zip(run.history.iteration, run.history.columns["loss"], strict=True)
        if loss == loss
    }
    latest = {
        harmless(str(event.get("split"))): {event["iteration"]: loss}
        for event in run.history.evaluations
        if (loss := number_or_none(event.get("loss"))) is not None
    }
    click.echo(curve.draw_text(curve.Curve(losses, latest)))
    mfu = f", MFU {percent(summary.mfu)}" if summary.mfu is not None else ""
    memory = f", {figure(summary.peak_memory_gib, 3)} GiB" if summary.peak_memory_gib is not None else ""
    compared = compared_with_prediction(summary.step_time_s, summary.predicted_step_time_s)
    per_step = f"{duration(summary.step_time_s)} per step" + (f" ({compared})" if compared else "")
    click.echo(
        f"{per_step}, {count_in_short(summary.tokens_per_s)} tokens/s, "
        f"{figure(summary.tflops_per_device, 3)} TFLOP/s per device{mfu}{memory}, "
        f"{counted(summary.starts, 'attempt')}"
    )
    if summary.min_expert_load is not None and summary.max_expert_load is not None:
        dropped = f", {percent(summary.dropped_share)} dropped" if summary.dropped_share is not None else ""
        load = f"{summary.min_expert_load:.2f} to {summary.max_expert_load:.2f} (1 is an even share)"
        click.echo(f"expert load {load}{dropped}")
    if summary.results:
        click.echo(harmless(evaluations.line(summary.results[-1])))
    if summary.unreadable_lines:
        ignored = f"{counted(summary.unreadable_lines, 'unreadable line')} of {run.directory}/metrics.jsonl"
        click.echo(f"warning: {harmless(ignored)} ignored", err=True)
    for problem in summary.unreadable_results:
        click.echo(f"warning: {harmless(problem)}", err=True)
