"""kill -9 at any time and place: published files are always complete, and the same command makes the rest."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from hpcgen.data.record import Record

from .data_runs import (
    CHAIN,
    documents,
    json_lines,
    left_behind,
    make_units,
    planned_corpus,
    published,
    write_file,
    write_job,
)

pytestmark = pytest.mark.process

HOOK = Path(__file__).parent / "kill_hook"
STAGES = (*CHAIN, "prepare")
NAMES = ["a.jsonl.zst", "b.jsonl.gz", "c.jsonl"]
NUM_OUTPUTS = 2


@dataclass(frozen=True)
class Lives:
    """A corpus in two versions, so that files are also replaced, and what each stage makes of each version."""

    folder: Path
    job_files: dict[str, Path]
    """By directory: the chain's and that of prepare."""
    right: tuple[dict[str, bytes], dict[str, bytes]]
    """By version: the content of every published file, by directory and name; records aside."""

    def plan(self, version: int) -> None:
        """Puts this version of the corpus in its place."""
        for directory in self.job_files:
            plan_version(self.folder, version, directory)

    def run(self, stage: str, at: int = 0, how: str = "torn", seconds: float | None = None) -> bool:
        """Runs the command of a stage and kills it at an operation, or after a time; True when it came to its end."""
        counter = self.folder / "counter"
        counter.unlink(missing_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": str(HOOK),
            "KILL_COUNTER": str(counter),
            "KILL_AT": str(at),
            "KILL_HOW": how,
        }
        arguments = ["data", stage, "-c", str(self.job_files[directory_of(stage)]), "--workers", "1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "hpcgen", *arguments],
            env=environment,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL), output
        return process.returncode == 0

    def check(self) -> None:
        """Published files are complete, of one version or the other, and match their record."""
        for name, content in self.found().items():
            if not name.endswith(".record.json"):
                assert content in (self.right[0][name], self.right[1][name]), f"{name} is torn"
        for directory in self.job_files:
            for path in (self.folder / directory).rglob("*.record.json"):
                if not path.name.startswith("."):
                    record = msgspec.json.decode(path.read_bytes(), type=Record)
                    for output in record.outputs:
                        content = (self.folder / directory / output.name).read_bytes()
                        assert hashlib.sha256(content).hexdigest() == output.sha256, output.name

    def check_end(self, version: int, stages=STAGES) -> None:
        """All of these stages are done, and nothing else is there."""
        self.check()
        found = {name: content for name, content in self.found().items() if not name.endswith(".record.json")}
        folders = {"extract": "extract", "concat": "concat", "tokenize": "tokens", "prepare": "tokens"}
        begins = tuple(f"{directory_of(stage)}/{folders[stage]}/" for stage in stages)
        assert {name for name in self.right[version] if name.startswith(begins)} == {
            name for name in found if name.startswith(begins)
        }
        assert not [
            name for name in found if name.startswith(begins) and found[name] != self.right[version][name]
        ]
        assert left_behind(self.folder) == []

    def found(self) -> dict[str, bytes]:
        """Everything published."""
        return {
            f"{directory}/{name}": (self.folder / directory / name).read_bytes()
            for directory in self.job_files
            for name in published(self.folder / directory)
        }


def directory_of(stage: str) -> str:
    return "fused" if stage == "prepare" else "chain"


def plan_version(folder: Path, version: int, directory: str):
    source = folder / f"source{version}"
    return planned_corpus(source, folder / directory, NAMES, num_output_files=NUM_OUTPUTS)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Lives:
    folder = tmp_path_factory.mktemp("lives")
    right: list[dict[str, bytes]] = []
    job_files = {}
    for version in (0, 1):
        for seed, name in enumerate(NAMES):
            write_file(folder / f"source{version}" / name, json_lines(documents(30, 10 * version + seed)))
        for directory in ("chain", "fused"):
            job = plan_version(folder, version, directory)
            make_units(job, *(CHAIN if directory == "chain" else ["prepare"]))
            job_files[directory] = write_job(job, folder / f"{directory}.json")
        right.append(Lives(folder, job_files, ({}, {})).found())
        for directory in job_files:
            shutil.rmtree(folder / directory)
    for contents in right:
        for name in [name for name in contents if name.endswith(".record.json")]:
            del contents[name]
    assert right[0].keys() == right[1].keys()
    assert not [name for name in right[0] if right[0][name] == right[1][name]]
    return Lives(folder, job_files, (right[0], right[1]))


@pytest.fixture
def lives(made) -> Lives:
    made.plan(0)
    yield made
    for directory in made.job_files:
        shutil.rmtree(made.folder / directory)


def killed_at_random(lives: Lives, num_kills: int, seed: int) -> None:
    """Runs all stages over and over, now on one version of the corpus and now on the other, and kills them."""
    choose = random.Random(seed)
    operations = {"extract": 40, "concat": 40, "tokenize": 55, "prepare": 60}  # a few more than there are
    version = kills = ends = 0
    while kills < num_kills:
        for stage in STAGES:
            while True:
                if kills < num_kills and choose.random() < 0.7:
                    at, seconds = choose.randint(1, operations[stage]), None
                else:
                    at, seconds = 0, choose.uniform(0.1, 0.7) if kills < num_kills else None
                ended = lives.run(stage, at, choose.choice(["before", "after", "torn"]), seconds)
                lives.check()
                if ended:
                    break
                kills += 1
        lives.check_end(version)
        ends += 1
        version = 1 - version
        lives.plan(version)
    assert ends


def test_random_kills(lives):
    killed_at_random(lives, num_kills=3, seed=1)


@pytest.mark.slow
def test_more_random_kills(lives):
    killed_at_random(lives, num_kills=200, seed=2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_a_kill_at_every_write_fsync_and_rename(lives, stage):
    """A run that replaces the outputs of another version, killed after half of each write."""
    order = STAGES[: STAGES.index(stage)] if stage != "prepare" else ()
    assert all(lives.run(before) for before in (*order, stage))
    lives.plan(1)
    assert all(lives.run(before) for before in order)
    directory = lives.folder / directory_of(stage)
    shutil.copytree(directory, lives.folder / "before")
    try:
        at = 1
        while not lives.run(stage, at):
            lives.check()
            assert lives.run(stage)
            lives.check_end(1, [stage])
            shutil.rmtree(directory)
            shutil.copytree(lives.folder / "before", directory)
            at += 1
        assert at > 20  # the hook does count
    finally:
        shutil.rmtree(lives.folder / "before")
