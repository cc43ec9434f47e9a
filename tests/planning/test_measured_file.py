"""CLUSTER.measured.json: where it is, what is refused, and what predictions take from it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.directories import MEASURED_SUFFIX
from hpcgen.config.loader import Run, load_run
from hpcgen.errors import HpcgenError
from hpcgen.planning.measured_file import add_measured, measured_on
from hpcgen.planning.predicted_step import NoPrediction
from hpcgen.planning.step_time.machine import BY_TUNE
from hpcgen.run_plan.prediction import Prediction, predict
from tests.runs import big_run, planned, write_yaml

MIB = 2**20
HOST = {
    "layer": "dense",
    "tensor_parallel": True,
    "graphs": False,
    "precision": "bf16",
    "layers": "LayerNorm, gelu_tanh, biases",
    "us": 3000.0,
}
"""The layers of the run, or as measured for other models."""
BETWEEN = tuple(
    {"collective": name, "ranks": 16, "domains": 4, "bytes": size * MIB, "us": us}
    for name in ("all_gather", "reduce_scatter")
    for size, us in ((1, 100.0), (256, 2000.0), (1024, 8000.0))
)
"""As measured on a network with half of the bandwidth that hpcgen assumes for InfiniBand."""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of the run file and of the profile orion. Profiles of the user are elsewhere."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))
    (tmp_path / "project/clusters").mkdir(parents=True)
    write_yaml(tmp_path / "project/clusters/orion.yaml", {"extends": "azure-ndv5"})
    return tmp_path / "project"


def loaded(directory: Path, cluster: str = "orion") -> Run:
    path = directory / "run.yaml"
    write_yaml(path, big_run(cluster=cluster))
    return load_run(path)


def predicted(directory: Path, *overrides: str) -> Prediction:
    """The prediction of a run with TP on 16 nodes."""
    return predict(planned(directory, big_run(cluster="orion"), overrides=overrides))


def result(directory: Path, **content: Any) -> Path:
    """The result of a calibration."""
    path = directory / "result.json"
    table = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "measured": {"date": "2026-11-26"}, **content}
    path.write_text(json.dumps(table))
    return path


def test_file_is_next_to_the_profile_and_has_the_newest_rows(directory: Path) -> None:
    run = loaded(directory)
    assert measured_on(run) is None
    path = add_measured(run, result(directory, host=[HOST], collectives=list(BETWEEN)))
    assert path == directory / "clusters" / f"orion{MEASURED_SUFFIX}"
    add_measured(run, result(directory, host=[{**HOST, "us": 2500.0}], products=[]))
    found = measured_on(run)
    assert found is not None
    assert found.host == ({**HOST, "us": 2500.0},)
    assert found.collectives == BETWEEN
    assert f"    {json.dumps(BETWEEN[0])},\n" in path.read_text()  # a row is a line


def test_file_of_a_shipped_profile_is_the_user_s(directory: Path, tmp_path: Path) -> None:
    run = loaded(directory, "azure-ndv5")
    path = add_measured(run, result(directory, host=[HOST]))
    assert path == tmp_path / "xdg/hpcgen/clusters" / f"azure-ndv5{MEASURED_SUFFIX}"
    assert measured_on(run) is not None
    assert measured_on(loaded(directory)) is None


def test_later_rows_of_two_files_count(directory: Path, tmp_path: Path) -> None:
    run = loaded(directory)
    own = add_measured(run, result(directory, host=[HOST], measured={"date": "2026-11-27"}))
    (tmp_path / "xdg/hpcgen/clusters").mkdir(parents=True)
    mine = tmp_path / "xdg/hpcgen/clusters" / own.name
    for date, us in (("2026-11-26", 3000.0), ("2026-11-28", 1000.0)):
        mine.write_text(
            json.dumps(
                json.loads(own.read_text()) | {"measured": {"date": date}, "host": [{**HOST, "us": 1000.0}]}
            )
        )
        found = measured_on(run)
        assert found is not None
        assert found.host[0]["us"] == us


def test_measured_network_and_host_replace_guesses(directory: Path) -> None:
    before = predicted(directory)
    assert any("the host launches a dense layer" in guess and BY_TUNE in guess for guess in before.guesses)
    add_measured(loaded(directory), result(directory, host=[HOST], collectives=list(BETWEEN)))
    after = predicted(directory)
    assert not any("the host launches" in guess for guess in after.guesses)
    assert before.step.host >= after.step.host
    assert after.step.data_parallel > before.step.data_parallel
    assert after.range[1] - after.range[0] <= before.range[1] - before.range[0]


def test_host_that_was_measured_narrows_the_range(directory: Path) -> None:
    small = ("model.hidden_size=1024", "model.num_attention_heads=16", "model.ffn_hidden_size=4096")
    before = predicted(directory, *small)
    slow = {**HOST, "us": 9000.0}
    add_measured(loaded(directory), result(directory, host=[{**slow, "layers": "RMSNorm, swiglu"}]))
    of_others = predicted(directory, *small)
    assert any("on this cluster for other layers: RMSNorm, swiglu" in guess for guess in of_others.guesses)
    add_measured(loaded(directory), result(directory, host=[slow]))
    after = predicted(directory, *small)
    assert after.step.host == pytest.approx(of_others.step.host)
    assert after.step.host > before.step.host
    widths = [found.range[1] / found.range[0] for found in (before, after)]
    assert widths[1] < 0.8 * widths[0]
    add_measured(loaded(directory), result(directory, host=[{**slow, "outside_us": 20_000.0}]))
    assert predicted(directory, *small).step.host > after.step.host
    assert after.step.host_is_measured
    assert not of_others.step.host_is_measured


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpu_model": "A100 SXM 80 GB"}, "gpu_model = 'A100 SXM 80 GB' is not the GPU of the node type"),
        ({"device": "cpu"}, "device = 'cpu' is not that of the node type, cuda"),
        ({"format": 2}, "format = 2 is not 1"),
        ({"measured": []}, "measured.date = None is not a date"),
        ({"host": {}}, "host is not a list of rows"),
        ({"host": [3]}, "host[0] 3 is not a row"),
        ({"host": [{**HOST, "us": float("nan")}]}, "host[0] us = nan is not a positive number"),
        ({"host": [{**HOST, "us": -1}]}, "host[0] us = -1 is not a positive number"),
        ({"host": [{**HOST, "us": "3"}]}, "host[0] us = '3' is not a positive number"),
        ({"host": [{**HOST, "graphs": 1}]}, "host[0] graphs = 1 is not true or false"),
        ({"host": [{**HOST, "layer": "wide"}]}, "host[0] layer = 'wide' is not dense or experts"),
        ({"host": [{**HOST, "outside_us": 0}]}, "host[0] outside_us = 0 is not a positive number"),
        ({"host": [{**HOST, "gpus": 2}]}, "host[0] gpus is not a column"),
        ({"products": [{"pass": "forward"}]}, "products[0] m is missing"),
        (
            {"collectives": [{**BETWEEN[0], "ranks": 0}]},
            "collectives[0] ranks = 0 is not a whole number above 0",
        ),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else "",
)
def test_file_that_does_not_fit_is_refused(directory: Path, changes: dict[str, Any], message: str) -> None:
    run = loaded(directory)
    path = add_measured(run, result(directory, host=[HOST]))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(HpcgenError) as caught:
        measured_on(run)
    assert f"{path}: {message}" in str(caught.value)
    with pytest.raises(NoPrediction, match="what was measured on the cluster cannot be used"):
        predicted(directory)


@pytest.mark.parametrize("text", ["", "[]", '{"host": '])
def test_damaged_file_is_refused(directory: Path, text: str) -> None:
    run = loaded(directory)
    path = add_measured(run, result(directory, host=[HOST]))
    path.write_text(text)
    with pytest.raises(HpcgenError, match="measure again with hpcgen tune"):
        measured_on(run)


def test_fifo_in_its_place_does_not_hang(directory: Path) -> None:
    os.mkfifo(directory / "clusters" / f"orion{MEASURED_SUFFIX}")
    with pytest.raises(HpcgenError, match="it is a FIFO, not a regular file"):
        measured_on(loaded(directory))


def test_result_of_other_gpus_is_refused(directory: Path) -> None:
    run = loaded(directory)
    foreign = result(directory, gpu="NVIDIA A100-SXM4-80GB", host=[HOST])
    with pytest.raises(
        HpcgenError, match="the nodes have NVIDIA A100-SXM4-80GB, but gpu_model of ndv5 is H100"
    ):
        add_measured(run, foreign)
    assert measured_on(run) is None


def test_file_that_others_can_change_is_refused(directory: Path) -> None:
    run = loaded(directory)
    add_measured(run, result(directory, host=[HOST])).chmod(0o666)
    with pytest.raises(HpcgenError, match="all users can write to it"):
        measured_on(run)
