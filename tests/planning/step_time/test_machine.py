"""Facts of a machine that time depends on, and which of them are guesses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.step_time import measurements
from hpcgen.planning.step_time.machine import Machine, missing_facts


def machine(name: str) -> Machine:
    return Machine.of(load_node_type(name), nvlink_devices=8)


@pytest.mark.parametrize(
    ("node_type", "network_gb_s", "is_measured"),
    [
        ("ndv5", 46, True),  # a NIC of 400 Gb/s for each GPU
        ("ndv4", 23, True),
        ("oci-h100", 44, False),  # two NICs of 200 Gb/s for each GPU, RoCE
        ("azure-ndv6-gb200", 46, False),  # the node type has no line rate
        ("h100-sxm", 46, False),  # no fabric
        ("aws-p5", 37.5, False),  # 32 NICs of 100 Gb/s, without their rate in the node type
    ],
)
def test_network_bandwidth(node_type: str, network_gb_s: float, is_measured: bool) -> None:
    bandwidth = machine(node_type).network_bandwidth
    assert bandwidth.value == pytest.approx(network_gb_s * 1e9)
    assert bandwidth.is_measured is is_measured


def test_facts_of_the_gpu() -> None:
    ndv5 = machine("ndv5")
    assert ndv5.peak_flops["fp8"] == 1979e12
    assert ndv5.num_sms.value == 132
    assert ndv5.nvlink_bandwidth.is_measured
    assert machine("ndv5-h200").nvlink_bandwidth.value == pytest.approx(360e9)  # no table


@pytest.mark.parametrize(
    ("node_type", "precision", "missing"),
    [("ndv5", "fp8", []), ("ndv4", "fp8", ["peak_tflops.fp8"]), ("cpu", "bf16", ["device"])],
)
def test_missing_facts(node_type: str, precision: str, missing: list[str]) -> None:
    assert missing_facts(load_node_type(node_type), precision) == missing


def test_table_serves_only_its_gpu_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    rows = [{"collective": "all_gather", "ranks": 2, "bytes": 2**20, "us": 20.0}]
    table = {"gpu_model": "H100 SXM 80 GB", "machine": "a test", "collectives": rows}
    (tmp_path / "kernels" / "h100-sxm.json").write_text(json.dumps(table))
    monkeypatch.setattr(measurements, "shipped", lambda folder: tmp_path)
    found = machine("ndv5").measurements
    assert found is not None
    assert found.collectives == tuple(rows)
    assert machine("h200-sxm").measurements is None


def test_measured_power(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    rows = [
        {"load": "fp8_products", "watts": 690.0, "sm_mhz": 1400},
        {"load": "idle", "watts": 110.0, "sm_mhz": 345},
    ]
    (tmp_path / "kernels" / "h100-sxm.json").write_text(
        json.dumps({"gpu_model": "H100 SXM 80 GB", "power": rows})
    )
    monkeypatch.setattr(measurements, "shipped", lambda folder: tmp_path)
    assert (machine("ndv5").watts.value, machine("ndv5").watts.is_measured) == (690, True)
    assert (machine("ndv4").watts.value, machine("ndv4").watts.is_measured) == (400, False)
