"""Slow runs and runs that do not learn: the doctor recognizes each from the numbers that a run leaves."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcgen.doctor.diagnosis import diagnose
from hpcgen.doctor.run_files import read_run_files
from tests.recorded_run import START, STEP_S, start, step, steps, write_checkpoint, write_run
from tests.runs import big_run, planned
from trainer.contract.record import replaced

Events = list[dict[str, Any]]
Change = Callable[[int], dict[str, Any]]
LEARNED = {"loss": 2.5}


def causes(run: Path) -> dict[str, str]:
    """The names of what is found, with the evidence."""
    found = diagnose(read_run_files(run, START + STEP_S * 2000))
    return {cause.name: "\n".join(cause.evidence) for cause in found}


def changed(count: int, change: Change) -> Events:
    return [start(), *(step(iteration, **change(iteration)) for iteration in range(1, count + 1))]


def healthy(count: int) -> Events:
    return [start(), *steps(1, count)]


def straggler(iteration: int) -> dict[str, Any]:
    event = {"event": "straggler", "iteration": iteration, "time": START + 2 * iteration, "rank": 13}
    return {**event, "host": "ndv5-002", "slowdown": 1.3}


def spike(iteration: int) -> dict[str, Any]:
    return {
        "event": "spike",
        "iteration": iteration,
        "time": START + 2 * iteration,
        "loss": 9.0,
        "height": 3.0,
    }


CASES: dict[str, tuple[Events, str, str]] = {
    "became-slow": (
        changed(400, lambda at: {"step_time_s": 2.0 if at < 250 else 2.6}),
        "became-slow",
        "iterations 301 to 400: 2.6 s",
    ),
    "data": (
        changed(50, lambda at: {"data_wait_s": 0.3}),
        "slow-data-wait",
        "data_wait_s is 15.0% of step_time_s",
    ),
    "communication": (changed(50, lambda at: {"communication_s": 0.5}), "slow-communication", "25.0%"),
    "host": (changed(50, lambda at: {"idle_s": 0.4}), "slow-idle", "idle_s is 20.0%"),
    "waiting stages": (
        [start(pp=4, dp=4), *steps(1, 50, idle_s=0.8)],
        "unbalanced-pipeline",
        "idle_s is 40% of step_time_s on rank 0; the bubble of a balanced pipeline is 16%",
    ),
    "straggler": (
        [*healthy(60), straggler(50), straggler(60)],
        "straggler",
        "rank 13 on ndv5-002 was slow 2 times, up to 1.30 times the median, last at iteration 60",
    ),
    "diverges": (
        changed(400, lambda at: {"loss": 3.0 + max(0, at - 200) / 100}),
        "diverging",
        "the median loss of 50 lines was 3.000 at iteration 50, and is 4.755 at iteration 400",
    ),
    "gradient norm": (
        changed(400, lambda at: {**LEARNED, "grad_norm": 0.5 if at < 350 else 4.0}),
        "diverging",
        "the median gradient norm is 4, and was 0.5 before",
    ),
    "flat": (changed(400, lambda at: {"loss": 7.6}), "loss-flat", "guessing has ln(50,257) = 10.82"),
    "schedule": (
        changed(500, lambda at: {**LEARNED, "lr": max(0.0, 3e-4 * (1 - at / 400))}),
        "schedule-over",
        "the learning rate is 0 at iteration 500 of 1,000",
    ),
    "spikes": ([*healthy(60), *map(spike, (20, 40, 60))], "loss-spikes", "the last at iteration 60"),
    "fp16": (
        changed(200, lambda at: {"skipped": at % 10 == 0}),
        "updates-skipped",
        "20 of the last 200 lines",
    ),
    "experts": (
        changed(300, lambda at: {**LEARNED, "moe_max_load": 3.9}),
        "experts-uneven",
        "moe_max_load is 3.90",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_recognized_alone_with_its_figures(tmp_path: Path, case: str) -> None:
    events, name, evidence = CASES[case]
    run = write_run(tmp_path / "run", events, model={"vocab_size": 50257, "seq_length": 2048})
    found = causes(run)
    assert list(found) == [name]
    assert evidence in found[name]


def test_a_rank_that_was_slow_once_is_no_cause(tmp_path: Path) -> None:
    assert causes(write_run(tmp_path / "run", [*healthy(60), straggler(50)])) == {}


def test_what_slowed_a_run_that_is_done_costs_nothing_any_more(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [*healthy(60), straggler(50), straggler(60)])
    files = read_run_files(run, START + STEP_S * 2000)
    assert [cause.effect for cause in diagnose(files)] == ["costs"]
    assert [cause.effect for cause in diagnose(replaced(files, state="done"))] == ["harmless"]


@pytest.mark.parametrize("count", [1, 10, 60, 200, 900])
def test_a_healthy_run_of_any_length_has_no_cause(tmp_path: Path, count: int) -> None:
    run = write_run(tmp_path / "run", healthy(count), model={"vocab_size": 50257, "seq_length": 2048})
    assert causes(run) == {}


def planned_run(directory: Path, step_time_s: float, **sections: Any) -> Path:
    """A run on NDv5 nodes with the files that its job writes, whose steps take this long."""
    plan = planned(
        directory, big_run(preset="llama3-8b", slurm={"train": {"nodes": 4, "time": "1:00:00"}}, **sections)
    )
    assert plan.trainer is not None
    files = plan.stages["train"].files
    assert plan.layout is not None
    run = directory / "run"
    job = run / "jobs" / "4711"
    job.mkdir(parents=True)
    for name in ("trainer.json", "machine.json"):
        (job / name).write_text(files[name])
    write_checkpoint(run / "checkpoints", 60)  # a real one of this size has no room on most machines
    size = plan.trainer.training.global_batch_size
    layout = {"pp": plan.trainer.parallelism.pipeline_model_parallel_size, "world_size": 32, "dp": 4}
    events = [
        start(**layout),
        *steps(1, 60, step_time_s=step_time_s, batch_size=size, idle_s=0.01, **LEARNED),
    ]
    for event in events:
        event.update({name: 0.0 for name in ("data_wait_s", "communication_s") if name in event})
    (run / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def test_a_slow_run_is_compared_with_its_prediction(tmp_path: Path) -> None:
    found = causes(planned_run(tmp_path, 1000.0))
    assert list(found) == ["slower-than-predicted"]
    assert "iterations 1 to 60: 16 min 40 s per step (median); predicted: " in found["slower-than-predicted"]
    assert causes(planned_run(tmp_path / "fast", 0.1)) == {}


def test_uneven_stages_are_named(tmp_path: Path) -> None:
    parallelism = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 4,
        "num_layers_in_first_pipeline_stage": 2,
    }
    found = causes(planned_run(tmp_path, 0.1, parallelism=parallelism))
    assert list(found) == ["unbalanced-pipeline"]
    assert "times the mean of the stages" in found["unbalanced-pipeline"]


def test_a_nearly_full_gpu_is_named(tmp_path: Path) -> None:
    run = planned_run(tmp_path, 0.1)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["peak_memory_gib"] = 79.0
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(causes(run)) == ["memory-nearly-full"]
