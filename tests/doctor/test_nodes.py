"""What the reports of a job say about its nodes: the odd ones are named."""

from __future__ import annotations

import json
from pathlib import Path

from hpcgen.doctor import nodes
from tests.cli.command import hpcgen

NODES = ("n1", "n2", "n3", "n4")
FACTS = {"clock": "100.5", "kernel": "6.8.0", "driver": "570.86", "nccl-plugin": "/opt/libnccl-net.so abc"}


def write_reports(directory: Path) -> Path:
    """The reports of four good nodes, as node-health writes them."""
    reports = directory / "run/jobs/7/nodes-0"
    reports.mkdir(parents=True)
    for node in NODES:
        for part in ("host", "container"):
            report = {"node": node, "part": part, "ok": True, "findings": []}
            (reports / f"{node}-{part}.json").write_text(json.dumps(report))
        write_facts(reports, node)
    (reports / "clock").write_text("100.0\n101.0\n")
    (reports / "container-step").write_text("0 4\n")
    return reports


def write_facts(reports: Path, node: str, **changes: str | None) -> None:
    changed = {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [f"{name} {value}\n" for name, value in {**FACTS, **changed}.items() if value is not None]
    (reports / f"{node}-facts").write_text("".join(lines))


def bad(reports: Path) -> dict[str, tuple[str, str]]:
    found = [check for check in nodes.checks(reports, NODES) if check.state in ("warning", "failed")]
    assert all(check.fix for check in found)
    return {check.name: (check.state, check.found) for check in found}


def test_equal_nodes_have_nothing_to_complain_about(tmp_path: Path) -> None:
    reports = write_reports(tmp_path)
    assert bad(reports) == {}
    states = {check.name: check.state for check in nodes.checks(reports, NODES)}
    assert states == dict.fromkeys((*NODES, "container step", "same versions", "clocks"), "ok")


def test_a_plugin_on_a_part_of_the_nodes_is_named(tmp_path: Path) -> None:
    reports = write_reports(tmp_path)
    write_facts(reports, "n3", nccl_plugin=None)
    assert bad(reports) == {
        "same nccl-plugin": ("failed", "n3 has nothing; 3 other nodes: /opt/libnccl-net.so abc")
    }
    write_facts(reports, "n3", kernel="6.5.0")
    assert bad(reports) == {"same kernel": ("warning", "n3 has 6.5.0; 3 other nodes: 6.8.0")}


def test_a_clock_outside_of_the_batch_script_s_window_is_named(tmp_path: Path) -> None:
    reports = write_reports(tmp_path)
    write_facts(reports, "n2", clock="160.0")
    write_facts(reports, "n4", clock="101.9")
    assert bad(reports) == {"clocks": ("failed", "n2 is off by at least 59.0 s")}


def test_findings_silent_nodes_and_a_hanging_container_are_named(tmp_path: Path) -> None:
    reports = write_reports(tmp_path)
    finding = {"check": "memlock", "expected": "unlimited", "found": "64 kB"}
    (reports / "n1-host.json").write_text(json.dumps({"findings": [finding]}))
    (reports / "n2-host.json").unlink()
    (reports / "n3-host.json").write_text("{torn")
    (reports / "n4-container.json").unlink()
    (reports / "container-step").write_text("124 600\n")
    found = bad(reports)
    assert found["n1: memlock"] == ("failed", "expected unlimited, found 64 kB")
    assert found["n2"][1] == found["n3"][1] == "no report: it is down, or does not see the run directory"
    assert found["n4"][1] == "the host is good, and its ranks did not report"
    assert found["container step"] == ("failed", "a single task did not end in 600 s: it hangs")


def test_print_shows_the_script_of_the_job(tmp_path: Path) -> None:
    shown = hpcgen("doctor", "--cluster", "local", "--run-dir", tmp_path / "run", "--nodes", "3", "--print")
    assert (shown.status, shown.stderr) == (0, "")
    assert "#SBATCH --nodes=3\n" in shown.stdout
    assert "node_facts()" in shown.stdout
    refused = hpcgen("doctor", "--cluster", "local", "--print")
    assert (refused.status, "only with --nodes" in refused.stderr) == (2, True)
