"""The rendered scripts of nccl-test and node-health, really run: two "nodes" of two ranks with gloo on this machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.standins import batch
from tests.trainer.health.scripts import render, tasks, write_site

NODES = ("n1", "n2")


@pytest.fixture(autouse=True)
def _in_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.process
def test_the_first_test_records_a_baseline_for_later_tests(tmp_path: Path, stand_in: str) -> None:
    baseline = tmp_path / "baseline.json"
    site = write_site(tmp_path, nccl_baseline=str(baseline), python=stand_in)
    script = render("nccl-test", site, tasks("nccl-test", 2, 2))
    first = batch(script, tmp_path, NODES, job_id=1)
    assert first.status == 0, first.log
    assert f"as this cluster's baseline in {baseline}: there was nothing to compare with" in first.log
    assert "nccl-test: no threshold is known for cpu: 2 nodes x " in first.log
    result = json.loads((tmp_path / "run" / "jobs" / "1" / "nccl-test.json").read_text())
    assert (result["ok"], result["nodes"], result["tool"]) == (True, ["n1", "n2"], "torch.distributed")
    assert [sample["size_bytes"] for sample in result["samples"]] == [2**20, 2**22]
    assert all(sample["correct"] and sample["busbw_gb_s"] > 0 for sample in result["samples"])

    # a cluster that once was a million times as fast
    text = baseline.read_text()
    recorded = json.loads(text)["cpu: 2 nodes x 2 ranks, NVLS on, CollNet off, 4 MiB"]
    assert recorded["busbw_gb_s"] == pytest.approx(result["samples"][-1]["busbw_gb_s"], rel=1e-3)
    baseline.write_text(re.sub(r'"busbw_gb_s": [\d.e-]+', '"busbw_gb_s": 100000.0', text))
    second = batch(script, tmp_path, NODES, job_id=2)
    assert second.status == 1, second.log
    assert (
        "FAIL, too low (expected 100000.0, warn below 90000.0, fail below 75000.0: this cluster's baseline"
        in (second.log)
    )
    result = json.loads((tmp_path / "run" / "jobs" / "2" / "nccl-test.json").read_text())
    assert [(group["purpose"], group["nodes"]) for group in result["groups"]][:2] == [
        ("alone", ["n1"]),
        ("alone", ["n2"]),
    ]
    assert not result["ok"]
    assert "ERROR: the fabric did not pass (above); figures: " in second.log


def crippled(directory: Path, python: str) -> tuple[str, Path]:
    """The script of a site whose settings explain a low bandwidth, and its baseline file."""
    baseline = directory / "baseline.json"
    environment = {"NCCL_MAX_NCHANNELS": "2"}
    site = write_site(directory, nccl_baseline=str(baseline), environment=environment, python=python)
    return render("nccl-test", site, tasks("nccl-test", 1, 2)), baseline


@pytest.mark.process
def test_nothing_is_recorded_where_a_setting_explains_a_low_bandwidth(tmp_path: Path, stand_in: str) -> None:
    script, baseline = crippled(tmp_path, stand_in)
    found = batch(script, tmp_path, ("n1",))
    assert found.status == 1, found.log
    assert (
        "POSSIBLE CAUSE: NCCL_MAX_NCHANNELS=2 (environment): few channels leave links idle; on every node"
        in found.log
    )
    assert "--record-baseline records it anyway" in found.log
    assert not baseline.exists()


@pytest.mark.process
def test_the_figures_of_a_profile_are_measured_on_request(tmp_path: Path, stand_in: str) -> None:
    site = write_site(tmp_path, python=stand_in)
    script = render("nccl-test", site, tasks("nccl-test", 2, 1))
    ended = batch(script, tmp_path, NODES, ["--profile-figures"])
    assert ended.status == 0, ended.log
    job_dir = tmp_path / "run" / "jobs" / "77"
    figures = json.loads((job_dir / "nccl-test.json").read_text())["profile_figures"]
    assert all(value > 0 for value in figures.values())
    assert f"writing to {job_dir}: " in ended.log
    assert not list(tmp_path.rglob(".write-rate-*"))


@pytest.mark.slow
def test_a_baseline_is_recorded_on_request(tmp_path: Path, stand_in: str) -> None:
    script, baseline = crippled(tmp_path, stand_in)
    found = batch(script, tmp_path, ("n1",), arguments=["--record-baseline"])
    assert found.status == 0, found.log
    assert len(json.loads(baseline.read_text())) == 1


@pytest.mark.process
def test_a_node_that_the_sites_command_refuses_is_left_out_and_listed_for_a_day(
    tmp_path: Path, stand_in: str
) -> None:
    command = ["/bin/sh", "-c", 'test "$SLURMD_NODENAME" != n2 || { echo broken fan; exit 3; }']
    site = write_site(tmp_path, health_command=command, python=stand_in)
    known = tmp_path / "run" / "excluded_nodes"
    known.write_text("n8 99999999999\nn9 1\nn1 99999999999\n")
    found = batch(render("node-health", site, tasks("node-health", 2, 2)), tmp_path, NODES)
    assert found.status == 1, found.log
    assert "n2: BAD health_command: expected status 0 of /bin/sh, found status 3: broken fan" in found.log
    assert re.search(r"^n1 +good +good$", found.log, re.MULTILINE)
    assert re.search(r"^n2 +BAD +not checked$", found.log, re.MULTILINE)
    assert "for the next jobs: --exclude=n2,n8" in found.log
    assert (tmp_path / "run" / "good_nodes").read_text() == "n1\n"
    assert (tmp_path / "run" / "bad_nodes").read_text() == "n2\n"
    assert [line.split()[0] for line in known.read_text().splitlines()] == ["n2", "n8"]
    reports = tmp_path / "run" / "jobs" / "77" / "nodes-0"
    container = json.loads((reports / "n1-container.json").read_text())
    assert (container["ok"], container["findings"]) == (True, [])
    assert [device["matmul_tflops"] > 0 for device in container["devices"]] == [True, True]
    assert container["all_reduce"]["busbw_gb_s"] > 0


@pytest.mark.process
def test_findings_that_all_nodes_share_exclude_none(tmp_path: Path) -> None:
    """A wrong node type would otherwise exclude every node of the cluster."""
    site = write_site(tmp_path, health_command=["/bin/sh", "-c", "exit 3"])
    found = batch(render("node-health", site, tasks("node-health", 2, 1)), tmp_path, NODES)
    assert found.status == 1, found.log
    assert "every node has the same findings (above): check the node type and the profile" in found.log
    assert (tmp_path / "run" / "bad_nodes").read_text() == "n1\nn2\n"
    assert not (tmp_path / "run" / "excluded_nodes").exists()


@pytest.mark.process
def test_a_job_whose_python_cannot_run_the_check_blames_no_node(tmp_path: Path) -> None:
    site = write_site(tmp_path, python="/bin/false")
    found = batch(render("node-health", site, tasks("node-health", 2, 2)), tmp_path, NODES)
    assert found.status == 1
    assert "no node reports from its container (above): that is a mistake in the job" in found.log
    assert not (tmp_path / "run" / "bad_nodes").exists()


@pytest.mark.process
@pytest.mark.parametrize(
    ("program", "given", "said"),
    [
        ("cat <<<'a table'; echo \"$@\" >words", True, "a table"),
        (
            "echo no MPI; exit 3",
            False,
            "all_reduce_perf failed (below); measuring with torch.distributed",
        ),
        (None, False, "the tasks do not have"),
    ],
)
def test_nvidias_program_measures_where_the_tasks_have_it(
    program: str | None, given: bool, said: str, tmp_path: Path
) -> None:
    """Other tests read its figures: /bin/echo replaces Python and shows its arguments."""
    perf = tmp_path / "all_reduce_perf"
    if program is not None:
        perf.write_text(f"#!/bin/bash\n{program}\n")
        perf.chmod(0o755)
    node_type = {"description": "x", "device": "cuda", "gpus_per_node": 2, "exclusive": False}
    site = write_site(tmp_path, node_type, python="/bin/echo", nccl_tests=str(perf))
    found = batch(render("nccl-test", site), tmp_path)
    assert found.status == 0, found.log
    assert said in found.log
    option = f"--all-reduce-perf-output={tmp_path}/run/jobs/77/all_reduce_perf.log"
    assert (option in found.log) == given
    assert f"-m trainer.health.nccl_test --config {tmp_path}/run/jobs/77/nccl-test.config.json" in found.log
    if given:
        words = (tmp_path / "words").read_text().split()
        assert words == ["--minbytes=1048576", "--maxbytes=4294967296", "--stepfactor=4", "--ngpus=1"]
