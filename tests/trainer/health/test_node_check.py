"""Host part of a node check, with simulated /sys and /proc trees and a simulated nvidia-smi."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hpcgen.resources import shipped

pytestmark = pytest.mark.process

LIBRARY = shipped("templates") / "lib/node-check.sh"
GPU = "NVIDIA H100 80GB HBM3, 4, 0"
NVIDIA_SMI = """#!/bin/bash
case $1 in
--query-gpu=name*) cat "$ANSWERS/gpus" ;;
--query-remapped-rows=*) cat "$ANSWERS/rows" ;;
--query-compute-apps=*) cat "$ANSWERS/processes" ;;
--query-gpu=clocks_event*) [[ -e $ANSWERS/clocks ]] || { echo 'Field "x" is not a valid field to query.'; exit 2; }
    cat "$ANSWERS/clocks" ;;
--query-gpu=clocks_throttle*) cat "$ANSWERS/old_clocks" ;;
--query-gpu=fabric.state) cat "$ANSWERS/fabric" ;;
*) echo "unexpected: $*"; exit 9 ;;
esac
[[ ! -e $ANSWERS/status ]] || exit "$(<"$ANSWERS/status")"
"""


@dataclass
class Host:
    """A healthy node with two GPUs, two NICs, one disk and 1,900,000 MB of memory."""

    root: Path
    answers: dict[str, str] = field(default_factory=dict)
    expectations: tuple[str, ...] = (
        *("gpus=2", "nic=mlx5_ib0:400", "nic=mlx5_ib1:400", "memory_mb=1819317-2010825", "nvme=1"),
    )

    def __post_init__(self) -> None:
        programs = self.root / "bin"
        programs.mkdir(parents=True)
        (programs / "nvidia-smi").write_text(NVIDIA_SMI)
        (programs / "nvidia-smi").chmod(0o755)
        self.answers = {
            "gpus": f"{GPU}\n{GPU}\n",
            "rows": "0, 0\n0, 0\n",
            "processes": "",
            "clocks": "Not Active, Not Active, Not Active\n" * 2,
            "fabric": "Completed\nCompleted\n",
        }
        for name in ("mlx5_ib0", "mlx5_ib1"):
            self.write(f"sys/class/infiniband/{name}/ports/1/state", "4: ACTIVE\n")
            self.write(f"sys/class/infiniband/{name}/ports/1/phys_state", "5: LinkUp\n")
            self.write(f"sys/class/infiniband/{name}/ports/1/rate", "400 Gb/sec (4X NDR)\n")
        self.write("sys/class/nvme/nvme0/model", "x\n")
        self.write("proc/meminfo", "MemTotal:       1945600000 kB\nMemFree: 1 kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def check(self, *more: str, command: Sequence[str] = (), node: str = "n1") -> dict[str, Any]:
        """Runs the program that a script would send to the node. Returns its report and the lines it printed."""
        answers, reports = self.root / "answers", self.root / "reports"
        reports.mkdir(exist_ok=True)
        answers.mkdir(exist_ok=True)
        for name, text in self.answers.items():
            (answers / name).write_text(text)
        words = [f"root={self.root}", "patience=0", *self.expectations, *more, "--", *command]
        done = subprocess.run(
            ["bash", "-c", f'source {LIBRARY}; check_host "$@"', "check_host", reports, *words],
            env={
                "PATH": f"{self.root}/bin:{os.environ['PATH']}",
                "SLURMD_NODENAME": node,
                "ANSWERS": str(answers),
            },
            capture_output=True,
            text=True,
            check=False,
        )
        report = json.loads((reports / f"{node}-host.json").read_text())
        assert done.stderr == ""
        assert (reports / f"{node}.ok").exists() == (done.returncode == 0) == report["ok"]
        assert report["part"] == "host"
        return {**report, "lines": done.stdout.splitlines()}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def findings(report: dict[str, Any]) -> list[tuple[str, str, str]]:
    assert len(report["lines"]) == len(report["findings"]), "one line for each finding"
    return [(each["check"], each["expected"], each["found"]) for each in report["findings"]]


def test_a_good_node_has_no_finding(host: Host) -> None:
    report = host.check(f"scratch=1:{host.root}", f"file={host.root}/proc/meminfo")
    assert (report["node"], report["ok"], findings(report)) == ("n1", True, [])


@pytest.mark.parametrize(
    ("answer", "text", "finding"),
    [
        ("gpus", f"{GPU}\n", ("gpus", "2 GPUs", "1 GPUs")),
        (
            "gpus",
            f"{GPU}\nNVIDIA A100-SXM4-80GB, 4, 0\n",
            ("gpu_1 name", "NVIDIA H100 80GB HBM3, as GPU 0", "NVIDIA A100-SXM4-80GB"),
        ),
        (
            "gpus",
            f"{GPU}\n{GPU[:-1]}3\n",
            ("gpu_1 ecc", "no uncorrectable error", "3 uncorrectable errors"),
        ),
        (
            "gpus",
            "H100, 70000, 0\nH100, 0, 0\n",
            ("gpu_0 memory", "at most 2048 MiB in use", "70000 MiB in use"),
        ),
        (
            "rows",
            "0, 0\nYes, 0\n",
            ("gpu_1 remapped_rows", "none pending", "rows to remap: reset the GPU or reboot"),
        ),
        (
            "rows",
            "0, 1\n0, 0\n",
            ("gpu_0 remapped_rows", "no failure", "remapping failed: replace the GPU"),
        ),
        ("processes", "4711, 500\n", ("gpu_processes", "no process", "process 4711 uses 500 MiB")),
        (
            "clocks",
            "Not Active, Not Active, Not Active\nActive, Active, Not Active\n",
            (
                "gpu_1 clocks",
                "no hardware slowdown",
                "slowed (hardware, heat, power brake): Active, Active, Not Active",
            ),
        ),
        ("fabric", "Completed\nIn Progress\n", ("gpu_1 fabric", "Completed", "In Progress")),
    ],
)
def test_problems_that_nvidia_smi_reports_are_findings(
    answer: str, text: str, finding: tuple[str, str, str], host: Host
) -> None:
    host.answers[answer] = text
    assert findings(host.check()) == [finding]


def test_unsupported_gpu_features_are_not_findings(host: Host) -> None:
    host.answers |= {
        "gpus": "H100, [N/A], [N/A]\nH100, [N/A], [Not Supported]\n",
        "rows": "[N/A], [N/A]\n",
        "fabric": "N/A\nN/A\n",
    }
    assert findings(host.check()) == []


def test_an_older_driver_is_asked_by_the_older_name(host: Host) -> None:
    del host.answers["clocks"]
    host.answers["old_clocks"] = "Not Active, Active, Not Active\nNot Active, Not Active, Not Active\n"
    [(check, _, _)] = findings(host.check())
    assert check == "gpu_0 clocks"


def test_a_driver_that_does_not_answer_is_one_finding(host: Host) -> None:
    host.answers |= {"gpus": "Unable to determine the device handle for GPU0\nmore\n", "status": "15"}
    found = findings(host.check())
    assert found == [
        (
            "gpus",
            "an answer from nvidia-smi",
            "status 15: Unable to determine the device handle for GPU0",
        )
    ]


@pytest.mark.parametrize(
    ("file", "text", "finding"),
    [
        ("state", "1: DOWN\n", ("nic mlx5_ib1", "ACTIVE, LinkUp", "DOWN, LinkUp")),
        ("phys_state", "2: Polling\n", ("nic mlx5_ib1", "ACTIVE, LinkUp", "ACTIVE, Polling")),
        ("rate", "200 Gb/sec (4X HDR)\n", ("nic mlx5_ib1", "400 Gb/s", "200 Gb/sec (4X HDR)")),
    ],
)
def test_a_nic_that_is_down_or_slow(file: str, text: str, finding: tuple[str, str, str], host: Host) -> None:
    host.write(f"sys/class/infiniband/mlx5_ib1/ports/1/{file}", text)
    assert findings(host.check()) == [finding]


@pytest.mark.parametrize(
    ("kind", "state", "good", "bad"),
    [
        ("infiniband/efa", "ports/1/state", "4: ACTIVE", "1: DOWN"),
        ("cxi/*", "device/net/hsn/operstate", "up", "down"),
        ("net/*", "operstate", "unknown", "down"),
    ],
)
def test_nics_of_other_fabrics(kind: str, state: str, good: str, bad: str, host: Host) -> None:
    """A node has more devices than those of the fabric: without a driver, of another driver, or down."""
    folder, _, driver = kind.partition("/")
    for number in range(3):
        device = f"sys/class/{folder}/nic{number}"
        host.write(f"{device}/{state}", f"{good}\n")
        (host.root / device / "device").mkdir(exist_ok=True)
        (host.root / device / "device/driver").symlink_to(f"../drivers/{'efa' if driver == 'efa' else 'x'}")
    (host.root / f"sys/class/{folder}/virtual").mkdir()
    assert findings(host.check(f"devices={kind}:3", f"device={folder}/nic2")) == []
    host.write(f"sys/class/{folder}/nic2/{state}", f"{bad}\n")
    found = findings(host.check(f"devices={kind}:3", f"device={folder}/nic2", f"device={folder}/nic9"))
    expected = f"3 that are up in /sys/class/{folder}"
    assert found == [
        ("nics", expected, f"2, nic2: {bad}"),
        ("nic nic2", "a device that is up", bad),
        ("nic nic9", "a device that is up", "nothing"),
    ]
    assert findings(host.check(f"devices={kind}:2")) == []


def test_missing_parts_are_named(host: Host) -> None:
    host.write("proc/meminfo", "MemTotal: 1000000000 kB\n")
    found = findings(
        host.check("nic=mlx5_ib7:400", "nvme=8", "file=/no/topo.xml", f"scratch=1:{host.root}/none")
    )
    assert found == [
        ("memory", "1819317 to 2010825 MB", "976562 MB"),
        ("nic mlx5_ib7", "a device", "nothing"),
        ("nvme", "8 disks", "1 disks"),
        ("file", "/no/topo.xml to be readable", "it is missing or not readable"),
        ("scratch", f"{host.root}/none to be writable", "it is not"),
    ]


def test_a_full_scratch_and_a_memlock_of_a_login_node(host: Host) -> None:
    found = findings(host.check(f"scratch=99999999:{host.root}", "memlock=123"))
    assert [check for check, _, _ in found] == ["scratch", "memlock"]
    assert list(host.root.glob(".hpcgen-check*")) == []


def test_the_sites_own_command_counts_by_its_status(host: Host) -> None:
    assert findings(host.check(command=("sh", "-c", "echo fine; exit 0"))) == []
    text = 'echo start; echo "node is \\"bad\\" \\\\o/"; exit 7'
    found = findings(host.check(command=("sh", "-c", text)))
    assert found == [("health_command", "status 0 of sh", 'status 7: node is "bad" \\o/')]
    assert (host.root / "reports" / "n1-health-command.log").read_text().startswith("start\n")


@pytest.mark.parametrize(
    "text", ['"', "\\", "a\tb", "\x01", "é", '"ok": true', "$(touch x)", "`id`", "%s %n", "'"]
)
def test_whatever_a_node_says_the_report_is_json(text: str, host: Host) -> None:
    host.answers["gpus"] = f"{GPU}\n{text}, 4, 0\n"
    report = host.check()
    [(_, _, found)] = findings(report)
    assert (
        found == "".join(character if " " <= character <= "~" else "?" for character in text) or "é" in text
    )
    assert '"ok": false' in (host.root / "reports" / "n1-host.json").read_text()


def test_a_node_can_become_bad_after_a_good_check(host: Host) -> None:
    host.check()
    host.answers["gpus"] = f"{GPU}\n"
    assert not host.check()["ok"]
