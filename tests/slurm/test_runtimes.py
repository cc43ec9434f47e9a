"""Containers of apptainer and of CSCS's container engine in real jobs. Stand-ins note how they are called."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcgen import api
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import profile_text
from tests.slurm.test_run import TWO_NODES, ended, program_run

HOSTILE = """it's "100%"; $(touch hacked) `touch hacked` ${HOME} \\n = ,:"""
SECRET = "only-in-memory"
SHOW = (
    'printf \'%s|\' "$GREETING" "$NCCL_DEBUG" "$OF_IMAGE" "$SITE_TOKEN" "$RANK/$WORLD_SIZE" "$PWD"; '
    'echo "$HPCGEN_ENV_GREETING"'
)


def run_in(
    cluster: SlurmCluster,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    stand_in: str,
    container: dict[str, Any],
) -> tuple[str, list[dict[str, Any]]]:
    """The log of a job on two nodes whose program shows its variables, and what the stand-in noted."""
    programs = directory / "programs"
    programs.mkdir()
    text = (Path(__file__).parent / "stand_in_container.py").read_text().partition("\n")[2]
    (programs / stand_in).write_text(f"#!{sys.executable} -IS\n{text}")
    (programs / stand_in).chmod(0o755)
    noted = directory / "noted"
    monkeypatch.setitem(cluster.env, "REAL_SRUN", shutil.which("srun") or "")
    monkeypatch.setitem(cluster.env, "PATH", f"{programs}:{cluster.env['PATH']}")
    monkeypatch.setitem(cluster.env, "STAND_IN_LOG", str(noted))
    monkeypatch.setitem(cluster.env, "SITE_TOKEN", SECRET)
    # of the submitting shell: they would change the containers
    monkeypatch.setitem(cluster.env, "APPTAINER_BIND", "/etc")
    monkeypatch.setitem(cluster.env, "HPCGEN_ENV_OF_IMAGE", "leaked")
    run = program_run(directory, {"command": ["sh", "-c", SHOW]}, **TWO_NODES)
    (directory / "cluster.yaml").write_text(
        profile_text() + yaml.safe_dump({"scratch": str(directory / "scratch"), "container": container})
    )
    overrides = (
        "secrets=[SITE_TOKEN]",
        f"environment={json.dumps({'GREETING': HOSTILE, 'NCCL_DEBUG': 'JOB'})}",
    )
    plan = api.plan(api.load_run(run, overrides))
    script = api.render(plan, "run")
    assert SECRET not in script
    log = ended(cluster, run, cluster.sbatch(script, cwd=Path("/")))
    assert not list(directory.rglob("hacked"))
    assert not any(SECRET in path.read_text() for path in (directory / "run").rglob("*.toml"))
    return log, [json.loads(line) for line in noted.read_text().splitlines()]


def shown(directory: Path) -> set[str]:
    """The lines of the program: the job's values win over the image's."""
    return {f"{rank}: {HOSTILE}|JOB|1|{SECRET}|{rank}/4|{directory}|" for rank in range(4)}


def test_apptainer_gets_variables_by_name_mounts_and_a_copy_of_the_image(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpt.sif").write_text("image")
    container = {
        "runtime": "apptainer",
        "image": str(tmp_path / "gpt.sif"),
        "copy_image": True,
        "writable": True,
        "mounts": [{"source": "/usr", "target": "/host/usr", "read_only": True}],
    }
    log, noted = run_in(slurm_cluster, tmp_path, monkeypatch, stand_in="apptainer", container=container)
    assert shown(tmp_path) <= set(log.splitlines())
    assert len(noted) == 4
    scratch = tmp_path / "scratch"
    for call in noted:
        assert call["words"][:5] == [
            *("exec", "--no-eval", "--no-mount=home,cwd"),
            f"--pwd={tmp_path}/run",
            "--writable-tmpfs",
        ]
        assert "--bind=/usr:/host/usr:ro" in call["words"]
        assert f"--bind={tmp_path}:{tmp_path}" in call["words"]
        assert Path(call["image"]).parent == scratch / f"hpcgen-images-{os.getuid()}"
        assert call["exists"]
        assert not any(SECRET in word or "JOB" in word for word in call["words"])
        assert call["own"].keys() == {"APPTAINER_TMPDIR", "APPTAINER_CACHEDIR"}
        assert all(Path(value).is_relative_to(scratch) for value in call["own"].values())


def test_the_container_engine_gets_a_private_file_and_the_jobs_variables_win(
    slurm_cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = {
        "runtime": "ce",
        "environment": "ngc-pytorch",
        "mounts": [{"source": "/usr", "target": "/host/usr", "read_only": True}],
        "annotations": {"com.hooks.cxi.enabled": "false"},
    }
    log, noted = run_in(slurm_cluster, tmp_path, monkeypatch, stand_in="srun", container=container)
    assert shown(tmp_path) <= set(log.splitlines())
    [call] = noted
    file = Path(call["file"])
    assert (file.name, file.parents[1]) == ("container.toml", tmp_path / "run/jobs")
    assert call["mode"] == 0o600
    mounts = {"/host/usr": "/usr:/host/usr:ro", f"{tmp_path}": f"{tmp_path}:{tmp_path}"}
    assert call["environment"] == {
        "base_environment": ["ngc-pytorch"],
        "workdir": f"{tmp_path}/run",
        "mounts": [mounts[target] for target in sorted(mounts)],
        "annotations": {"com": {"hooks": {"cxi": {"enabled": "false"}}}},
    }
    assert not any(SECRET in word or "JOB" in word for word in call["words"])


def test_without_apptainer_the_job_ends_with_one_line(slurm_cluster: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "gpt.sif").write_text("image")
    run = program_run(tmp_path, {"command": ["true"]})
    container = {"runtime": "apptainer", "image": str(tmp_path / "gpt.sif")}
    (tmp_path / "cluster.yaml").write_text(profile_text() + yaml.safe_dump({"container": container}))
    plan = api.plan(api.load_run(run))
    log = ended(slurm_cluster, run, slurm_cluster.sbatch(api.render(plan, "run"), cwd=Path("/")), "FAILED")
    assert "ERROR: apptainer is not on PATH on " in log
    assert "back into the queue" not in log
