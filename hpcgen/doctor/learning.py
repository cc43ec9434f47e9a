"""Training that does not learn as it should: from losses, gradient norms and learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from hpcgen.report.run import Run
from hpcgen.runs.history import History
from hpcgen.text import counted
from trainer.contract.files.metrics_line import number_or_none

Values = NDArray[np.float64]

WINDOW = 50
"""Number of lines in a median. Single batches differ by several percent."""
MIN_LINES = 4 * WINDOW
ROSE = 1.05
"""A median loss this many times the lowest one has risen for good."""
GREW = 3.0
"""A gradient norm this many times its earlier median is a sign of instability."""
FLAT = 0.99
"""A loss that is still this share of an earlier one does not fall."""
UNLEARNED = 0.5
"""Share of ln(vocabulary), the loss of guessing, above which a flat loss means that little was learned."""
SKIPPED = 0.05
MANY_SPIKES = 3
UNEVEN_LOAD = 2.0
"""Load of the busiest expert, relative to an even share, above which routing is unbalanced (docs/faults.md)."""
PAGE = "faults.md#it-learns-slowly-or-not-at-all"
SPIKE_PAGE = "faults.md#the-loss-jumps"


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what the numbers of the steps show."""
    run = files.run
    if run is None:
        return
    metrics = f"{run.directory}/metrics.jsonl"
    diverged = list(_diverges(run, metrics))
    yield from diverged
    if not diverged:
        yield from _flat(run, metrics)
    yield from _schedule_over(run, metrics)
    yield from _spikes(run, metrics)
    yield from _skipped(run.history, metrics)
    yield from _experts(run.history, metrics)


def _medians(history: History, name: str) -> tuple[Values, NDArray[np.int64]]:
    """Medians of consecutive windows of a column, and the last iteration of each window."""
    known = np.isfinite(history.columns[name])
    values, iterations = history.columns[name][known], history.iteration[known]
    count = len(values) // WINDOW
    if count == 0:
        return np.zeros(0), np.zeros(0, dtype=np.int64)
    kept = values[-count * WINDOW :].reshape(count, WINDOW)
    return np.median(kept, axis=1), iterations[-count * WINDOW :].reshape(count, WINDOW)[:, -1]


def _diverges(run: Run, metrics: str) -> Iterator[Cause]:
    """Yields a loss that has risen for good, and a gradient norm that grows."""
    losses, ends = _medians(run.history, "loss")
    norms, _ = _medians(run.history, "grad_norm")
    evidence = []
    if len(losses) * WINDOW >= MIN_LINES and losses[-1] > ROSE * losses.min():
        lowest = int(losses.argmin())
        evidence.append(
            f"{metrics}: the median loss of {WINDOW} lines was {losses[lowest]:.3f} at iteration {ends[lowest]:,}, "
            f"and is {losses[-1]:.3f} at iteration {ends[-1]:,}"
        )
    if len(norms) * WINDOW >= MIN_LINES and norms[-1] > GREW * np.median(norms[1:-1]):
        earlier = float(np.median(norms[1:-1]))
        evidence.append(
            f"{metrics}: the median gradient norm is {norms[-1]:.3g}, and was {earlier:.3g} before"
        )
    if not evidence:
        return
    rises = "loss" in evidence[0].partition(": ")[2][:20]
    yield Cause(
        name="diverging",
        effect="costs",
        what="The loss rises: the run diverges"
        if rises
        else "The gradient norm grows: the run becomes unstable",
        evidence=tuple(evidence),
        fix="Resume from a checkpoint before the rise with a lower optimizer.lr, a longer warm-up (lr_warmup_iters) "
        "or a lower clip_grad. If the data changed there, look at the mixture first.",
        page=PAGE,
    )


def _flat(run: Run, metrics: str) -> Iterator[Cause]:
    """Yields a loss that stays near that of guessing."""
    losses, ends = _medians(run.history, "loss")
    model = run.config.get("model")
    vocabulary = model.get("vocab_size") if isinstance(model, dict) else None
    if len(losses) * WINDOW < MIN_LINES or not isinstance(vocabulary, int) or vocabulary < 2:
        return
    middle, guessing = losses[len(losses) // 2 - 1], math.log(vocabulary)
    if losses[-1] < FLAT * middle or losses[-1] < UNLEARNED * guessing:
        return
    rate = run.history.columns["lr"][-1]
    yield Cause(
        name="loss-flat",
        effect="costs",
        what="The loss does not fall, and is still near that of guessing",
        evidence=(
            f"{metrics}: the median loss of {WINDOW} lines is {losses[-1]:.3f} at iteration {ends[-1]:,}, and was "
            f"{middle:.3f} at iteration {ends[len(losses) // 2 - 1]:,}; guessing has ln({vocabulary:,}) = "
            f"{guessing:.2f}",
            f"{metrics}: the learning rate is {rate:.3g}",
        ),
        fix="Look at a sample of the data (hpcgen data inspect PREFIX --document 0) and at its tokenizer. Then try a "
        "higher or a lower optimizer.lr for some hundred steps.",
        page=PAGE,
    )


def _schedule_over(run: Run, metrics: str) -> Iterator[Cause]:
    """Yields a learning rate that has reached its minimum long before the last step."""
    rates = run.history.columns["lr"]
    known = rates[np.isfinite(rates)]
    optimizer = run.config.get("optimizer")
    lowest = optimizer.get("min_lr") if isinstance(optimizer, dict) else None
    total, iteration = run.train_iters, int(run.history.iteration[-1])
    if len(known) < MIN_LINES or total is None or iteration > 0.9 * total:
        return
    floor = number_or_none(lowest) or 0.0
    recent = known[-WINDOW:]
    if recent[-1] != recent[0] or recent[-1] > max(1.001 * floor, 1e-3 * float(known.max())):
        return
    if recent[-1] == known.max():  # a constant rate
        return
    decay = optimizer.get("lr_decay_iters") if isinstance(optimizer, dict) else None
    yield Cause(
        name="schedule-over",
        effect="costs",
        what="The learning rate has reached its minimum, and many steps are left",
        evidence=(
            f"{metrics}: the learning rate is {recent[-1]:.3g} at iteration {iteration:,} of {total:,}; its maximum "
            f"was {known.max():.3g}",
            *((f"configuration: optimizer.lr_decay_iters = {decay}",) if decay is not None else ()),
        ),
        fix="Set optimizer.lr_decay_iters to training.train_iters, or leave it out, and resume from an older "
        "checkpoint with checkpoint.changed.",
        page=PAGE,
    )


def _spikes(run: Run, metrics: str) -> Iterator[Cause]:
    spikes = run.history.spikes
    if len(spikes) < MANY_SPIKES:
        return
    yield Cause(
        name="loss-spikes",
        effect="costs",
        what=f"The loss jumped {counted(len(spikes), 'time')}",
        evidence=(f"{metrics}: spike events, the last at iteration {spikes[-1]['iteration']:,}",),
        fix="Find out which documents they were, skip such batches (training.skip_loss_spikes), or lower optimizer.lr.",
        page=SPIKE_PAGE,
    )


def _skipped(history: History, metrics: str) -> Iterator[Cause]:
    recent = history.columns["skipped"][-MIN_LINES:]
    recent = recent[np.isfinite(recent)]
    if len(recent) < WINDOW or recent.mean() < SKIPPED:
        return
    yield Cause(
        name="updates-skipped",
        effect="costs",
        what=f"{recent.mean():.0%} of the latest updates were skipped",
        evidence=(f"{metrics}: skipped is true in {int(recent.sum())} of the last {len(recent)} lines",),
        fix="With fp16, gradients overflow: use bf16, or a lower optimizer.lr. With training.skip_loss_spikes, find "
        "out which documents cause the spikes.",
        page="faults.md#the-loss-is-not-a-number",
    )


def _experts(history: History, metrics: str) -> Iterator[Cause]:
    recent = history.columns["moe_max_load"][-WINDOW:]
    recent = recent[np.isfinite(recent)]
    if len(history.iteration) < MIN_LINES or not len(recent) or np.median(recent) <= UNEVEN_LOAD:
        return
    yield Cause(
        name="experts-uneven",
        effect="costs",
        what="A few experts take most tokens",
        evidence=(
            f"{metrics}: moe_max_load is {np.median(recent):.2f} (median of the last {len(recent)} lines); 1 is an "
            "even share",
        ),
        fix="Balance the routing: moe_router_load_balancing_type with moe_aux_loss_coeff, or "
        "moe_router_enable_expert_bias.",
        page="faults.md#a-few-experts-take-all-tokens",
    )
