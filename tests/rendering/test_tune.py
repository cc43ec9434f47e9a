"""The job of hpcgen tune, with ranks that end at once: a kill, and a job that continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from tests.runs import minimal_run, write_yaml
from tests.standins import Batch, batch

pytestmark = pytest.mark.process

RANKS = """\
launch() {
    echo "$*" >>COMMANDS
    case "$*" in
        *trainer.calibration*) run_step false ;;
        *) ranks "${!#}" ;;
    esac
}
measured() { run_step true && write_file "$results/$1.json" <<<'{
 "status": "measured",
 "step_s": 0.25
}'; }
"""
"""A site's function `launch`, which runs neither srun nor ranks. The calibration fails."""


class Job:
    """A job with three trials, whose ranks are a function of the shell that gets the trial's key."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.commands = directory, directory / "commands"
        (directory / "runs").mkdir()
        candidates = ["training.micro_batch_size=2", "training.micro_batch_size=4"]
        values = minimal_run(paths={"run_dir": "runs"}, tune={"candidates": candidates})
        values["slurm"] = {"train": {"time": "1:00:00"}}
        self.plan = plan(load_run(write_yaml(directory / "run.yaml", values)), ["tune"])
        self.keys: tuple[str, ...] = self.plan.stages["tune"].values["trials"]  # type: ignore[assignment]

    def run(self, ranks: str, job_id: int = 77) -> Batch:
        self.commands.unlink(missing_ok=True)
        template = self.directory / "site/slurm/tune.sbatch.j2"
        template.parent.mkdir(parents=True, exist_ok=True)
        functions = f"{RANKS.replace('COMMANDS', str(self.commands))}ranks() {{ {ranks}; }}\n"
        template.write_text(
            f'{{% extends "hpcgen/slurm/tune.sbatch.j2" %}}\n{{% block site %}}\n{functions}{{% endblock %}}\n'
        )
        return batch(render(self.plan, "tune", [self.directory / "site"]), self.directory, job_id=job_id)

    @property
    def results(self) -> dict[str, dict[str, object]]:
        files = self.directory.glob("runs/tune/[0-9a-f]*.json")
        return {path.stem: json.loads(path.read_text()) for path in files}


def test_a_job_that_was_killed_continues_with_what_is_missing(tmp_path: Path) -> None:
    job = Job(tmp_path)
    first, second, third = job.keys
    killed = job.run(f'if [[ $1 = {second} ]]; then kill -TERM $$; run_step true; else measured "$1"; fi')
    assert killed.status == 143, killed.log
    assert list(job.results) == [first]  # nothing is known of the second
    assert "WARNING: the calibration failed with status 1" in killed.log
    done = job.run('measured "$1"', job_id=78)
    assert done.status == 0, done.log
    assert set(job.results) == {first, second, third}
    commands = job.commands.read_text()
    assert first not in commands
    assert second in commands
    assert done.log.count("measured before") == 1
    assert done.log.count("measured: 0.25 s per step") == 3


def test_ranks_that_end_without_a_word_leave_a_result(tmp_path: Path) -> None:
    job = Job(tmp_path)
    lost = job.run("run_step false")
    assert lost.status == 1
    assert "ERROR: no trial was measured (above)" in lost.log
    assert {result["status"] for result in job.results.values()} == {"lost"}
    result = next(iter(job.results.values()))
    assert (result["job"], result["nodes"]) == ("77", ["n1"])
    assert str(result["reason"]).startswith("the ranks ended with status 1 after ")
