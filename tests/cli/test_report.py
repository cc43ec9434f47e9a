"""The report's content for long, incomplete, new and unusual runs."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcgen import load_run, plan, predict
from hpcgen.report.downsample import MAX_BUCKETS, downsample
from hpcgen.report.scale import Scale, scale_for, tick_texts
from hpcgen.runs.history import read_history
from hpcgen.text import duration
from tests.cli.command import hpcgen
from tests.cli.reports import Page, report
from tests.recorded_run import START, start, step, steps, write_run
from tests.runs import big_run, minimal_run, planned, write_yaml


def test_a_report_has_everything_that_was_recorded(eventful: Path) -> None:
    (eventful / "FAILED").write_text("the loss is nan at iteration 161\n")
    page = report(eventful)
    assert page.charts == [
        "loss",
        "recent-loss",
        "grad-norm",
        "lr",
        "tokens",
        "flops",
        "step-time",
        "shares",
        "memory",
        "checkpoints",
    ]
    for words in (
        "The run failed: the loss is nan at iteration 161",
        "160 of 1,000",
        "MFU 13%",
        "61.5 GiB",
        "stopped: SIGUSR2",
        "ended without a message: it was killed, crashed, or lost a node",
        "failed: the loss is nan at iteration 161",
        "120: iter_0000120",
        "0: random weights",
        "5 min",  # from the last line of the first attempt to the second
        "attempt 3: optimizer.lr 0.0003 → 0.0001",
        "122; 2 steps lost",
        "5 min 40 s",  # from the last line that was lost to the third attempt
        "Attempt 3 skipped /runs/gpt/checkpoints/iter_0000124: __0_0.distcp is missing. It was renamed.",
        "0.8 s 31 s in the background 112.0 GB /runs/gpt/checkpoints/iter_0000100",
        "30,720 to 30,975 skipped",
        "13 ndv5-002 1 1.43 × the median",
        "MFU = TFLOP/s per device / 989 TFLOP/s",
        "megatron-lm: 3 x forward matrix products",
        "TP 2 × PP 1 × CP 1 × DP 8",
        "torch 2.13.0",
        "2: ndv5-001, ndv5-002",
    ):
        assert words in page.text
    restarts = [attributes["title"] for tag, attributes in page.tags if attributes.get("class") == "vertical"]
    assert "attempt 2, from iteration 120" in restarts
    assert page.series("loss")["x"][-1] == 160
    assert page.series("loss", 1) == {"label": "valid", "color": 1, "x": [100], "middle": [3.25]}
    assert page.series("grad-norm")["low"][121] is None


def test_a_report_shows_the_losses_of_mtp_layers(tmp_path: Path) -> None:
    """There is a gap where lines lack a loss."""
    events = [
        start(),
        *steps(1, 30, mtp_1_loss=4.5),
        start(30),
        *steps(31, 60, mtp_1_loss=4.25, mtp_2_loss=5.5),
    ]
    predicting = write_run(tmp_path / "predicting", events)
    page = report(predicting)
    assert [page.series("mtp-loss", i)["label"] for i in range(3)] == [
        "main loss",
        "MTP layer 1",
        "MTP layer 2",
    ]
    first, second = page.series("mtp-loss", 1), page.series("mtp-loss", 2)
    assert (first["middle"][0], first["middle"][-1]) == (4.5, 4.25)
    assert (second["middle"][0], second["middle"][-1]) == (None, 5.5)

    dense = write_run(tmp_path / "dense", [start(), *steps(1, 60)])
    both = report(dense, predicting)
    assert both.values["charts"]["mtp-loss"]["series"][0]["label"] == "predicting"
    assert len(both.values["charts"]["mtp-loss"]["series"]) == 1
    assert "mtp-loss" not in report(dense).charts


def test_a_report_shows_the_objective_and_metrics_of_the_user(tmp_path: Path) -> None:
    own = {
        "losses": ["mtp_1_loss", "objective", "kl", "output_z_loss"],
        "metrics": ["accuracy", "</script>", 7],
    }
    values = {"objective": 3.5, "kl": 0.5, "output_z_loss": 48.0, "accuracy": 0.25}
    evaluation = {"event": "evaluation", "iteration": 30, "time": 1.0, "split": "valid", "loss": 2.0}
    events = [start() | own, *steps(1, 30, **values), evaluation | {"accuracy": 0.75}]
    run = write_run(tmp_path / "own", events)
    page = report(run)
    assert [page.series("objective", i)["label"] for i in range(3)] == ["loss", "objective", "kl"]
    assert page.series("output-z-loss", 0)["middle"][0] == 48.0
    assert page.series("metric-accuracy", 0)["middle"][0] == 0.25
    assert page.series("metric-accuracy", 1)["middle"] == [0.75]
    assert not any("script" in key for key in page.charts)
    other = write_run(tmp_path / "plain", [start(), *steps(1, 30)])
    both = report(run, other).values["charts"]
    assert [each["label"] for each in both["own-accuracy"]["series"]] == ["own"]
    assert "objective" not in report(other).charts


def test_a_report_shows_where_the_stages_of_the_data_begin(tmp_path: Path) -> None:
    """The last attempt repeats the end of a stage."""
    events = [
        start(),
        *steps(1, 30, stage="general"),
        *steps(31, 40, stage="decay"),
        start(20, START + 100),
        *steps(21, 30, stage="general"),
        *steps(31, 60, stage="decay"),
    ]
    page = report(write_run(tmp_path / "gpt", events))
    lines = [attributes["title"] for tag, attributes in page.tags if attributes.get("class") == "vertical"]
    assert "stage decay, after iteration 30" in lines
    assert not any("general" in line for line in lines)
    assert "vertical lines: attempts and stages of the data (decay after iteration 30)" in page.text
    assert "stages of the data" not in report(write_run(tmp_path / "one", [start(), *steps(1, 60)])).text


def experts(iteration: int, load: object, layers: object = (1, 2)) -> dict[str, object]:
    return {"event": "experts", "iteration": iteration, "time": START, "layers": layers, "load": load}


def test_a_report_shows_the_load_of_the_experts(tmp_path: Path) -> None:
    loads = {"moe_max_load": 2.5, "moe_min_load": 0.25, "moe_dropped": 0.125}
    events = [
        start(ep=4, etp=1),
        *steps(1, 50, **loads),
        experts(1, [[4, 0, 0, 0], [1, 1, 1, 1]]),
        experts(50, [[2.5, 1, 0.25, 0.25], [0.6, 1, 1, 1.4]]),
    ]
    page = report(write_run(tmp_path / "gpt", events))
    assert {"expert-load", "experts", "dropped"} <= set(page.charts)
    assert [page.series("expert-load", i)["middle"][-1] for i in (0, 1)] == [2.5, 0.25]
    assert page.series("dropped")["middle"][-1] == 0.125
    found = page.series("experts")
    assert (found["x"], found["low"], found["high"]) == (
        [0, 1, 2, 3],
        [0.6, 1, 0.25, 0.25],
        [2.5, 1, 1, 1.4],
    )
    assert "at iteration 50" in page.text
    assert "EP 4 × ETP 1" in page.text
    [cells] = [a["d"] for _, a in page.tags if a.get("class") == "strong c0"]
    assert cells == "M500.0 500.0h500.0v500.0h-500.0Z"  # two idle neighbors in the lower row, the first layer
    [busy] = [a["d"] for _, a in page.tags if a.get("class") == "faint c1"]
    assert busy == "M750.0 0.0h250.0v500.0h-250.0Z"


def test_the_terminal_shows_the_load_of_the_experts(tmp_path: Path) -> None:
    gpt = write_run(tmp_path / "gpt", [start(), *steps(1, 50, moe_max_load=7.96, moe_min_load=0)])
    shown = hpcgen("report", gpt)
    assert "\nexpert load 0.00 to 7.96 (1 is an even share)\n" in shown.stdout
    dense = hpcgen("report", write_run(tmp_path / "dense", [start(), *steps(1, 50)]))
    assert "expert" not in dense.stdout
    loads = {"moe_max_load": 1.25, "moe_min_load": 0.5, "moe_dropped": 0.314}
    capacity = hpcgen("report", write_run(tmp_path / "capacity", [start(), *steps(1, 50, **loads)]))
    assert "\nexpert load 0.50 to 1.25 (1 is an even share), 31% dropped\n" in capacity.stdout


@pytest.mark.parametrize(
    "event",
    [
        experts(1, None),
        experts(1, [[1, "x"], [1, 1]]),
        experts(1, [[1, 1], [1]]),
        experts(1, [[1, 1]]),
        experts(1, [[1, None], [1, 1]]),
        experts(1, [[], []]),
        experts(1, [[1], [1]], layers="ab"),
    ],
)
def test_loads_that_the_trainer_did_not_write_are_not_drawn(event: dict[str, object], tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "gpt", [start(), *steps(1, 50), event]))
    assert not {"expert-load", "experts", "dropped"} & set(page.charts)


def test_a_report_makes_no_network_requests(eventful: Path) -> None:
    page = report(eventful)
    policy = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert [str(each).partition(";")[0] for each in policy] == ["default-src 'none'"]
    assert not [a for _, a in page.tags if {"src", "href"} & a.keys() and a.get("href") != "data:,"]
    assert "http" not in page.source.replace("http-equiv", "")


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    run = write_run(tmp_path / "run", [start(name=hostile, hosts=[hostile]), *steps(1, 3)], hostile)
    (run / "FAILED").write_text(hostile)
    page = report(run)
    assert hostile in page.text
    assert [tag for tag, _ in page.tags if tag in ("script", "img")] == ["script", "script"]


def test_text_from_a_run_cannot_control_the_terminal(tmp_path: Path) -> None:
    hostile = "a\x1b]0;owned\x07\u202eb"
    evaluation = {"event": "evaluation", "iteration": 3, "time": 1.0, "split": hostile, "loss": 2.0}
    run = write_run(tmp_path / "run", [start(name=hostile), *steps(1, 3), evaluation], hostile)
    (run / "FAILED").write_text(f"{hostile}\n")
    shown = hpcgen("report", run).stdout
    assert shown.count(r"a\x1b]0;owned\x07\u202eb") == 3
    assert not set("\x1b\x07\u202e") & set(shown)


def test_half_a_million_steps_fit_into_a_small_file_with_their_extremes(tmp_path: Path) -> None:
    count = 500_000
    loss = np.full(count, 2.0)
    loss[[123_456, 400_001]] = 77.0, 0.25
    buckets = downsample(np.arange(1.0, count + 1), loss)
    assert len(buckets.x) == MAX_BUCKETS
    assert (buckets.high.max(), buckets.low.min(), buckets.x[-1]) == (77.0, 0.25, count)
    assert np.all(buckets.middle == 2.0)


def test_a_long_run(tmp_path: Path) -> None:
    events = steps(1, 4000)
    events[1233]["loss"] = 55.5
    events[2000]["step_time_s"] = 600.0
    page = report(write_run(tmp_path / "run", [start(train_iters=4000), *events]))
    assert max(page.series("loss")["high"]) == 55.5
    assert max(page.series("step-time")["high"]) == 600
    assert all(len(places) <= MAX_BUCKETS for places in page.values["places"])
    assert len(page.source) < 350_000


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0, 100, ["0", "20", "40", "60", "80", "100"]),
        (2.0002, 2.0012, ["2.0002", "2.0004", "2.0006", "2.0008", "2.001", "2.0012"]),
        (0, 500_000, ["0", "100k", "200k", "300k", "400k", "500k"]),
        (0, 3e-4, ["0", "5e-5", "0.0001", "0.00015", "0.0002", "0.00025", "0.0003"]),
        (-1.5, 1.5, ["-1.5", "-1", "-0.5", "0", "0.5", "1", "1.5"]),
    ],
)
def test_ticks_are_round_and_distinct(low: float, high: float, texts: list[str]) -> None:
    assert tick_texts(Scale(low=low, high=high).ticks()) == texts


def test_a_logarithmic_axis_is_for_large_ranges() -> None:
    scale = scale_for(2.0, 11.0, log_from=2.5)
    assert scale.is_log
    assert tick_texts(scale.ticks()) == ["2", "3", "5", "10"]
    assert not scale_for(2.0, 4.0, log_from=2.5).is_log
    assert not scale_for(0.0, 11.0, log_from=2.5).is_log


def test_a_run_that_is_being_written(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 5)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"event": "step", "iteration": 6, "lo')
    page = report(run)
    assert page.series("loss")["x"] == [1, 2, 3, 4, 5]
    assert "unreadable" not in page.text


def test_values_that_are_not_numbers_are_gaps(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", [start(), *steps(1, 3), step(4, loss=math.nan), step(5, loss=None), *steps(6, 7)]
    )
    assert "NaN" in (run / "metrics.jsonl").read_text()
    page = report(run)
    losses = page.series("loss")["middle"]
    assert [loss is None for loss in losses] == [False] * 3 + [True] * 2 + [False] * 2
    assert page.source.count("NaN") == 0


def test_damaged_lines_are_reported_and_unknown_events_are_not(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [start(), *steps(1, 3), {"event": "from-the-future", "iteration": 3}])
    metrics = run / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'\0\0\0\n[1, 2]\n{"event": "step"}\n\n')
    ignored = f"3 unreadable lines of {run}/metrics.jsonl ignored"
    page = report(run, warning=f"warning: {ignored}\n")
    assert ignored in page.text
    assert page.series("loss")["x"] == [1, 2, 3]


def test_steps_repeated_by_a_later_attempt_count_once(tmp_path: Path) -> None:
    again = [step(iteration, loss=1.0) for iteration in (3, 4)]
    run = write_run(tmp_path / "run", [start(), *steps(1, 9), start(2, START + 100), *again])
    history = read_history(run / "metrics.jsonl")
    assert history.iteration.tolist() == [1, 2, 3, 4]
    assert history.columns["loss"].tolist()[2:] == [1.0, 1.0]
    assert [attempt.last_iteration for attempt in history.attempts] == [2, 4]


def test_an_attempt_that_completed_its_plan_is_not_called_killed(tmp_path: Path) -> None:
    events = [start(train_iters=3), *steps(1, 3), start(3, START + 90, train_iters=6), *steps(4, 6)]
    text = report(write_run(tmp_path / "extended", events)).text
    assert "completed the last iteration planned at its start" in text
    assert "ended without a message" not in text


def test_one_step_is_a_report(tmp_path: Path) -> None:
    page = report(write_run(tmp_path / "run", [start(), step(1)]))
    assert page.series("loss")["middle"] == [pytest.approx(step(1)["loss"], rel=1e-4)]
    assert [attributes["d"] for _, attributes in page.tags if attributes.get("class") == "dots c0"]


def test_lines_of_an_older_trainer(tmp_path: Path) -> None:
    old = [{"event": "start", "iteration": 0}, {"event": "step", "iteration": 1, "loss": 3.0, "lr": 0.1}]
    page = report(write_run(tmp_path / "run", old))
    assert page.charts == ["loss", "lr"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "nothing to show, because it has no step"),
        ([start()], "nothing to show, because the run has started but has not completed a step yet"),
    ],
)
def test_nothing_to_show_ends_with_status_2(tmp_path: Path, events: list[dict[str, Any]], said: str) -> None:
    run = write_run(tmp_path / "run", events)
    ended = hpcgen("report", run)
    assert (ended.status, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert not (run / "report.html").exists()


def test_a_run_file_names_its_run_directory(tmp_path: Path) -> None:
    write_run(tmp_path / "runs/a", [start(), *steps(1, 3)])
    run_file = write_yaml(tmp_path / "a.yaml", minimal_run(paths={"run_dir": "runs/a"}))
    ended = hpcgen("report", run_file)
    assert (ended.status, ended.stderr) == (0, f"wrote {tmp_path}/runs/a/report.html\n")


def test_a_directory_of_runs_names_them(tmp_path: Path) -> None:
    for name in ("b c", "a"):
        write_run(tmp_path / name, [start(), *steps(1, 3)])
    ended = hpcgen("report", tmp_path)
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"{tmp_path}/metrics.jsonl: no such file; it has 2 run directories; name the runs to compare: "
        f"{tmp_path}/a, '{tmp_path}/b c'\n"
    )


def test_a_directory_that_is_not_a_run_exits_with_status_2(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path, f"{tmp_path}/metrics.jsonl: no such file; the run has not started yet, or"),
        (tmp_path / "nothing", "no such directory; give the directory of a run"),
        (tmp_path / "file", f"{tmp_path}/file is a file; give the run directory"),
    ):
        ended = hpcgen("report", path)
        assert (ended.status, ended.stdout) == (2, "")
        assert said in ended.stderr


def test_figures_as_json_and_in_the_terminal(eventful: Path) -> None:
    (eventful / "DONE").write_text("160\n")
    [summary] = json.loads(hpcgen("report", eventful, "--json").stdout)
    assert not (eventful / "report.html").exists()
    assert {name: summary[name] for name in ("state", "iteration", "starts", "skipped_steps", "spikes")} == {
        "state": "done",
        "iteration": 160,
        "starts": 3,
        "skipped_steps": 2,
        "spikes": 1,
    }
    assert summary["consumed_tokens"] == 160 * 256 * 2048
    assert summary["evaluations"] == {"valid": 3.25}
    assert summary["shares"]["communication"] == pytest.approx(0.1)
    assert summary["attempts"][1]["waited_s"] == 300
    assert summary["job_time_s"] == 241 + (560 - 541)  # without the 300 s and 340 s between the attempts
    ended = hpcgen("report", eventful)
    assert ended.stderr == f"wrote {eventful}/report.html\n"
    lines = ended.stdout.splitlines()
    assert lines[0] == "gpt: done, iteration 160 of 1,000"
    assert re.fullmatch(r"loss 10\.82\d .* \(mean of the last 16 of 160 steps\)", lines[1])
    assert lines[-1] == (
        "2 s per step, 262,144 tokens/s, 128 TFLOP/s per device, MFU 13%, 61.5 GiB, 3 attempts"
    )
    assert (
        Page(hpcgen("report", eventful, "-o", "-").stdout).charts
        == Page((eventful / "report.html").read_text()).charts
    )


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"garbage\nmore of it\n\0\xff\n", "it has no step (line 1 is not JSON; 3 of 3 lines ignored)"),
        (b"garbage", "it has no step (line 1 is not JSON; 1 of 1 line ignored)"),
        (
            b'{"event": "from-the-future", "iteration": 1}\n{"loss": 2}\n',
            "line 2 was not written by the trainer; 1 of 2 lines",
        ),
        (
            json.dumps(start()).encode() + b"\n{{\n",
            "has not completed a step yet (line 2 is not JSON; 1 of 2 lines ignored",
        ),
    ],
)
def test_an_unrelated_file_is_reported_as_such(tmp_path: Path, content: bytes, said: str) -> None:
    run = write_run(tmp_path / "run", [])
    (run / "metrics.jsonl").write_bytes(content)
    ended = hpcgen("report", run)
    assert (ended.status, ended.stdout) == (2, "")
    assert said in ended.stderr


def gpu_run(directory: Path, **parallelism: int) -> Path:
    """A recorded run with the job files of a planned one on 16 GPUs."""
    training = {"micro_batch_size": 4, "global_batch_size": 256, "train_iters": 1000}
    run = big_run(preset="1.3b", training=training, parallelism=parallelism, data={"mock": True})
    found = planned(directory, run, overrides=["slurm.train.nodes=2"])
    recorded = write_run(directory / "gpt", [start(), *steps(1, 50)])
    for name, text in found.stages["train"].files.items():
        (recorded / "jobs/4711" / name).write_text(text)
    return recorded


def test_steps_are_compared_with_the_prediction(tmp_path: Path) -> None:
    """The prediction is the one that validate printed, for the batch size of the latest steps."""
    recorded = gpu_run(tmp_path)
    predicted = predict(plan(load_run(tmp_path / "run.yaml", ["slurm.train.nodes=2"]))).step.total
    [found] = json.loads(hpcgen("report", recorded, "--json").stdout)
    assert found["predicted_step_time_s"] == pytest.approx(predicted)
    assert 0.1 < predicted < 2
    words = f"{100 * (2 / predicted - 1):.0f}% slower than the predicted {duration(predicted)}"
    assert f"2 s per step ({words})" in hpcgen("report", recorded, "-o", tmp_path / "x.html").stdout
    assert words in report(recorded).text


def test_the_prediction_is_that_with_the_measurements_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    between = [
        {"collective": name, "ranks": 16, "domains": 2, "bytes": 2**30, "us": 1e5}
        for name in ("all_gather", "reduce_scatter")
    ]
    table = {"format": 1, "device": "cuda", "gpu_model": "H100 SXM 80 GB", "measured": {"date": "2026-11-26"}}
    path = tmp_path / "xdg/hpcgen/clusters/azure-ndv5.measured.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**table, "collectives": between}))
    recorded = gpu_run(tmp_path)
    predicted = predict(plan(load_run(tmp_path / "run.yaml", ["slurm.train.nodes=2"]))).step
    [found] = json.loads(hpcgen("report", recorded, "--json").stdout)
    assert found["predicted_step_time_s"] == pytest.approx(predicted.total)
    assert predicted.data_parallel > 0.05


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("machine.json", None),
        ("machine.json", "{"),
        ("machine.json", "[1]"),
        ("machine.json", '{"node_type": "of another site", "gpus_per_node": 8, "nvlink_nodes": 1}'),
        ("machine.json", '{"node_type": "cpu", "gpus_per_node": 8, "nvlink_nodes": 1}'),
        ("machine.json", '{"node_type": ["ndv5"], "gpus_per_node": {}, "nvlink_nodes": 1}'),
        (
            "machine.json",
            '{"node_type": "ndv5", "gpus_per_node": 8, "nvlink_nodes": 1, "measured": ["/etc/hostname", 3]}',
        ),
        ("trainer.json", '{"model": {}, "training": {}}'),
        ("trainer.json", '{"model": {"num_layers": 0}, "training": {}, "of_a_later_version": 1}'),
    ],
)
def test_without_known_nodes_and_configuration_there_is_no_prediction(
    tmp_path: Path, file: str, content: str | None
) -> None:
    recorded = gpu_run(tmp_path)
    path = recorded / "jobs/4711" / file
    path.unlink() if content is None else path.write_text(content)
    found = hpcgen("report", recorded, "--json")
    assert (found.status, json.loads(found.stdout)[0]["predicted_step_time_s"]) == (0, None)
