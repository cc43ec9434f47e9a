"""benchmarks.kernels with tiny jobs on a CPU."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.kernels import __main__ as main
from benchmarks.kernels import attention, host, memory, products
from benchmarks.kernels.section import measured
from benchmarks.train import configuration
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.rules.engine import require

ON_CPU = argparse.Namespace(seconds=0.001, device="cpu")


@pytest.mark.parametrize("section", [products, attention, memory], ids=lambda section: section.__name__)
def test_rows(section: ModuleType) -> None:
    for job in section.TINY:
        row = measured(section, job, ON_CPU)
        assert isinstance(row["us"], float)
        assert job.items() <= row.items()
        assert any(job.keys() == each.keys() for each in section.jobs())


def test_failed_job_is_a_row_with_its_error() -> None:
    job = products.TINY[0] | {"k": -1}
    row = measured(products, job, ON_CPU)
    assert row.pop("error").startswith("RuntimeError: ")
    assert row == job


def test_sections_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    arguments = argparse.Namespace(out=tmp_path / "table.json", gpu_model="a GPU", device="cpu")
    main.add(arguments, "products", [{"m": 2, "us": 1.23456}, {"m": 4, "us": 2.0}])
    main.add(arguments, "host", [{"layer": "dense", "us": 3.0}])
    main.add(arguments, "products", [{"m": 8, "us": 4.0}])
    table = json.loads(arguments.out.read_text())
    assert table["gpu_model"] == "a GPU"
    assert table["products"] == [{"m": 8, "us": 4.0}]
    assert table["host"] == [{"layer": "dense", "us": 3.0}]
    assert '    {"m": 8, "us": 4.0}\n' in arguments.out.read_text()  # a row is a line


def test_runs_of_the_host_obey_the_rules(tmp_path: Path) -> None:
    for job in host.jobs(gpus=2):
        for case in host.cases(job):
            require(
                from_dict(TrainerConfig, configuration(case, tmp_path / "corpus", tmp_path), where=case.name)
            )


def test_time_of_a_layer_is_the_difference_of_two_runs() -> None:
    job = host.jobs(gpus=1)[0]
    assert host.row(job, [1.0, 1.64])["us"] == pytest.approx(10_000)


@pytest.mark.slow  # starts five processes that import torch
@pytest.mark.process
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "table.json"
    words = ["kernels", "--gpu-model", "a CPU", "--out", str(out), "--device", "cpu", "--seconds", "0.001"]
    monkeypatch.setattr("sys.argv", words)
    assert main.main() == 0, capsys.readouterr().out
    table = json.loads(out.read_text())
    assert [row["pass"] for row in table["products"]] == list(products.PASSES)
    assert {row["collective"] for row in table["collectives"]} >= {"all_gather", "send_recv"}
