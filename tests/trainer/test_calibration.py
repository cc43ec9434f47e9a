"""trainer.calibration with tiny rows on CPUs, and the rows of benchmarks.kernels."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels import __main__ as benchmark
from benchmarks.kernels import launches, shapes
from tests.patience import PATIENCE_S
from tests.trainer import prepared_python
from tests.trainer.forked import ForkedPython
from tests.trainer.runs import environment, free_port
from trainer.calibration import collectives, host, section
from trainer.calibration.trainings import launch_times
from trainer.contract.calibration import CalibrationConfig, Job
from trainer.contract.config.document import to_dict
from trainer.contract.rules.engine import require
from trainer.distributed.rendezvous import Ranks
from trainer.health.meeting import Meeting

OF_ONE_GPU = [job for job in shapes.TINY if job.section in section.SECTIONS]


@pytest.mark.parametrize("job", OF_ONE_GPU, ids=lambda job: f"{job.section}-{job.row['pass']}")
def test_row_of_a_kernel(job: Job) -> None:
    row = section.measured(job, 0.001, "cpu")
    assert math.isfinite(row["us"])
    if job.row["pass"] == "forward":
        # a backward pass is a difference of times, which other processes disturb
        assert row["us"] > 0
    assert job.row.items() <= row.items()
    assert any(job.row.keys() == each.row.keys() for each in shapes.jobs(1, 1) if each.section == job.section)


def test_failed_job_is_a_row_with_its_error() -> None:
    job = Job(section="products", row=OF_ONE_GPU[0].row | {"k": -1})
    row = section.measured(job, 0.001, "cpu")
    assert row.pop("error").startswith("RuntimeError: ")
    assert row == job.row


@pytest.mark.parametrize(
    ("ranks", "domains", "groups"),
    [
        (4, 1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (2, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (2, 2, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        (4, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (8, 2, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (3, 2, []),  # not equally many in each domain
        (4, 4, []),  # too few domains
        (8, 1, []),  # too large for a domain
    ],
)
def test_all_groups_of_a_shape_transfer_at_once(ranks: int, domains: int, groups: list[list[int]]) -> None:
    assert collectives.groups_of(ranks, domains, domain_size=4, world_size=8) == groups


def test_host_is_measured_next_to_each_other_on_ranks_of_one_node() -> None:
    found = {job.trainings[0].world_size: job for job in launches.jobs(num_gpus=2)}
    single, pair = found[1], found[2]
    ranks = [
        [place.ranks for place in wave] for wave in host.waves([single, pair, pair], ["a", "a", "b", "b"])
    ]
    assert ranks == [[(0,), (2, 3)], [(0, 1)]]
    assert list(host.waves([pair], ["a", "b"])) == []


def test_trainings_of_the_shipped_rows_obey_the_rules() -> None:
    for job in launches.jobs(num_gpus=2):
        for training in job.trainings:
            require(training)


def test_time_of_a_layer_is_the_difference_of_two_trainings() -> None:
    """The trainings have 4 and 12 layers, and 8 microbatches."""
    trainings = launches.jobs(1)[0].trainings
    found = launch_times([0.4, 1.04], trainings)
    assert found == pytest.approx({"us": 10_000, "outside_us": 10_000})
    assert launch_times([0.3, 0.94], trainings) == pytest.approx({"us": 10_000})


@pytest.mark.process
def test_processes_that_train_measure_a_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = {"hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "ffn_hidden_size": 32}
    monkeypatch.setattr(launches, "SMALL", launches.SMALL | tiny | {"vocab_size": 128})
    monkeypatch.setattr(launches, "LAYERS", (1, 2))
    monkeypatch.setattr(launches, "MICROBATCHES", 1)
    monkeypatch.setattr(sys, "executable", str(prepared_python.start() / "python"))
    for name, value in environment(0, 1, free_port()).items():
        monkeypatch.setenv(name, value)
    job = launches.jobs(1)[0]
    on_cpu = tuple(dataclasses.replace(training, device="cpu") for training in job.trainings)
    works, fails = (dataclasses.replace(job, trainings=each) for each in (on_cpu, job.trainings))
    with Meeting(Ranks(0, 0, 1, "test"), "here", os.environ, PATIENCE_S, "test") as meeting:
        for number, each in enumerate((works, fails)):
            [place] = next(host.waves([each], ["here"]))
            [found] = host.measured([place], meeting, f"wave {number}")
            assert job.row.items() <= found.items()
            assert ("us" in found, "error" in found) == (each is works, each is fails)


@pytest.mark.process
def test_ranks_measure_together_until_the_time_is_over(tmp_path: Path) -> None:
    between = Job(
        section="collectives", row={"collective": "all_gather", "ranks": 2, "domains": 2, "bytes": 4096}
    )
    product = shapes.TINY[0]
    impossible = Job(section="products", row=product.row | {"k": -1})
    calm = CalibrationConfig(
        device="cpu", domain_size=1, jobs=(between, product, impossible), row_s=0.001, budget_s=1000
    )
    table, log = calibrated(calm, tmp_path / "calm")
    assert [between.row.items() <= row.items() for row in table["collectives"]] == [True]
    assert [product.row.items() <= row.items() for row in table["products"]] == [True]
    assert table["device"] == "cpu"
    assert log.count("not measured: products") == 1
    hasty, _ = calibrated(to_dict(calm) | {"budget_s": 1e-9}, tmp_path / "hasty")
    assert "collectives" not in hasty
    assert "products" not in hasty


def calibrated(config: CalibrationConfig | dict[str, Any], directory: Path) -> tuple[dict[str, Any], str]:
    """The result of two ranks, and what they printed."""
    directory.mkdir()
    file, result, log = (directory / name for name in ("config.json", "result.json", "log"))
    file.write_text(json.dumps(config if isinstance(config, dict) else to_dict(config)))
    port = free_port()
    arguments = ["-m", "trainer.calibration", "--config", str(file), "--result", str(result)]
    ranks = [ForkedPython(arguments, environment(rank, 2, port), log) for rank in range(2)]
    assert [rank.wait(timeout=PATIENCE_S) for rank in ranks] == [0, 0], log.read_text()
    return json.loads(result.read_text()), log.read_text()


def test_sections_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    out, measured_by = tmp_path / "table.json", {"date": "2026-11-26"}
    for rows in (
        {"products": [{"m": 2, "us": 1.23456}, {"m": 4, "us": 2.0}]},
        {"host": [{"layer": "dense", "us": 3.0}]},
        {"products": [{"m": 8, "us": 4.0}]},
    ):
        benchmark.add(out, "a GPU", {"device": "cuda", "measured": measured_by, **rows})
    table = json.loads(out.read_text())
    assert (table["gpu_model"], table["measured"]) == ("a GPU", measured_by)
    assert table["products"] == [{"m": 8, "us": 4.0}]
    assert table["host"] == [{"layer": "dense", "us": 3.0}]
    assert '    {"m": 8, "us": 4.0}\n' in out.read_text()  # a row is a line
