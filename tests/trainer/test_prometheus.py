"""Figures for Prometheus: the file, the port, and what they cost."""

from __future__ import annotations

import json
import re
import stat
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.patience import wait_until
from tests.trainer.runs import gpt_config
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.files.run_directory import RunDirectory
from trainer.metrics.console import Log
from trainer.metrics.prometheus import FIGURES, NAMED, Prometheus, open_prometheus, text

LABELS = 'run="a\\"b",slurm_job="7"'
VALUES = {
    "train/loss": 2.5,
    "train/step_time_s": 0.5,
    "train/peak_memory_gib": 1.0,
    "train/consumed_tokens": 4096.0,
    "train/grad_norm": float("inf"),
}


def opened(directory: Path, **logging: Any) -> Prometheus:
    document = gpt_config("x", directory)
    document["logging"] |= {"prometheus": True, **logging}
    config = resolve(configuration.from_dict(TrainerConfig, document, "test"))
    log = Log(is_rank_0=True, progress=False)
    log.start(0, 10)
    return open_prometheus(config, RunDirectory.of(config), log)


def test_the_file_has_the_newest_figures(tmp_path: Path) -> None:
    board = opened(tmp_path)
    board.scalars(10, VALUES | {"train/loss": 3.0})
    board.scalars(12, VALUES)
    board.scalars(12, {"valid/loss": 2.75})
    board.close()
    [path] = tmp_path.rglob("metrics.prom")
    lines = path.read_text().splitlines()
    [loss] = [line for line in lines if line.startswith("megatron_training_loss{")]
    assert loss.endswith(" 2.5")
    [valid] = [line for line in lines if line.startswith("hpcgen_training_evaluation_loss{")]
    assert 'split="valid"} 2.75' in valid
    [duration] = [line for line in lines if line.startswith("megatron_training_step_duration_ms_sum{")]
    assert duration.endswith(" 1500.0"), "one step, then two"
    assert not list(path.parent.glob(".metrics.prom*"))


def test_prometheus_reads_the_format() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    values = VALUES | {"iteration": 12, "steps": 3, "steps_ms": 1500.0, "valid/loss": 2.75, "test/loss": 2.5}
    families = {family.name: family for family in parser.text_string_to_metric_families(text(values, LABELS))}
    for family in families.values():
        assert family.documentation
        assert family.type in ("gauge", "counter", "summary")
        for sample in family.samples:
            assert sample.labels.items() >= {"run": 'a"b', "slurm_job": "7"}.items()
    assert families["megatron_training_memory_allocated_gb"].samples[0].value == pytest.approx(1.073741824)
    assert len(families["hpcgen_training_evaluation_loss"].samples) == 2
    assert families["hpcgen_training_consumed_tokens"].type == "counter"
    assert len(families["megatron_training_step_duration_ms"].samples) == 2


def test_the_exporter_of_a_node_can_read_the_file_until_the_end(tmp_path: Path) -> None:
    directory = tmp_path / "textfile"
    directory.mkdir()
    board = opened(tmp_path, prometheus_directory=str(directory))
    board.scalars(1, VALUES)
    wait_until(lambda: any(path.stat().st_mode & stat.S_IROTH for path in directory.glob("*.prom")))
    board.close()
    assert not list(directory.iterdir())


def test_runs_of_one_name_have_files_of_their_own(tmp_path: Path) -> None:
    directory = tmp_path / "textfile"
    directory.mkdir()
    boards = [opened(tmp_path / name, prometheus_directory=str(directory)) for name in ("a", "b")]
    for board in boards:
        board.scalars(1, VALUES)
    wait_until(lambda: len(list(directory.glob("*.prom"))) == 2)
    for board in boards:
        board.close()
    assert not list(directory.iterdir())


def test_a_link_that_takes_the_place_of_the_file_makes_nothing_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, private = tmp_path / "textfile", tmp_path / "private"
    directory.mkdir()
    private.touch(0o600)
    replace = Path.replace
    swaps = []

    def swapped(source: Path, target: Path) -> Path:
        """Another user is fast."""
        replace(source, target)
        target.unlink()
        target.symlink_to(private)
        swaps.append(target)
        return target

    monkeypatch.setattr(Path, "replace", swapped)
    board = opened(tmp_path, prometheus_directory=str(directory))
    board.scalars(1, VALUES)
    wait_until(lambda: swaps != [])
    board.close()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600


def test_a_port_serves_the_figures_to_this_machine_only(tmp_path: Path) -> None:
    board = opened(tmp_path)
    board.serve("127.0.0.1", 0)
    assert board.port is not None
    board.scalars(1, VALUES)
    address = f"http://127.0.0.1:{board.port}"

    def answer() -> str:
        with urllib.request.urlopen(f"{address}/metrics") as found:
            return str(found.read().decode())

    wait_until(lambda: "megatron_training_loss{" in answer())
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{address}/other")
    other = opened(tmp_path / "other")
    other.serve("127.0.0.1", board.port)
    assert other.port is None, "the port is taken, and training goes on"
    board.close()
    other.close()


def test_an_unwritable_directory_costs_figures_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = opened(tmp_path, prometheus_directory=str(tmp_path / "missing"))
    board.scalars(1, VALUES)
    board.scalars(2, VALUES)
    board.close()
    assert capsys.readouterr().out.count("Figures for Prometheus are missing") == 1


def test_a_step_does_not_wait_for_the_figures(tmp_path: Path) -> None:
    """The step hands over numbers: 0.1% of a step of 100 ms is 100 us, and this takes a few."""
    board = opened(tmp_path)
    times = []
    for iteration in range(300):
        began = time.perf_counter()
        board.scalars(iteration, VALUES)
        times.append(time.perf_counter() - began)
    board.close()
    assert sorted(times)[len(times) // 2] < 100e-6


def test_the_dashboard_shows_only_figures_that_exist() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "examples/grafana-training.json").read_text())
    known = {NAMED, *(figure.name for figure in FIGURES)}
    used = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = set(re.findall(r"\b(?:megatron|hpcgen)_training_\w+", target["expr"]))
            assert names, target
            used |= names
    assert used <= known
    assert known - used == {"hpcgen_training_consumed_tokens_total"}


def test_further_losses_and_metrics_have_their_name_as_a_label() -> None:
    values = {"train/loss": 2.5, "train/objective": 3.0, "valid/accuracy": 0.25, "valid/wiki/accuracy": 0.5}
    lines = text(values, LABELS, ("objective", "accuracy")).splitlines()
    found = [line.partition(",name=")[2] for line in lines if line.startswith(f"{NAMED}{{")]
    assert found == [
        '"objective",split="train"} 3.0',
        '"accuracy",split="valid"} 0.25',
        '"accuracy",split="valid/wiki"} 0.5',
    ]
    assert lines.count(f"# TYPE {NAMED} gauge") == 1


def test_each_named_validation_set_has_its_label() -> None:
    lines = text({"valid/loss": 2.75, "valid/wiki/loss": 3.5}, LABELS).splitlines()
    losses = [line for line in lines if line.startswith("hpcgen_training_evaluation_loss{")]
    assert [line.partition(",split=")[2] for line in losses] == ['"valid"} 2.75', '"valid/wiki"} 3.5']
