"""Two users of a group share a run on a real Slurm: both submit, and neither can run code as the other."""

from __future__ import annotations

import os
import pwd
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcgen import load_run, plan, render
from tests.patience import wait_until
from tests.runs import write_yaml
from tests.slurm.cluster import BASE_DIR, SlurmCluster

OWNER, MEMBER = "games", "man"


def users_exist() -> bool:
    """True if this machine has both users."""
    return {OWNER, MEMBER} <= {entry.pw_name for entry in pwd.getpwall()}


pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not users_exist() or shutil.which("setpriv") is None,
    reason=f"needs root, setpriv and the users {OWNER} and {MEMBER}",
)

NOBODY = 0xFFFFFFFF
"""Of an entry of an ACL that names no user."""

PROGRAM = 'echo "ran as $(id -un)"; while [ ! -e {RUN_DIR}/go ]; do sleep 0.2; done'


class SharedRun:
    """A run of OWNER in a directory that MEMBER can write to."""

    def __init__(self, cluster: SlurmCluster, directory: Path) -> None:
        self._cluster = cluster
        # Slurm complains in the job's log about a TMPDIR that the user cannot write to, such as one of these tests'.
        self._env = cluster.env | {"HOME": "/nonexistent", "NCCL_DEBUG": "INFO", "TMPDIR": "/tmp"}
        self.directory, self.run_dir = directory, directory / "run"
        self.victim = directory / "private" / "victim"
        self.victim.parent.mkdir(mode=0o700)
        self.victim.write_text("precious")
        for path in (self.victim.parent, self.victim):
            shutil.chown(path, OWNER, OWNER)
        self.run_dir.mkdir()
        shutil.chown(self.run_dir, OWNER, OWNER)
        self.run_dir.chmod(0o2770)
        values = {
            "name": "shared",
            "cluster": "local",
            "share": "group",
            "paths": {"run_dir": str(self.run_dir)},
            "slurm": {
                "run": {
                    "nodes": 1,
                    "ntasks_per_node": 1,
                    "time": "10:00",
                    "signal_lead_s": 60,
                    "max_restarts": 0,
                }
            },
            "program": {"command": ["sh", "-c", PROGRAM], "stop": {"file": "{RUN_DIR}/stop"}},
        }
        self.script = render(plan(load_run(write_yaml(directory / "run.yaml", values)), ["run"]), "run")

    def sh(self, user: str, command: str, text: str = "") -> str:
        """Runs shell code as a user of the group."""
        words = ("setpriv", f"--reuid={user}", f"--regid={OWNER}", "--clear-groups", "sh", "-ec", command)
        return subprocess.run(
            words, cwd=self.run_dir, env=self._env, input=text, text=True, capture_output=True, check=True
        ).stdout.strip()

    def submit(self, user: str, *options: str) -> str:
        """Submits the script. Returns the job's ID."""
        return self.sh(user, f"sbatch --parsable {' '.join(options)}", self.script)

    def log(self, job: str) -> str:
        """The job's log."""
        return (self.run_dir / f"run-{job}.log").read_text()


@pytest.fixture
def shared(slurm_cluster: SlurmCluster) -> Iterator[SharedRun]:
    directory = Path(tempfile.mkdtemp(prefix="hpcgen-share-", dir=BASE_DIR))  # others may not enter TMPDIR
    directory.chmod(0o755)
    yield SharedRun(slurm_cluster, directory)
    shutil.rmtree(directory)


PLANTS = {
    "jobs": "mv jobs aside; mkdir -p jobs/$J; echo id >jobs/$J/program.sh",
    "link to a directory": "mv jobs aside; mkdir -p jobs; ln -s ../../private jobs/$J",
    "jobs is a link": "mv jobs aside; ln -s ../private jobs",
    "directory that others can write to": "mv jobs aside; mkdir jobs; mv aside/1 jobs/$J",
}


@pytest.mark.parametrize(
    "plant",
    [
        "jobs",
        "link to a directory",
        pytest.param("jobs is a link", marks=pytest.mark.slow),
        pytest.param("directory that others can write to", marks=pytest.mark.slow),
    ],
)
def test_a_member_replaces_the_directory_of_a_pending_job(
    shared: SharedRun, slurm_cluster: SlurmCluster, plant: str
) -> None:
    job = shared.submit(OWNER, "--hold")
    shared.sh(OWNER, "mkdir -p jobs/1; chmod 2770 jobs jobs/1")
    shared.sh(MEMBER, f"J={job}; {PLANTS[plant]}")
    slurm_cluster.run("scontrol", "release", job)
    assert slurm_cluster.wait(job) == "FAILED"
    assert f"{shared.run_dir}/jobs/{job} was not made by this job" in shared.log(job)
    assert shared.victim.read_text() == "precious"
    assert [path.name for path in shared.victim.parent.iterdir()] == ["victim"]


def test_a_member_puts_a_link_in_place_of_the_log(shared: SharedRun, slurm_cluster: SlurmCluster) -> None:
    job = shared.submit(OWNER, "--hold")
    shared.sh(MEMBER, f"ln -s ../private/victim run-{job}.log")
    slurm_cluster.run("scontrol", "release", job)
    assert slurm_cluster.wait(job) == "FAILED"
    assert shared.victim.read_text() == "precious"
    assert f"run-{job}.log is a link" in (shared.run_dir / f"jobs/{job}/log").read_text()


def test_a_member_removes_the_link_that_slurm_followed(
    shared: SharedRun, slurm_cluster: SlurmCluster
) -> None:
    started = shared.directory / "started"
    wait = f"touch {started}; while [ -L {shared.run_dir}/run-$SLURM_JOB_ID.log ]; do sleep 0.1; done"
    shared.script = shared.script.replace("set -uo pipefail", f"{wait}; set -uo pipefail", 1)
    shared.directory.chmod(0o777)
    job = shared.submit(OWNER, "--hold")
    shared.sh(MEMBER, f"ln -s ../private/victim run-{job}.log")
    slurm_cluster.run("scontrol", "release", job)
    wait_until(started.exists)
    shared.sh(MEMBER, f"rm run-{job}.log")
    assert slurm_cluster.wait(job) == "FAILED"
    assert shared.victim.read_text() == "precious"
    assert shared.victim.stat().st_mode & 0o777 == 0o644


def test_a_job_runs_in_a_directory_with_a_default_acl(shared: SharedRun, slurm_cluster: SlurmCluster) -> None:
    """Sites give a project's group access so. It takes the place of the umask."""
    entries = (
        (1, 7, NOBODY),
        (2, 7, pwd.getpwnam(MEMBER).pw_uid),
        (4, 7, NOBODY),
        (16, 7, NOBODY),
        (32, 0, NOBODY),
    )
    acl = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(shared.run_dir, "system.posix_acl_default", acl)
    shared.sh(OWNER, "touch go")
    job = shared.submit(OWNER)
    assert slurm_cluster.wait(job) == "COMPLETED", shared.log(job)


def test_sbatch_may_name_another_log(shared: SharedRun, slurm_cluster: SlurmCluster) -> None:
    shared.sh(OWNER, "touch go")
    log = shared.victim.parent / "log"
    job = shared.submit(OWNER, f"--output={log}")
    assert slurm_cluster.wait(job) == "COMPLETED"
    assert "ran as games" in log.read_text()
    assert log.stat().st_mode & 0o070 == 0o040


def test_a_member_replaces_files_while_the_job_runs(shared: SharedRun, slurm_cluster: SlurmCluster) -> None:
    """The stop file, and every file that the job writes to its own directory at its end."""
    job = shared.submit(OWNER)
    wait_until(lambda: (shared.run_dir / f"run-{job}.log").exists() and "ran as" in shared.log(job))
    links = "; ".join(
        f"ln -s ../../../private/victim {name}" for name in ("stalled", "progress", "exclusions")
    )
    shared.sh(
        MEMBER, f"ln -sf ../private/victim stop; mv jobs aside; mkdir -p jobs/{job}; cd jobs/{job}; {links}"
    )
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job)
    wait_until(lambda: not (shared.run_dir / "stop").is_symlink())
    (shared.run_dir / "go").touch()
    slurm_cluster.wait(job)
    assert shared.victim.read_text() == "precious"


def test_a_second_member_runs_the_script_in_the_owners_directory(
    shared: SharedRun, slurm_cluster: SlurmCluster
) -> None:
    shared.sh(OWNER, "touch go")
    for user in (OWNER, MEMBER):
        job = shared.submit(user)
        assert slurm_cluster.wait(job) == "COMPLETED", shared.log(job)
        assert f"ran as {user}" in shared.log(job)
        assert "not permitted" not in shared.log(job)
    group = pwd.getpwnam(OWNER).pw_gid
    assert {path.stat().st_gid for path in shared.run_dir.rglob("*")} == {group}
    assert (shared.run_dir / "jobs").stat().st_mode & 0o7777 == 0o2770


def test_slurm_that_hides_jobs_of_others_is_a_warning(shared: SharedRun, slurm_cluster: SlurmCluster) -> None:
    """The program has no lock, so both jobs run. Slurm shows a user's own jobs."""
    conf = slurm_cluster.directory / "slurm.conf"
    text = conf.read_text()
    conf.write_text(text + "PrivateData=jobs\n")
    slurm_cluster.run("scontrol", "reconfigure")
    try:
        first = shared.submit(OWNER)
        wait_until(lambda: (shared.run_dir / f"run-{first}.log").exists() and "ran as" in shared.log(first))
        own = shared.submit(OWNER)
        assert slurm_cluster.wait(own) == "FAILED"
        assert f"job {first} is running in {shared.run_dir}" in shared.log(own)
        other = shared.submit(MEMBER)  # not before: it would write its number into RUNNING
        wait_until(lambda: (shared.run_dir / f"run-{other}.log").exists() and "ran as" in shared.log(other))
        assert f"If job {first} of {OWNER} is still running in {shared.run_dir}, only the lock" in shared.log(
            other
        )
        (shared.run_dir / "go").touch()
        assert {slurm_cluster.wait(job) for job in (first, other)} == {"COMPLETED"}
    finally:
        conf.write_text(text)
        slurm_cluster.run("scontrol", "reconfigure")
