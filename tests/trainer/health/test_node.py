"""Comparison of the measurements of a node's GPUs with their limits."""

from __future__ import annotations

from trainer.contract.health import NodeHealthConfig
from trainer.health.node import Device, judge_devices

CONFIG = NodeHealthConfig(
    device="cuda",
    ranks_per_node=4,
    peak_tflops=989.0,
    host_device_gb_s=48.0,
    peer_gb_s=335.0,
    all_reduce_bytes=1,
)
GOOD = Device(name="H100", matmul_tflops=700.0, to_device_gb_s=54.0, from_device_gb_s=53.0, peer_gb_s=380.0)


def found(**changes: float | str | None) -> list[tuple[str, str, str]]:
    """The findings of a node whose last GPU differs."""
    devices = [GOOD, GOOD, GOOD, Device(**{**vars(GOOD), **changes})]
    return [(each.check, each.expected, each.found) for each in judge_devices(devices, CONFIG)]


def test_a_good_node() -> None:
    assert found() == []
    assert found(matmul_tflops=640.0) == []


def test_one_gpu_is_compared_with_the_others() -> None:
    assert found(matmul_tflops=594.0) == [("gpu_3 matmul_tflops", "at least 595.0 TFLOP/s", "594.0 TFLOP/s")]


def test_all_gpus_are_compared_with_the_peak() -> None:
    slow = Device(**{**vars(GOOD), "matmul_tflops": 400.0})
    assert [each.check for each in judge_devices([slow, slow], CONFIG)] == [
        "gpu_0 matmul_tflops",
        "gpu_1 matmul_tflops",
    ]


def test_bandwidths_have_limits_in_both_directions() -> None:
    assert [check for check, _, _ in found(to_device_gb_s=20.0, from_device_gb_s=12.0, peer_gb_s=40.0)] == [
        "gpu_3 to_device_gb_s",
        "gpu_3 from_device_gb_s",
        "gpu_3 peer_gb_s",
    ]


def test_a_cuda_error_is_a_finding_and_missing_measurements_are_none() -> None:
    error = "CUDA error: uncorrectable ECC error encountered"
    assert found(
        error=error, matmul_tflops=None, to_device_gb_s=None, from_device_gb_s=None, peer_gb_s=None
    ) == [("gpu_3", "no error", error)]
