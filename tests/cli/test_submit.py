"""Submitting, as far as it goes without a cluster: what is refused before anything happens."""

from __future__ import annotations

import os

import pytest

from tests.cli.command import hpcgen, listing
from tests.runs import big_run, minimal_run, write_yaml


@pytest.fixture
def run_file(workplace):
    return write_yaml(workplace / "run.yaml", minimal_run(paths={"run_dir": "runs/mini"}))


def test_a_dry_run_checks_all_and_does_nothing(workplace, run_file):
    before = listing(workplace)
    found = hpcgen("submit", "train", "-c", run_file, "--dry-run")
    assert (found.status, found.stdout) == (0, "")
    assert found.stderr == "dry run: would submit train\n"
    assert listing(workplace) == before


def test_a_dry_run_finds_a_wrong_template(workplace, run_file):
    site = workplace / "site/slurm/train.sbatch.j2"
    site.parent.mkdir(parents=True)
    site.write_text("{{ nothing }}\n")
    found = hpcgen("submit", "train", "-c", run_file, "--dry-run", "--templates", "site")
    assert found.status == 2
    assert "train.sbatch.j2:1: a value is outside of blocks settings and environment" in found.stderr


@pytest.mark.parametrize("launcher", ["slurm", "local"])
def test_a_mistake_submits_nothing(workplace, run_file, launcher):
    before = listing(workplace)
    found = hpcgen(
        "submit", "train", "-c", run_file, "--launcher", launcher, "--set", "training.micro_batch_size=3"
    )
    assert (found.status, found.stdout) == (2, "")
    assert "training.global_batch_size = 4 is not a multiple" in found.stderr
    assert listing(workplace) == before


def test_several_nodes_are_not_this_machine(workplace):
    run_file = write_yaml(workplace / "run.yaml", big_run(paths={"run_dir": str(workplace / "r")}))
    found = hpcgen("submit", "train", "-c", run_file, "--launcher", "local")
    assert found.status == 2
    assert "stage train requests 16 nodes, but --launcher local runs on this machine" in found.stderr
    assert sorted(listing(workplace)) == ["run.yaml"]


def test_a_container_is_not_this_machine(workplace):
    slurm = {"train": {"nodes": 1, "ntasks_per_node": 1, "time": "1:00:00"}}
    run_file = write_yaml(
        workplace / "run.yaml",
        minimal_run(cluster="azure-ndv5", slurm=slurm, container={"image": "/images/x.sqsh"}),
    )
    found = hpcgen("submit", "train", "-c", run_file, "--launcher", "local")
    assert found.status == 2
    assert found.stderr.splitlines()[-1] == (
        "stage train requests a container (pyxis, /images/x.sqsh), but --launcher local runs on this machine, "
        "without containers; use --launcher slurm, or set cluster: local"
    )


def test_a_script_of_the_nodes_is_not_this_machine(workplace):
    write_yaml(workplace / "topologies/own.yaml", {"extends": "cpu", "environment_script": "/opt/env.sh"})
    write_yaml(workplace / "site.yaml", {"extends": "local", "node_type": "own"})
    run_file = write_yaml(workplace / "run.yaml", minimal_run(cluster="./site.yaml"))
    found = hpcgen("submit", "train", "-c", run_file, "--launcher", "local")
    assert found.status == 2
    assert (
        "stage train requests the environment script /opt/env.sh of its nodes, but --launcher" in found.stderr
    )


def test_without_slurm_the_command_fails_with_one_line(workplace, run_file, monkeypatch):
    monkeypatch.setenv("PATH", str(workplace))
    found = hpcgen("submit", "train", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "stage train was not submitted" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.process
def test_the_error_of_sbatch_is_shown_once(workplace, run_file, monkeypatch):
    for name in ("srun", "sbatch"):
        program = workplace / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: hpc' >&2\nexit 1\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{workplace}/bin:{os.environ['PATH']}")
    found = hpcgen("submit", "train", "-c", run_file)
    assert found.status == 2
    assert found.stderr.count("invalid partition specified: hpc") == 1
