"""Prints for `hpcgen ledger` where the time of runs went."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from hpcgen import api
from hpcgen.cli.options import RUN_FILE
from hpcgen.cli.run_argument import run_directories, tell_unread
from hpcgen.config.cluster import price_per_gpu_hour
from hpcgen.ledger.ledger import JobFacts, Ledger
from hpcgen.ledger.parts import PARTS
from hpcgen.ledger.read import open_jobs, read_ledger
from hpcgen.ledger.timeline import Spent
from hpcgen.planning.request import stage_settings
from hpcgen.redaction import redact_json
from hpcgen.report.words import moment, percent
from hpcgen.runs.slurm import Queue, ask_accounts, ask_queue
from hpcgen.runs.unread import unread_records
from hpcgen.stages.train import TRAIN
from hpcgen.text import counted, duration, harmless, rough

NAME_WIDTH = 26
LEAST_SHOWN = 0.0005
"""Parts below this share of the time are not shown. They are zero to one decimal place."""


def show_ledgers(runs: tuple[Path, ...], since: float | None, *, as_json: bool) -> None:
    """Prints the ledger of each run, and their sum.

    `since`: only the last part of the time, in seconds. Default: all of it.

    Raises:
        HpcgenError: a run file is invalid, or a run directory cannot be read.
    """
    now = time.time()
    after = 0.0 if since is None else now - since
    directories = run_directories(runs)
    accounts = ask_accounts(job for directory in directories for job in open_jobs(directory))
    ledgers = [
        read_ledger(directory, now, after, _price(path), lambda path: _queue_of(path.stat().st_uid), accounts)
        for path, directory in zip(runs or (None,), directories, strict=True)
    ]
    tell_unread(problem for ledger in ledgers for problem in unread_records(Path(ledger.directory)))
    if as_json:
        click.echo(json.dumps(redact_json(_as_json(ledgers)), indent=1))
        return
    for ledger in ledgers:
        _show(ledger)
    if len(ledgers) > 1:
        _show_total(ledgers)


@functools.cache
def _queue_of(user: int) -> Queue:
    """The jobs of a user, who is asked for once."""
    return ask_queue((user,))


def _price(path: Path | None) -> JobFacts | None:
    """The price in the profile of a run file; None for a directory."""
    path = path or RUN_FILE
    if path.suffix not in (".yaml", ".yml") or not path.is_file():
        return None
    run = api.load_run(path)
    settings = stage_settings(TRAIN, run.config, run.cluster)
    return JobFacts(
        price_per_gpu_hour=price_per_gpu_hour(settings, run.cluster),
        currency=run.cluster.currency,
        gpu_idle_limit_s=run.cluster.gpu_idle_limit_s,
    )


def _as_json(ledgers: Sequence[Ledger]) -> dict[str, object]:
    total = Spent.total([ledger.spent for ledger in ledgers])
    return {"runs": [dataclasses.asdict(ledger) for ledger in ledgers], "total": dataclasses.asdict(total)}


def _show(ledger: Ledger) -> None:
    if not ledger.attempts:
        click.echo(
            f"{harmless(ledger.name)}: nothing since {moment(ledger.began)}; it ended {moment(ledger.ended)}"
        )
        return
    now = "now, waiting in the queue" if ledger.waits else "now"
    end = now if ledger.goes_on or ledger.waits else moment(ledger.ended)
    heading = f"{click.style(harmless(ledger.name), bold=True)}: {duration(ledger.spent.wall_s)}"
    click.echo(f"{heading} from {moment(ledger.began)} to {end}")
    _show_parts(ledger.spent)
    for line in (*_facts(ledger), *_advice(ledger)):
        click.echo(harmless(line))
    for idle in ledger.too_idle:
        click.secho(
            harmless(
                f"warning: job {idle.job} held its GPUs for {duration(idle.seconds)} before the first step; the "
                f"site allows {duration(idle.limit_s)} (gpu_idle_limit_s of the profile)"
            ),
            fg="yellow",
            err=True,
        )


def _show_total(ledgers: Sequence[Ledger]) -> None:
    total = Spent.total([ledger.spent for ledger in ledgers])
    click.echo(f"{click.style('total', bold=True)} of {len(ledgers)} runs: {duration(total.wall_s)}")
    _show_parts(total)
    click.echo(_goodput(total))
    if total.gpu_hours:
        click.echo(_gpu_hours(total.gpu_hours, *_total_cost(ledgers)))


def _total_cost(ledgers: Sequence[Ledger]) -> tuple[float | None, str]:
    """The cost of all runs with GPUs, and its currency; None without one price for all."""
    costs = {(ledger.cost, ledger.currency) for ledger in ledgers if ledger.spent.gpu_hours}
    currencies = {currency for _, currency in costs}
    if len(currencies) != 1 or any(cost is None for cost, _ in costs):
        return None, ""
    return sum(ledger.cost or 0.0 for ledger in ledgers), currencies.pop()


def _show_parts(spent: Spent) -> None:
    for part in PARTS:
        seconds = spent.parts[part.value]
        if seconds > LEAST_SHOWN * spent.wall_s:
            share = f"{seconds / spent.wall_s:.1%}"
            click.echo(f"  {part.label:<{NAME_WIDTH}}{duration(seconds):>14}{share:>8}")


def _facts(ledger: Ledger) -> Iterator[str]:
    yield _goodput(ledger.spent)
    windows = (
        f"{counted(int(days), 'day')} {percent(spent.goodput)}"
        for days, spent in ledger.windows.items()
        if spent.goodput is not None
    )
    if text := ", ".join(windows):
        yield f"goodput of the last {text}"
    if ledger.spent.gpu_hours:
        yield _gpu_hours(ledger.spent.gpu_hours, ledger.cost, ledger.currency)
    yield f"{_attempts(ledger)}; {_idle(ledger)} before the first steps"
    if not ledger.has_events:
        yield "no job recorded its times, so the time between attempts is not divided"


def _goodput(spent: Spent) -> str:
    if spent.goodput is None or spent.goodput_of_wall is None:
        return "no job has run in this time"
    return (
        f"goodput {percent(spent.goodput)} of the time in jobs, {percent(spent.goodput_of_wall)} of all time"
    )


def _gpu_hours(hours: float, cost: float | None, currency: str) -> str:
    return f"{rough(hours, 4)} GPU-hours" + (f", {rough(cost, 4)} {currency}" if cost is not None else "")


def _attempts(ledger: Ledger) -> str:
    attempts = counted(len(ledger.attempts), "attempt")
    return f"{attempts}, {counted(ledger.lost_steps, 'step')} redone"


def _idle(ledger: Ledger) -> str:
    return f"{'GPUs idle' if ledger.spent.gpu_hours else 'waited'} for {duration(ledger.idle_s)}"


def _advice(ledger: Ledger) -> Iterator[str]:
    failures, saving = ledger.failures, ledger.saving
    if failures.mean_s is None:
        if failures.exposed_s > 0:
            yield f"no interruption; more than {duration(failures.low_s)} between two (90% confidence)"
        return
    between = f"{duration(failures.low_s)} to {duration(failures.high_s or 0.0)}"
    yield (
        f"{counted(failures.count, 'interruption')}, one in {duration(failures.mean_s)} in jobs "
        f"({between} with 90% confidence)"
    )
    if saving is not None:
        yield (
            f"saves every {duration(saving.interval_s)}, each costs {duration(saving.stall_s)}: "
            f"{percent(saving.lost)} lost to saves and interruptions"
        )
        yield f"least is lost with a save every {duration(saving.best_interval_s)}: {percent(saving.least_lost)}"
