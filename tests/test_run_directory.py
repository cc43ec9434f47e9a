"""The directory of a local job in a run that a group shares."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hpcgen.errors import HpcgenError
from hpcgen.slurm.run_directory import make_job_directory, make_run_directory
from tests.runs import minimal_run, planned


def test_others_can_neither_enter_nor_replace_the_directory_of_a_local_job(tmp_path: Path) -> None:
    """submitit's pickles in it are writable for the group, by the run's umask."""
    plan = planned(tmp_path, minimal_run(paths={"run_dir": "run"}, share="group"))
    run_dir = make_run_directory(plan)
    named, held = make_job_directory(plan, "local-")
    assert named.stat().st_mode & 0o777 == 0o700
    (run_dir / "jobs").rename(run_dir / "aside")
    named.mkdir(parents=True)
    (held / "file").touch()
    assert (run_dir / "aside" / named.name / "file").exists()
    assert not list(named.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make links of another user")
def test_a_link_of_another_user_in_place_of_jobs_is_refused(tmp_path: Path) -> None:
    plan = planned(tmp_path, minimal_run(paths={"run_dir": "run"}, share="group"))
    jobs = make_run_directory(plan) / "jobs"
    jobs.symlink_to(tmp_path)
    os.lchown(jobs, 65534, 65534)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(HpcgenError, match="jobs: is a symbolic link that user nobody placed"):
        make_job_directory(plan, "local-")
    assert sorted(tmp_path.iterdir()) == before
