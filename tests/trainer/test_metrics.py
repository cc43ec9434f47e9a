"""Contents of metrics.jsonl, TensorBoard and the log, and their formulas."""

from __future__ import annotations

import dataclasses
import fcntl
import gzip
import json
import os
import re
import socket
import statistics
import struct
import termios
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S, wait_until
from tests.trainer.runs import GPT, LLAMA, MOE, Run, finished, gpt_config, run
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files.metrics_times import TIMES, read_note
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.model.batch_size import Batch
from trainer.contract.model.flops import flops_per_iteration
from trainer.distributed.peers import call_with_timeout
from trainer.metrics import json_lines, tensorboard
from trainer.metrics.console import Log
from trainer.metrics.json_lines import JsonLines, drop_after
from trainer.metrics.record import Metrics
from trainer.metrics.tensorboard import open_tensorboard
from trainer.metrics.timers import Timers
from trainer.step import StepResult, Vote

GPT_1_3B = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 50304,
}
LLAMA_8_LAYERS = {
    "num_layers": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 4096,
    "swiglu": True,
    "vocab_size": 128256,
}


@pytest.mark.process
def test_the_first_line_describes_the_attempt_and_each_step_has_its_numbers(single_gpt: Run) -> None:
    start, *steps = [event for event in single_gpt.events if event["event"] in ("start", "step")]
    assert start["event"] == "start"
    assert "megatron-lm" in start["flop_formula"]
    assert "TFLOP/s as in Megatron-LM (metrics.jsonl has the formula), no MFU" in single_gpt.log
    assert start["tokens_per_sample"] == GPT["seq_length"]
    assert start["hosts"] == [socket.gethostname()]
    assert (start["tp"], start["pp"], start["cp"], start["dp"], start["vpp"]) == (1, 1, 1, 1, 1)
    assert (start["train_iters"], start["checkpoint"], start["changed"]) == (6, None, [])
    assert start["versions"].keys() >= {"trainer", "torch", "megatron-core"}
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [step["consumed_samples"] for step in steps] == [4, 8, 12, 16, 20, 24]
    for step in steps:
        tokens = step["batch_size"] * start["tokens_per_sample"]
        assert step["tokens_per_s"] == pytest.approx(tokens / step["step_time_s"])
        assert step["model_tflops_per_device"] * 1e12 * step["step_time_s"] == pytest.approx(
            start["flops_per_sample"] * step["batch_size"]
        )
        assert step["peak_memory_gib"] > 0
        assert step["skipped"] is False
        assert "mfu" not in step


@pytest.mark.process
def test_the_parts_of_a_step_add_up_to_it(single_gpt: Run) -> None:
    sums = []
    for step in (event for event in single_gpt.events if event["event"] == "step"):
        parts = [step[name] for name in ("compute_s", "communication_s", "update_s", "data_wait_s", "idle_s")]
        assert min(parts) > 0
        sums.append(sum(parts) / step["step_time_s"])
    # data_wait_s also has the time in which another process has the core, between two looks at the clock.
    assert min(sums) > 0.99
    assert statistics.median(sums) == pytest.approx(1, rel=0.01)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # tokens/s and TFLOP/s that Megatron-LM's formula gave for the same shapes
        pytest.param(GPT_1_3B, 514e12 / 60_727, id="GPT 1.3B"),
        pytest.param(LLAMA_8_LAYERS, 565e12 / 39_140, id="Llama, 8 layers"),
    ],
)
def test_flops_agree_with_megatron_lm(model: dict[str, Any], expected: float, tmp_path: Path) -> None:
    config = resolve(configuration.from_dict(TrainerConfig, gpt_config("x", tmp_path, model), "test"))
    per_token = flops_per_iteration(config) / (config.training.global_batch_size * config.model.seq_length)
    assert per_token == pytest.approx(expected, rel=0.005)


def test_repeated_and_incomplete_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": "step", "iteration": i}) + "\n" for i in range(1, 6)]
    first, evaluation, stop, second = (
        json.dumps({"event": event, "iteration": i}) + "\n"
        for event, i in (("start", 0), ("evaluation", 3), ("stop", 5), ("start", 5))
    )
    torn = '{"event": "step", "iter\n{"event": "step", "iteration": null}\n{"event": "start", "iteration": "1"}\n'
    path.write_text(
        "".join([first, *lines[:3], evaluation, torn, *lines[3:], stop, second]) + '{"event": "st'
    )
    last_step = tmp_path / "last-step.json"
    no_times = dict.fromkeys(TIMES, 0.0)
    assert drop_after(path, 3, last_step) == {"iteration": 5, "time": None, **no_times}
    assert path.read_text() == "".join([first, *lines[:3], stop, second])
    assert drop_after(path, 3, last_step) is None
    assert drop_after(tmp_path / "absent", 3, last_step) is None
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_what_a_kill_between_lines_loses_is_counted(metrics: Metrics, tmp_path: Path) -> None:
    """Lines come every two steps. The killed attempt has reached step 3, and the next one resumes after step 1."""
    path, last_step = tmp_path / "metrics.jsonl", tmp_path / "last-step.json"
    began = time.perf_counter()
    metrics.step(1, step_result(0, 5.0))
    metrics.catch_up(1)
    metrics.step(2, step_result(4, 5.0))
    saved_s = metrics.paused("save_s")
    metrics.step(3, step_result(8, 5.0))
    lasted_s = time.perf_counter() - began
    wait_until(
        lambda: (read_note(last_step) or {}).get("iteration") == 3, last_step.read_text, interval_s=0.01
    )
    lost = drop_after(path, 1, last_step)
    assert lost is not None
    assert (lost["iteration"], lost["save_s"]) == (3, pytest.approx(saved_s, abs=1e-5))
    assert 0 < lost["steps_s"] <= lasted_s - saved_s + 1e-5
    assert not last_step.exists()
    assert [json.loads(line)["event"] for line in path.read_text().splitlines()] == ["first_step", "step"]


def test_a_record_that_cannot_be_rewritten_ends_the_attempt_with_a_line(tmp_path: Path) -> None:
    path = tmp_path / ("m" * 250)  # a longer one for the new file is refused
    path.write_text('{"event": "step", "iteration": 1}\n')
    with pytest.raises(TrainerError, match=r"mmm.* cannot be written \(File name too long\)") as error:
        drop_after(path, 0, tmp_path / "last-step.json")
    assert error.value.retry
    assert path.read_text()


def opened_over(storage: Path, path: Path, complaints: list[str]) -> JsonLines:
    """Lines whose open file is then on other storage, which a path of its own could not name: only files are opened."""
    lines = JsonLines(path, complaints.append)
    other = os.open(storage, os.O_WRONLY)
    os.dup2(other, lines._file.fileno())
    os.close(other)
    return lines


def test_a_full_disk_costs_lines_and_not_the_training(tmp_path: Path) -> None:
    complaints: list[str] = []
    lines = opened_over(Path("/dev/full"), tmp_path / "lines", complaints)
    for iteration in range(3):
        lines.write({"event": "step", "iteration": iteration})
    lines.close()
    assert len(complaints) == 1
    assert "No space left on device" in complaints[0]


def hanging_file(path: Path) -> int:
    """Makes `path` a pipe that blocks after a page, like hanging storage, until the returned end is read."""
    pipe = path.with_name("pipe")
    os.mkfifo(pipe)
    pipe.replace(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 4096)
    os.set_blocking(reader, True)
    return reader


def test_hanging_storage_delays_no_step_and_the_end_only_briefly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "CLOSE_S", 0.5)
    complaints: list[str] = []
    reader = hanging_file(tmp_path / "storage")
    lines = opened_over(tmp_path / "storage", tmp_path / "lines", complaints)
    entries = [{"event": "step", "iteration": iteration} for iteration in range(1000, 2000)]
    call_with_timeout(PATIENCE_S, lambda: [lines.write(entry) for entry in entries])
    call_with_timeout(PATIENCE_S, lines.close)
    [taken] = struct.unpack("i", fcntl.ioctl(reader, termios.FIONREAD, bytes(4)))
    left = len(entries) - taken // len(json.dumps(entries[0]) + "\n")
    assert 0 < left < len(entries)
    assert complaints == [
        f"{tmp_path / 'lines'}: the last {left} lines may be missing: not written within 0.5 s"
    ]
    with os.fdopen(reader) as file:  # training continues
        assert [json.loads(line) for line in file] == entries


def test_hanging_storage_of_tensorboard_delays_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tensorboard, "CLOSE_S", 0.5)
    board = open_tensorboard(tmp_path, 0, Log(is_rank_0=True, progress=False))
    assert board is not None
    [path] = tmp_path.iterdir()
    reader = hanging_file(path)
    call_with_timeout(
        PATIENCE_S, lambda: [board.scalars(iteration, {"train/loss": 1.0}) for iteration in range(1, 1001)]
    )
    call_with_timeout(PATIENCE_S, board.close)
    assert "TensorBoard: the last points may be missing: not written within 0.5 s" in capsys.readouterr().out
    written = b""
    while written.count(b"train/loss") < 1000:  # training continues
        written += os.read(reader, 4096)
    os.close(reader)


def test_numbers_that_json_lacks_are_null(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "lines", print)
    lines.write({"event": "evaluation", "iteration": 1, "loss": float("nan")})
    lines.close()
    assert json.loads((tmp_path / "lines").read_text())["loss"] is None


@pytest.mark.process
def test_interval_mfu_profile_and_boards(config: dict[str, Any]) -> None:
    config["logging"] = {"log_interval": 4, "tensorboard": True, "prometheus": True, "profile_step_start": 2}
    config["peak_tflops"] = 0.5
    result = finished(config)
    assert "MFU relative to 0.5 TFLOP/s (fp32)" in result.log
    steps = [event for event in result.events if event["event"] == "step"]
    assert [step["iteration"] for step in steps] == [4, 6]
    for step in steps:
        assert step["mfu"] == pytest.approx(step["model_tflops_per_device"] / 0.5)
    drawn = read_tensorboard(result.directory / "tensorboard")
    assert drawn["train/loss"] == pytest.approx({step["iteration"]: step["loss"] for step in steps})
    figures = (result.directory / "metrics.prom").read_text()
    assert re.search(r'^hpcgen_training_iteration\{run="\w+",slurm_job=""\} 6\.0$', figures, re.MULTILINE), (
        figures
    )
    [profile] = (result.directory / "profile").iterdir()
    assert profile.name == "iterations-2-3-rank-0.json.gz"
    assert str(profile) in result.log
    with gzip.open(profile) as trace:
        names = {event.get("name") for event in json.load(trace)["traceEvents"]}
    assert "aten::mm" in names


@pytest.mark.process
def test_the_losses_of_mtp_layers_are_drawn(corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path / "run", LLAMA | {"mtp_num_layers": 2})
    config["training"]["train_iters"] = 2
    config["logging"] = {"tensorboard": True}
    result = finished(config)
    steps = [event for event in result.events if event["event"] == "step"]
    drawn = read_tensorboard(result.directory / "tensorboard")
    for name in ("mtp_1_loss", "mtp_2_loss"):
        assert drawn[f"train/{name}"] == pytest.approx({step["iteration"]: step[name] for step in steps})


@pytest.mark.process
def test_the_load_of_experts_is_drawn_for_each_layer(corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path / "run", MOE)
    config["training"]["train_iters"] = 2
    config["logging"] = {"log_interval": 2, "tensorboard": True}
    result = finished(config)
    [line] = [event for event in result.events if event["event"] == "step"]
    drawn = read_tensorboard(result.directory / "tensorboard")
    assert drawn["train/moe_max_load"] == {2: pytest.approx(max(line["moe_max_load_by_layer"]))}
    layers = [drawn[f"experts/max_load/layer_{layer}"][2] for layer in (1, 2, 3)]
    assert layers == pytest.approx(line["moe_max_load_by_layer"])
    load = f"expert load {line['moe_min_load']:.2f} to {line['moe_max_load']:.2f}"
    assert load in result.log


@pytest.mark.process
def test_each_step_is_in_a_line_whatever_the_interval(config: dict[str, Any], single_gpt: Run) -> None:
    """An attempt that resumes from a checkpoint has not seen earlier steps that are in no line yet."""
    config["checkpoint"] = {"save_interval": 3}
    config["logging"] |= {"log_interval": 4}
    lines = [event for event in finished(config).events if event["event"] == "step"]
    assert [(line["iteration"], line["steps"]) for line in lines] == [(3, 3), (4, 1), (6, 2)]
    assert lines[0]["loss"] == pytest.approx(statistics.fmean(step[1] for step in single_gpt.steps[:3]))


def test_a_full_disk_for_tensorboard_does_not_end_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tensorboard").touch()
    log = Log(is_rank_0=True, progress=False)
    assert open_tensorboard(tmp_path / "tensorboard", 0, log) is None
    assert "no TensorBoard files: " in capsys.readouterr().out


def test_tensorboard_hides_steps_that_an_attempt_repeats(tmp_path: Path) -> None:
    log = Log(is_rank_0=True, progress=False)
    for attempt, (begins_after, ends) in enumerate([(0, 6), (3, 5)]):
        board = open_tensorboard(tmp_path, begins_after, log)
        assert board is not None
        for iteration in range(begins_after + 1, ends + 1):
            board.scalars(iteration, {"train/loss": 10.0 * attempt + iteration})
        board.close()
    assert read_tensorboard(tmp_path) == {"train/loss": {1: 1.0, 2: 2.0, 3: 3.0, 4: 14.0, 5: 15.0}}


FAILING_LAYERS = """
import dataclasses
from megatron.core.transformer.transformer_layer import TransformerLayer

class FailingLayer(TransformerLayer):
    calls = 0

    def forward(self, *args, **kwargs):
        FailingLayer.calls += 1
        if FailingLayer.calls > 3:
            raise RuntimeError("a bug")
        return super().forward(*args, **kwargs)

def layers(core, vp_stage, usual):
    return dataclasses.replace(
        usual, layer_specs=[dataclasses.replace(layer, module=FailingLayer) for layer in usual.layer_specs]
    )
"""


@pytest.mark.process
def test_a_fault_loses_no_line(config: dict[str, Any], tmp_path: Path) -> None:
    layers = tmp_path / "failing_layers.py"
    layers.write_text(FAILING_LAYERS)
    config["model"] |= {"num_layers": 1, "layer_spec": f"{layers}:layers"}
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 1}
    result = run(config)
    assert result.statuses == (Exit.FAULT,)
    assert [event["event"] for event in result.events] == [
        "start",
        "first_step",
        "step",
        "step",
        "step",
        "end",
    ]


@pytest.fixture
def metrics(tmp_path: Path) -> Iterator[Metrics]:
    """Lines of a run of ten steps, one every two steps."""
    document = gpt_config("x", tmp_path)
    document["logging"] |= {"log_interval": 2}
    document["training"] |= {"train_iters": 10}
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    log = Log(is_rank_0=True, progress=False)
    log.start(0, 10)
    metrics = Metrics(config, RunDirectory.of(config), log, Timers("cpu"), 0, is_rank_0=True)
    yield metrics
    metrics.close()


def step_result(first: int, loss: float, **changes: Any) -> StepResult:
    usual = StepResult(
        consumed_tokens=0,
        batch=Batch(first, 4),
        loss=loss,
        grad_norm=1.0,
        lr=1e-3,
        loss_scale=1.0,
        spike=None,
        skipped=False,
        vote=Vote(),
    )
    return dataclasses.replace(usual, **changes)


def read_events(tmp_path: Path, count: int) -> list[dict[str, Any]]:
    """Events during a run, once there are enough of them. They are written soon, but not at once."""
    path = tmp_path / "metrics.jsonl"
    wait_until(lambda: path.read_text().count("\n") == count, path.read_text, interval_s=0.01)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_spike_is_logged_at_once_with_its_samples(
    metrics: Metrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metrics.step(1, step_result(0, 9.0, spike=3.0, skipped=True))
    _, spike = read_events(tmp_path, 2)
    assert spike.pop("time") > 0
    assert spike == {
        "event": "spike",
        "iteration": 1,
        "loss": 9.0,
        "height": 3.0,
        "first_sample": 0,
        "last_sample": 3,
        "skipped": True,
    }
    assert "iteration 1: LOSS SPIKE" in (shown := capsys.readouterr().out)
    assert "samples 0 to 3 were excluded from training" in shown
    metrics.step(2, step_result(4, 3.0))
    step = read_events(tmp_path, 3)[-1]
    assert (step["loss"], step["skipped"], step["consumed_samples"]) == (6.0, True, 8)


def test_an_overflow_has_no_norm(
    metrics: Metrics, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iteration in (1, 2):
        overflow = step_result(4 * iteration, 5.0, grad_norm=None, skipped=True, loss_scale=4096.0)
        metrics.step(iteration, overflow)
    _, step = read_events(tmp_path, 2)
    assert (step["grad_norm"], step["loss_scale"], step["loss"]) == (None, 4096.0, 5.0)
    shown = capsys.readouterr().out
    assert "iteration 1: OVERFLOW: no update, since the gradients are not finite at loss scale 4096" in shown
    assert "grad norm overflow" in shown


def test_a_line_shows_the_remaining_time(metrics: Metrics, capsys: pytest.CaptureFixture[str]) -> None:
    for iteration in range(1, 11):
        metrics.step(iteration, step_result(4 * iteration, 5.0))
    *lines, last = [line for line in capsys.readouterr().out.splitlines() if line.startswith("iteration")]
    assert [line.endswith(" left") for line in lines] == [True] * 4
    assert not last.endswith(" left")


def read_tensorboard(directory: Path) -> dict[str, dict[int, float]]:
    """The values that TensorBoard would draw, by tag and step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(directory)).Reload()
    return {
        tag: {point.step: point.value for point in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }
