"""`python -m trainer.health.node`: tests the GPUs of each node separately, with one task per GPU.

The ranks of a node connect at 127.0.0.1, so that no node waits for another. The first rank of each node writes
NODE-container.json. Exit status: 0 good, 1 a finding or a hang, 2 an invalid configuration or launch.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import read_as
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.health import NodeHealthConfig
from trainer.contract.wording import counted, rate_text
from trainer.distributed.rendezvous import Ranks, find_ranks, select_gpu
from trainer.distributed.slurm_job import node_name
from trainer.health.bandwidth import measure_all_reduce
from trainer.health.fabric import Fabric
from trainer.health.judgement import make_layout, select
from trainer.health.meeting import Meeting, MissingRanksError
from trainer.health.settings import configuration_files, nccl_settings

PROGRAM = "node-health"
MATMUL_SIZE = {"cuda": 8192, "cpu": 512}
"""Rows of the square matrices, large enough for a Hopper GPU to reach its usual fraction of the peak."""
COPY_BYTES = 2**30
REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Device:
    """Measurements of one rank; null if not measured."""

    name: str = ""
    matmul_tflops: float | None = None
    to_device_gb_s: float | None = None
    from_device_gb_s: float | None = None
    peer_gb_s: float | None = None
    """Copies to the next GPU of the node."""
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class FailedCheck:
    """A measurement that is not as expected, in the format of the reports of the host part.

    It describes hardware, not a mistake in a file or a command, so it is not a `Problem`.
    """

    check: str
    expected: str
    found: str


def main() -> int:
    """Parse the arguments and run the check. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.health.node", description="Checks the GPUs of each node separately."
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", required=True, help="configuration of the check"
    )
    parser.add_argument(
        "--reports", type=Path, metavar="DIR", required=True, help="directory for the reports"
    )
    arguments = parser.parse_args()
    try:
        config = read_as(NodeHealthConfig, arguments.config)
        return run(config, find_ranks(os.environ), os.environ, arguments.reports)
    except TrainerError as error:
        print(f"{PROGRAM}: ERROR: {error}", file=sys.stderr)
        return error.exit_code


def run(config: NodeHealthConfig, ranks: Ranks, environ: Mapping[str, str], reports: Path) -> int:
    """Check this node together with its other ranks. Returns the exit status, the same on each of them.

    Raises:
        TrainerError: the number of tasks does not fit the nodes, or ranks are missing.
    """
    own = ranks_of_node(config, ranks)
    node = node_name(environ)
    # In tests, two nodes may share a host and so an address.
    port = int(environ.get("MASTER_PORT", "29500")) + int(environ.get("SLURM_NODEID", "0")) % 1000
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TRAINER_RENDEZVOUS_ID": environ.get("TRAINER_RENDEZVOUS_ID", ""),
    }
    report = reports / f"{node}-container.json"
    try:
        with Meeting(own, node, address, config.timeout_s, PROGRAM) as meeting:
            if own.rank == 0:
                meeting.on_hang = lambda line: _report(
                    report, node, [], None, [FailedCheck(check="hang", expected="an answer", found=line)]
                )
            check = NodeCheck(config, meeting, environ)
            return check.run(report)
    except MissingRanksError as error:
        if own.rank == 0:
            finding = FailedCheck(
                check="ranks", expected=f"{counted(config.ranks_per_node, 'task')}", found=str(error)
            )
            _report(report, node, [], None, [finding])
        raise


def ranks_of_node(config: NodeHealthConfig, ranks: Ranks) -> Ranks:
    """Rank of this process among the ranks of its node.

    Raises:
        TrainerError: the number of tasks does not fit the nodes.
    """
    size = config.ranks_per_node
    if ranks.world_size % size or ranks.local_rank >= size:
        raise TrainerError(
            f"{ranks}, local rank {ranks.local_rank}: the check needs exactly {counted(size, 'task')} per node"
        )
    return Ranks(ranks.local_rank, ranks.local_rank, size, ranks.source)


class NodeCheck:
    """The check of one node. Each of its ranks runs it."""

    def __init__(self, config: NodeHealthConfig, meeting: Meeting, environ: Mapping[str, str]) -> None:
        self._config = config
        self._meeting = meeting
        self._settings = nccl_settings(environ, configuration_files(environ))
        self._device = Device()

    def run(self, report: Path) -> int:
        """Measure, compare and write the report. Returns the exit status."""
        ranks = self._meeting.ranks
        with self._meeting.step("finding its GPU"):
            self._try(self._find)
        with self._meeting.step("a matrix product"):
            self._try(self._multiply)
        for turn in range(ranks.world_size):
            # One GPU at a time, since they would share the host's memory bandwidth.
            self._meeting.gather(f"turn-{turn}", None)
            with self._meeting.step("copies"):
                if turn == ranks.rank:
                    self._try(self._copy)
        devices = [
            Device(**values) for values in self._meeting.gather("devices", dataclasses.asdict(self._device))
        ]
        all_reduce: dict[str, Any] | None = None
        if ranks.world_size > 1 and not any(device.error for device in devices):
            all_reduce = self._all_reduce()
        findings = [*judge_devices(devices, self._config), *self._judge_all_reduce(all_reduce)]
        if ranks.rank == 0:
            _report(report, self._meeting.node, devices, all_reduce, findings)
        return 1 if findings else 0

    def _try(self, measure: Callable[[], None]) -> None:
        """Run a measurement, unless an earlier one on this GPU has failed."""
        if self._device.error:
            return
        try:
            measure()
        except (RuntimeError, TrainerError) as error:  # every error of CUDA is a RuntimeError
            self._device = dataclasses.replace(self._device, error=str(error).partition("\n")[0])

    def _find(self) -> None:
        if self._config.device == "cuda":
            if not torch.cuda.is_available():
                raise TrainerError(f"torch {torch.__version__} sees no GPU")
            select_gpu(self._meeting.ranks)
            self._device = Device(name=torch.cuda.get_device_name())
        else:
            torch.set_num_threads(1)  # the ranks of a host share its cores
            self._device = Device(name="CPU")

    def _multiply(self) -> None:
        kind = self._config.device
        size = MATMUL_SIZE[kind]
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        left, right = (torch.randn(size, size, device=kind).to(dtype) for _ in range(2))
        # A long warm-up, since clocks are higher in the first second. Training runs at the later, lower clocks.
        seconds = _seconds(lambda: torch.mm(left, right), kind, repeats=REPEATS, warm_up=REPEATS)
        self._set(matmul_tflops=2 * size**3 / seconds / 1e12)

    def _copy(self) -> None:
        if self._config.device != "cuda":
            return
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        here = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._set(
            to_device_gb_s=_gb_s(lambda: here.copy_(host, non_blocking=True)),
            from_device_gb_s=_gb_s(lambda: host.copy_(here, non_blocking=True)),
        )
        # With --gpus-per-task a process sees only its own GPU, and only the all-reduce tests the links.
        count = torch.cuda.device_count()
        if count > 1:
            there = torch.empty_like(here, device=f"cuda:{(torch.cuda.current_device() + 1) % count}")
            self._set(peer_gb_s=_gb_s(lambda: there.copy_(here, non_blocking=True)))

    def _set(self, **values: float) -> None:
        rounded = {name: round(value, 3) for name, value in values.items()}
        self._device = dataclasses.replace(self._device, **rounded)  # type: ignore[arg-type]

    def _all_reduce(self) -> dict[str, Any]:
        """Measure the bandwidth between all GPUs of the node. Returns it, or the errors of the ranks."""
        value: float | str
        try:
            with self._meeting.step("an all-reduce"):
                fabric = Fabric(self._config.device, self._meeting)
                sample = measure_all_reduce(
                    fabric.world(), self._config.all_reduce_bytes, fabric.device, REPEATS
                )
                fabric.close()
            value = (
                round(sample.busbw_gb_s, 3) if sample.correct else "the sums are wrong, so data is corrupted"
            )
        except TrainerError as error:
            value = str(error)
        values = self._meeting.gather("all-reduce", value)
        errors = [f"rank {rank}: {each}" for rank, each in enumerate(values) if isinstance(each, str)]
        return {"busbw_gb_s": None if errors else values[0], "error": "; ".join(errors)}

    def _judge_all_reduce(self, measured: dict[str, Any] | None) -> list[FailedCheck]:
        if measured is None:
            return []
        if measured["error"]:
            return [FailedCheck(check="all_reduce", expected="correct sums", found=measured["error"])]
        layout = make_layout(1, self._config.ranks_per_node, self._settings)
        threshold = select(self._config.thresholds, layout, self._config.gpus_per_node)
        if threshold is None or measured["busbw_gb_s"] >= threshold.fail_below_gb_s:
            return []
        expected = f"at least {threshold.fail_below_gb_s:g} GB/s ({layout})"
        return [
            FailedCheck(
                check="all_reduce", expected=expected, found=f"{rate_text(measured['busbw_gb_s'])} GB/s"
            )
        ]


def judge_devices(devices: list[Device], config: NodeHealthConfig) -> list[FailedCheck]:
    """Findings about single GPUs, by local rank."""
    findings = []
    products = [device.matmul_tflops for device in devices if device.matmul_tflops is not None]
    usual = statistics.median_high(products) if products else 0.0
    # Skip CPU ranks: they share the cores of a host, so differences between them mean nothing.
    least = usual * (1 - config.max_gpu_deficit) if config.device == "cuda" else 0.0
    if config.peak_tflops is not None:
        least = max(least, config.peak_tflops * config.min_peak_fraction)
    limits: tuple[tuple[str, float | None, str], ...] = (
        ("matmul_tflops", least, "TFLOP/s"),
        ("to_device_gb_s", config.host_device_gb_s, "GB/s"),
        ("from_device_gb_s", config.host_device_gb_s, "GB/s"),
        ("peer_gb_s", config.peer_gb_s, "GB/s"),
    )
    for number, device in enumerate(devices):
        if device.error:
            findings.append(FailedCheck(check=f"gpu_{number}", expected="no error", found=device.error))
        for name, limit, unit in limits:
            value = getattr(device, name)
            if limit is not None and value is not None and value < limit:
                expected = f"at least {rate_text(limit)} {unit}"
                findings.append(
                    FailedCheck(
                        check=f"gpu_{number} {name}", expected=expected, found=f"{rate_text(value)} {unit}"
                    )
                )
    return findings


def _seconds(operation: Callable[[], Any], device: str, repeats: int, warm_up: int = 3) -> float:
    """Median time of an operation on this rank's device."""
    for _ in range(warm_up):
        operation()
    times = []
    for _ in range(repeats):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        operation()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _gb_s(copy: Callable[[], Any]) -> float:
    return COPY_BYTES / _seconds(copy, "cuda", repeats=5) / 1e9


def _report(
    path: Path,
    node: str,
    devices: list[Device],
    all_reduce: dict[str, Any] | None,
    findings: list[FailedCheck],
) -> None:
    """Write the report of the node, and print it as lines in the log."""
    for finding in findings:
        print(f"{node}: BAD {finding.check}: expected {finding.expected}, found {finding.found}", flush=True)
    print(f"{node}: {_summary(devices, all_reduce)}: {'BAD' if findings else 'good'}", flush=True)
    document = {
        "node": node,
        "part": "container",
        "ok": not findings,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "devices": [dataclasses.asdict(device) for device in devices],
        "all_reduce": all_reduce,
    }
    publish(path, json.dumps(document, indent=1) + "\n")


def _summary(devices: list[Device], all_reduce: dict[str, Any] | None) -> str:
    """Range of each measurement over the node's devices."""
    parts = []
    for name, unit in (
        ("matmul_tflops", "TFLOP/s"),
        ("to_device_gb_s", "GB/s to device"),
        ("from_device_gb_s", "GB/s from device"),
        ("peer_gb_s", "GB/s to peer"),
    ):
        values = [value for device in devices if (value := getattr(device, name)) is not None]
        if values:
            parts.append(f"{rate_text(min(values))} to {rate_text(max(values))} {unit}")
    if all_reduce and all_reduce["busbw_gb_s"] is not None:
        parts.append(f"all-reduce {rate_text(all_reduce['busbw_gb_s'])} GB/s")
    return ", ".join(parts) or "nothing measured"


if __name__ == "__main__":
    sys.exit(main())
