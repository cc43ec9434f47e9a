"""The stages generate and export with a checkpoint of a tiny run, on Slurm and on this machine."""

from __future__ import annotations

import json
from pathlib import Path

from hpcgen import api
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import hpcgen

PROMPTS = ("in the beginning", "def ", "import os", "x")


def test_jobs_and_this_machine_generate_the_same_texts(
    slurm_cluster: SlurmCluster, single_process_run: Path
) -> None:
    """Two nodes with two replicas of two tensor-parallel ranks, and one process."""
    directory = single_process_run.parent
    lines = (json.dumps({"prompt": prompt}) for prompt in PROMPTS)
    (directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    settings = "generation={prompts: prompts.jsonl, max_new_tokens: 6, stop: [never]}"
    job = ("slurm.generate={nodes: 2, ntasks_per_node: 2}", "generation.tensor_model_parallel_size=2")
    log = completed(slurm_cluster, single_process_run, "generate", settings, *job)
    texts = directory / "run/generation/prompts.jsonl"
    assert f"texts: {texts}\n" in log
    assert "rendezvous at" in log
    written = texts.read_text()
    assert [json.loads(line)["prompt"] for line in written.splitlines()] == list(PROMPTS)
    assert [path.name for path in texts.parent.iterdir()] == ["prompts.jsonl"]
    texts.unlink()
    options = ("-c", str(single_process_run), "--set", settings)
    hpcgen("submit", "generate", *options, "--launcher=local", cwd=directory)
    assert texts.read_text() == written


def test_a_job_exports_the_newest_checkpoint(slurm_cluster: SlurmCluster, single_process_run: Path) -> None:
    exported = single_process_run.parent / "exported"
    log = completed(slurm_cluster, single_process_run, "export", "export={directory: exported, dtype: bf16}")
    assert log.endswith(f"hpcgen: exported to {exported}\n")
    assert {"config.json", "model.safetensors"} <= {path.name for path in exported.iterdir()}
    assert "| iteration | 8 |" in (exported / "README.md").read_text()


def completed(cluster: SlurmCluster, run: Path, stage: str, *overrides: str) -> str:
    """The log of a job of the stage that has succeeded."""
    script = api.render(api.plan(api.load_run(run, overrides), [stage]), stage)
    job_id = cluster.sbatch(script, cwd=run.parent)
    state = cluster.wait(job_id)
    log = (run.parent / f"run/{stage}-{job_id}.log").read_text()
    assert state == "COMPLETED", log
    return log
