"""Slow training: compared with its prediction and its own past, where the time of a step goes, slow ranks, memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hpcgen.config.node_types import load_node_type
from hpcgen.doctor.cause import Cause
from hpcgen.doctor.run_files import RunFiles
from hpcgen.errors import HpcgenError
from hpcgen.planning.step_time.result import StepTime
from hpcgen.report.prediction import nodes_of, predicted_step_of
from hpcgen.report.run import Run
from hpcgen.report.summary import RECENT_LINES, Summary, summarize
from hpcgen.runs.history import History
from hpcgen.text import counted, duration

SLOWER_THAN_PREDICTED = 1.3
"""A step that takes this many times the prediction is slow. Predictions are at most 20% off (docs/planning.md)."""
GREW = 1.2
"""A step that takes this many times those at the beginning has become slow."""
MIN_LINES = 20
"""Lines of an attempt from which its speed is judged. The first ones contain the compilation of kernels."""
MUCH = {"data_wait": 0.05, "communication": 0.2, "idle": 0.15}
"""Share of the step's time from which a part is worth a look."""
UNEVEN = 1.1
"""A pipeline stage that takes this many times the mean makes the others wait."""
NEARLY_FULL = 0.95
"""Share of a GPU's memory from which the next larger sample or fragmentation ends the run."""
PAGE = "metrics.md#where-the-time-of-a-step-goes"
TITLES = {
    "data_wait": "Steps wait for samples",
    "communication": "Steps wait for communication",
    "idle": "The GPUs wait, and neither for data nor for communication",
}
FIXES = {
    "data_wait": "Raise data.num_workers, or put the .bin/.idx pairs on faster storage. It should be below 1%.",
    "communication": "Turn on parallelism.overlap_grad_reduce and overlap_param_gather, measure the fabric with the "
    "stage nccl-test, and see whether a rank is slow.",
    "idle": "With pipeline stages, use more microbatches per step or a virtual pipeline. Without, the host cannot "
    "launch "
    "kernels fast enough: use CUDA graphs or larger microbatches.",
}


def causes(files: RunFiles) -> Iterator[Cause]:
    """Yields what makes the steps slow, and GPUs whose memory is nearly full."""
    run = files.run
    if run is None:
        return
    summary = summarize(run)
    yield from _stragglers(run, summary)
    if len(run.history.iteration) >= MIN_LINES:
        step = predicted_step_of(run, float(np.nan_to_num(run.history.columns["batch_size"][-1])))
        yield from _slower_than_predicted(run, summary, step)
        yield from _slower_than_before(run.history, _metrics(run))
    if len(run.history.iteration) >= MIN_LINES and run.history.start.get("device") == "cuda":
        pipeline = list(_pipeline(run, summary, step))
        yield from pipeline
        yield from _parts(run, summary, is_explained=bool(pipeline))
    yield from _memory(run, summary)


def _metrics(run: Run) -> str:
    return f"{run.directory}/metrics.jsonl"


def _recent(history: History) -> str:
    first, last = history.iteration[-RECENT_LINES:][0], history.iteration[-1]
    return f"iterations {first:,} to {last:,}"


def _slower_than_predicted(run: Run, summary: Summary, step: StepTime | None) -> Iterator[Cause]:
    seconds = summary.step_time_s
    if step is None or seconds is None or seconds < SLOWER_THAN_PREDICTED * step.total:
        return
    parts = ", ".join(f"{name} {share:.0%}" for name, share in summary.shares.items())
    yield Cause(
        name="slower-than-predicted",
        effect="costs",
        what=f"A step takes {seconds / step.total:.2g} times as long as predicted for these nodes",
        evidence=(
            f"{_metrics(run)}: {_recent(run.history)}: {duration(seconds)} per step (median); predicted: "
            f"{duration(step.total)}",
            f"shares of the step on rank 0: {parts or 'not recorded'}",
        ),
        fix="Look at the largest share and at slow ranks below. If there is none, check the nodes with the stage "
        "node-health and the fabric with nccl-test.",
        page=PAGE,
    )


def _slower_than_before(history: History, metrics: str) -> Iterator[Cause]:
    """Compares steps with the same batch size, of the same number of ranks."""
    seconds, sizes = history.columns["step_time_s"], history.columns["batch_size"]
    same = np.isfinite(seconds) & ((sizes == sizes[-1]) | ~np.isfinite(sizes))
    worlds = {attempt.start.get("world_size") for attempt in history.attempts}
    if len(worlds) > 1 or same.sum() < 2 * RECENT_LINES:
        return
    kept, iterations = seconds[same], history.iteration[same]
    before, now = kept[MIN_LINES // 2 : RECENT_LINES], kept[-RECENT_LINES:]
    ratio = float(np.median(now) / np.median(before)) if np.median(before) > 0 else 0.0
    if ratio >= GREW:
        yield Cause(
            name="became-slow",
            effect="costs",
            what=f"Steps take {ratio:.2g} times as long as at the beginning",
            evidence=(
                f"{metrics}: iterations {iterations[MIN_LINES // 2]:,} to {iterations[RECENT_LINES - 1]:,}: "
                f"{duration(float(np.median(before)))} per step (median); {_recent(history)}: "
                f"{duration(float(np.median(now)))}",
            ),
            fix="Nodes, storage or the fabric have become slower: check the nodes with the stage node-health, the "
            "fabric with nccl-test, and which part of the step grew with hpcgen report.",
            page=PAGE,
        )


def _parts(run: Run, summary: Summary, *, is_explained: bool) -> Iterator[Cause]:
    """Yields parts of the step that take much of it. Stages of a pipeline that wait are `_pipeline`."""
    for name, limit in MUCH.items():
        share = summary.shares.get(name, 0.0)
        if share < limit or (name == "idle" and (is_explained or _bubble(run) >= share - limit)):
            continue
        yield Cause(
            name=f"slow-{name.replace('_', '-')}",
            effect="costs",
            what=f"{TITLES[name]}: {share:.0%} of the time",
            evidence=(f"{_metrics(run)}: {name}_s is {share:.1%} of step_time_s, over the run, on rank 0",),
            fix=FIXES[name],
            page=PAGE,
        )


def _bubble(run: Run) -> float:
    """Share of the step in which a stage of a balanced pipeline waits; 0 without a pipeline, or if it is unknown."""
    start, training = run.history.start, run.config.get("training", {})
    stages, chunks, replicas = (_count(start.get(name)) for name in ("pp", "vpp", "dp"))
    samples, micro = run.history.columns["batch_size"][-1], _count(training.get("micro_batch_size"))
    if not (stages and replicas and micro) or not samples > 0:
        return 0.0
    busy = (chunks or 1) * float(samples) / (micro * replicas)
    return (stages - 1) / (busy + stages - 1)


def _count(value: object) -> int:
    """A positive integer, or 0 for anything else that a damaged file may contain."""
    return value if type(value) is int and value > 0 else 0


def _pipeline(run: Run, summary: Summary, step: StepTime | None) -> Iterator[Cause]:
    """Yields a pipeline whose stages take different times, or whose first stage waits longer than its bubble."""
    stages = run.history.start.get("pp")
    if not isinstance(stages, int) or stages < 2:
        return
    evidence, idle, bubble = [], summary.shares.get("idle", 0.0), _bubble(run)
    if step is not None and (uneven := _uneven_stages(step)):
        evidence.append(uneven)
    if bubble and idle - bubble >= MUCH["idle"]:
        evidence.append(
            f"{_metrics(run)}: idle_s is {idle:.0%} of step_time_s on rank 0; the bubble of a balanced pipeline is "
            f"{bubble:.0%}"
        )
    if evidence:
        yield Cause(
            name="unbalanced-pipeline",
            effect="costs",
            what="The pipeline stages do not take the same time, so most of them wait for the slowest",
            evidence=tuple(evidence),
            fix="Move layers: parallelism.account_for_embedding_in_pipeline_split and "
            "account_for_loss_in_pipeline_split, num_layers_in_first_pipeline_stage and "
            "num_layers_in_last_pipeline_stage, or "
            "pipeline_model_parallel_layout. hpcgen layouts finds a faster layout.",
            page="faults.md#it-trains-and-is-slow",
        )


def _uneven_stages(step: StepTime) -> str:
    times = [stage.forward + stage.backward for stage in step.stages]
    mean = sum(times) / len(times)
    slowest = max(range(len(times)), key=times.__getitem__)
    if mean <= 0 or times[slowest] < UNEVEN * mean:
        return ""
    return (
        f"predicted: stage {slowest} of {len(times)} computes {duration(times[slowest])} per microbatch, "
        f"{times[slowest] / mean:.2f} times the mean of the stages"
    )


def _stragglers(run: Run, summary: Summary) -> Iterator[Cause]:
    found = [each for each in summary.stragglers if each.times > 1]  # once may be chance
    if not found:
        return
    hosts = list(dict.fromkeys(each.host for each in found))
    yield Cause(
        name="straggler",
        effect="costs",
        what=f"A slow rank makes all others wait: rank {found[0].rank} on {found[0].host}",
        evidence=tuple(
            f"{_metrics(run)}: rank {each.rank} on {each.host} was slow {counted(each.times, 'time')}, up to "
            f"{each.worst:.2f} times the median, last at iteration {each.last_iteration:,}"
            for each in found[:3]
        ),
        fix=f"Test {hosts[0]} with the stage node-health. Until it is repaired, exclude it: sbatch "
        f"--exclude={hosts[0]}.",
        page="metrics.md#stragglers",
    )


def _memory(run: Run, summary: Summary) -> Iterator[Cause]:
    try:
        size = load_node_type(str(nodes_of(run.directory)["node_type"])).gpu_memory_gib
    except (HpcgenError, OSError, ValueError, LookupError, TypeError):
        return
    used = summary.peak_memory_gib
    if size is None or used is None or used < NEARLY_FULL * size:
        return
    yield Cause(
        name="memory-nearly-full",
        effect="costs",
        what=f"The GPU's memory is nearly full: {used:.1f} of {size:.0f} GiB",
        evidence=(f"{_metrics(run)}: peak_memory_gib is {used:.2f}, on rank 0",),
        fix="Fragments and uneven experts can end the run. Use a smaller training.micro_batch_size, "
        "training.recompute_modules, or more parallelism.",
        page="faults.md#a-gpu-runs-out-of-memory",
    )
