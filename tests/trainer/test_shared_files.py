"""What a trainer reads, writes and removes in a directory where another user can rename and replace everything."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgen.resources import shipped
from tests.patience import PATIENCE_S
from tests.trainer.runs import run
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError
from trainer.contract.errors import Exit
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.files.shared_files import JOB_DIRECTORY

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")

NOBODY = 65534
DIRECTORIES = ("checkpoints", "index-cache", "tensorboard", "stacks", "profile", "code", "evaluation")


@pytest.mark.parametrize(
    ("owner", "mode", "is_read"), [(0, 0o640, True), (NOBODY, 0o640, False), (0, 0o660, False)]
)
def test_a_configuration_in_the_jobs_directory_must_be_the_users_own(
    owner: int, mode: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "trainer.json"
    file.write_text("{}")
    file.chmod(mode)
    os.chown(file, owner, owner)
    with pytest.raises(ConfigError, match="is missing"):  # by hand: the file that the user names
        configuration.read(file)
    monkeypatch.setenv(JOB_DIRECTORY, str(tmp_path))
    with pytest.raises(ConfigError, match="is missing" if is_read else "others made it or can write to it"):
        configuration.read(file)


@pytest.mark.parametrize("name", DIRECTORIES)
@pytest.mark.parametrize("exists", [True, False])
def test_a_link_in_place_of_a_directory_is_refused_unless_it_is_the_users_own(
    name: str, exists: bool, tmp_path: Path
) -> None:
    run_dir, target = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    if exists:
        target.mkdir()
    link = run_dir / name
    link.symlink_to(target)
    directory = RunDirectory(run_dir, run_dir / "checkpoints", run_dir / "index-cache")
    directory.refuse_foreign_links()
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(OSError, match="is a symbolic link that user nobody placed") as refused:
        directory.refuse_foreign_links()
    assert refused.value.filename == str(link)


def test_every_directory_of_a_run_is_checked(tmp_path: Path) -> None:
    """A new attribute of RunDirectory is a file, or it is among DIRECTORIES."""
    names_of_files = (
        "metrics.jsonl last-step.json answers.jsonl heartbeat trained-with.json wandb-run-id "
        "DONE STOPPED FAILED"
    )
    files = set(names_of_files.split())
    run_dir = RunDirectory(tmp_path, tmp_path / "checkpoints", tmp_path / "index-cache")
    names = {value.name for name in dir(run_dir) if isinstance(value := getattr(run_dir, name), Path)}
    assert names - {tmp_path.name} == files | {*DIRECTORIES}


@pytest.mark.process
def test_retention_removes_nothing_through_a_planted_link(config: dict[str, Any], tmp_path: Path) -> None:
    """A member links the checkpoints of another run of the owner, which retention would remove."""
    run_dir, other = Path(config["run_dir"]), tmp_path / "other"
    for iteration in (1, 2, 3):
        (other / f"iter_{iteration:07d}").mkdir(parents=True)
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "checkpoints").symlink_to(other)
    os.lchown(run_dir / "checkpoints", NOBODY, NOBODY)
    config["checkpoint"] = {"save_interval": 1, "keep_last": 1}
    result = run(config)
    assert result.statuses == (Exit.REFUSED,)
    assert "checkpoints cannot be written (is a symbolic link that user nobody placed" in result.log
    assert len(list(other.iterdir())) == 3


PROGRAMS = {
    "own": ("", True),
    "of another user": (f"chown {NOBODY} program.sh", False),
    "writable for the group": ("chmod g+w program.sh", False),
    "pipe": ("rm program.sh; mkfifo program.sh", False),
    "missing": ("rm program.sh", False),
    "link to a file of another user": (
        "mv program.sh other; chown nobody other; ln -s other program.sh",
        False,
    ),
}


@pytest.mark.process
@pytest.mark.parametrize("case", PROGRAMS)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_task_runs_only_a_program_file_that_its_user_made(case: str, shell: str, tmp_path: Path) -> None:
    change, is_run = PROGRAMS[case]
    program = tmp_path / "program.sh"
    program.write_text("cd . || exit\necho ran\nexec false\n")
    program.chmod(0o640)
    subprocess.run(["sh", "-ec", change], cwd=tmp_path, check=True)
    library = (shipped("templates") / "lib/run.sh").read_text()
    [line] = [line for line in library.splitlines() if line.startswith("run_own_file=")]
    command = f'{line}\nexec {shell} -c "$run_own_file" {program}'
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.stdout, done.returncode) == (("ran\n", 1) if is_run else ("", 1))
    assert ("not run, since it is missing, or others made it" in done.stderr) != is_run
