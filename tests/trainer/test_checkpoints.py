"""Checkpoints are written during training, completely or not at all, and a run resumes from the newest valid one."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from tests.recorded_run import write_checkpoint
from tests.trainer.runs import GPT, ROOT, Ranks, Run, finished, gpt_config, run
from tests.trainer.tensors import assert_same_checkpoint
from trainer import checkpoint
from trainer.checkpoint import reading, writer
from trainer.checkpoint.loading import raise_environment_fault
from trainer.checkpoint.optimizer_state import boxes
from trainer.checkpoint.retention import prune
from trainer.checkpoint.saving import interval_s
from trainer.checkpoint.writer import HostBuffer
from trainer.contract import checkpoint_files
from trainer.contract import config as configuration
from trainer.contract.checkpoint_files import COMPLETE, PINNED, STARTED, TRACKER, kept, list_checkpoints
from trainer.contract.config import CheckpointConfig, TrainerConfig
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.evaluation import evaluated, result_file
from trainer.contract.resolve import resolve
from trainer.metrics.console import Log


def no_beat() -> None:
    """A beat that does nothing."""


HOOK = str(Path(__file__).parent / "snapshot_hook")
SMALL = GPT | {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 512,
}


@dataclasses.dataclass(frozen=True)
class Saved:
    """A run that kept its checkpoints of iterations 2, 4 and 6."""

    run: Run
    config: TrainerConfig

    def copy(self, target: Path) -> Path:
        """Its checkpoints, to be damaged."""
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self.run.checkpoints, target)
        return target

    def find(self, directory: Path) -> checkpoint.Source | None:
        """The checkpoint that a run with these checkpoints resumes from."""
        config = dataclasses.replace(self.config, run_dir=str(directory.parent))
        return checkpoint.find(directory, config, Log(is_rank_0=False, progress=False), no_beat)

    def assert_whole(self, path: Path) -> None:
        """All files of a checkpoint are as the run wrote them."""
        assert contents(path) == contents(self.run.checkpoints / path.name)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != COMPLETE}


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group with only this process, for functions that use collectives."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def small_config(corpus: str, directory: Path, **checkpoint_keys: Any) -> dict[str, Any]:
    return gpt_config(corpus, directory, SMALL) | {"checkpoint": {"save_interval": 2, **checkpoint_keys}}


@pytest.fixture(scope="module")
def saved(corpus: str, tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Saved:
    plain = small_config(corpus, tmp_path_factory.mktemp("saved"))
    return Saved(finished(plain), resolve(configuration.from_dict(TrainerConfig, plain, "test")))


def flip(file: Path, rng: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)


def cut(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.randrange(file.stat().st_size))


def zero(file: Path, rng: random.Random) -> None:
    """A page that was never written, as after a power cut."""
    data = bytearray(file.read_bytes())
    start = rng.randrange(len(data))
    page = data[start : start + 4096]
    data[start : start + 4096] = bytes(len(page)) if any(page) else b"\1" * len(page)
    file.write_bytes(data)


def lose(file: Path, rng: random.Random) -> None:
    file.unlink()


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (flip, cut, zero, lose)


@pytest.mark.process
@pytest.mark.parametrize("times", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_damaged_checkpoints_are_never_loaded(times: int, saved: Saved, tmp_path: Path) -> None:
    rng = random.Random(times)
    for _ in range(times):
        directory = saved.copy(tmp_path / "checkpoints")
        newest = directory / "iter_0000006"
        file = rng.choice([*sorted(newest.iterdir()), directory / TRACKER])
        damage = rng.choice(DAMAGES)
        damage(file, rng)
        source = saved.find(directory)
        assert source is not None
        what = f"{damage.__name__} {file.name}"
        if file.name == TRACKER:
            assert source.path == newest, what
        elif file.name == COMPLETE and source.path == newest:  # a flip that leaves the same JSON
            assert list_checkpoints(directory)[0].record == list_checkpoints(saved.run.checkpoints)[0].record
        else:
            assert source.path.name == "iter_0000004", what
            assert (directory / "iter_0000006.broken").is_dir()
        saved.assert_whole(source.path)
        assert (directory / TRACKER).read_text() == str(source.checkpoint.iteration)


@pytest.mark.process
def test_the_search_goes_back_as_far_as_it_must(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    shutil.rmtree(directory / "iter_0000006")
    (directory / "iter_0000004" / "common.pt").unlink()
    source = checkpoint.find(directory, saved.config, Log(is_rank_0=True, progress=False), no_beat)
    assert source is not None
    assert source.path == directory / "iter_0000002"
    broken = f"{directory}/iter_0000004: common.pt is missing. It was renamed to iter_0000004.broken"
    assert capsys.readouterr().out == f"BROKEN CHECKPOINT {broken}\n"
    assert source.passed_over == (broken,)


@pytest.mark.process
def test_a_run_that_ever_saved_does_not_start_from_the_beginning(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    for iteration in (2, 4, 6):
        cut(directory / f"iter_{iteration:07d}" / "__0_0.distcp", random.Random(0))
    for _ in range(2):  # the second time, only renamed directories are left
        with pytest.raises(TrainerError, match=r"iter_0000006.broken was a checkpoint|latest.* names one"):
            saved.find(directory)
        (directory / TRACKER).unlink(missing_ok=True)


@pytest.mark.process
def test_a_second_broken_checkpoint_of_the_same_name_is_also_kept(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    for suffix in ("", "-2", "-3"):
        shutil.rmtree(directory / "iter_0000006", ignore_errors=True)
        shutil.copytree(saved.run.checkpoints / "iter_0000006", directory / "iter_0000006")
        (directory / "iter_0000006" / COMPLETE).write_text("{}")
        saved.find(directory)
        assert (directory / f"iter_0000006.broken{suffix}").is_dir()


@pytest.mark.process
def test_a_tracker_that_was_never_published_is_swept(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    left = directory / f".{TRACKER}.ndv5-001.4711"
    left.write_text("6")
    saved.find(directory)
    assert not left.exists()
    assert (directory / TRACKER).read_text() == "6"


@pytest.mark.process
def test_the_directory_to_start_from_is_left_as_it_is(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "there")
    lose(directory / "iter_0000006" / ".metadata", random.Random(0))
    before = sorted(directory.rglob("*"))
    plain = configuration.to_dict(saved.config) | {
        "checkpoint": {"load": str(directory)},
        "run_dir": str(tmp_path / "run"),
    }
    config = configuration.from_dict(TrainerConfig, plain, "test")
    source = checkpoint.find(tmp_path / "own", config, Log(is_rank_0=False, progress=False), no_beat)
    assert source is not None
    assert source.path == directory / "iter_0000004"
    assert sorted(directory.rglob("*")) == before


@pytest.mark.process
def test_an_unreadable_checkpoint_is_not_called_broken(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    file = directory / "iter_0000006" / "common.pt"
    file.unlink()
    file.symlink_to(file)  # as a server that answers with an error: to root, nothing is forbidden
    with pytest.raises(TrainerError, match=r"common\.pt cannot be read"):
        saved.find(directory)
    assert (directory / "iter_0000006").is_dir()


@pytest.mark.process
def test_another_model_is_refused_not_called_broken(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    wider = dataclasses.replace(saved.config, model=dataclasses.replace(saved.config.model, hidden_size=32))
    with pytest.raises(TrainerError, match=r"iter_0000006: .*hidden_size: 16 -> 32"):
        checkpoint.find(directory, wider, Log(is_rank_0=False, progress=False), no_beat)
    assert (directory / "iter_0000006").is_dir()


@pytest.mark.process
def test_a_kill_at_any_operation_leaves_the_newest_complete_checkpoint(
    corpus: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(corpus, tmp_path / "run", keep_last=1)
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("SNAPSHOT_OF", str(tmp_path / "run" / "checkpoints"))
    monkeypatch.setenv("SNAPSHOT_TO", str(tmp_path / "snapshots"))
    finished(config)
    found = []
    for snapshot in sorted((tmp_path / "snapshots").iterdir()):
        names = {path.parent.name for path in snapshot.glob(f"iter_*/{COMPLETE}")}
        source = saved.find(snapshot)
        assert (source.path.name if source else None) == max(names, default=None)
        if source:
            assert checkpoint_files.problems(source.checkpoint, hashes=True) == []
        found.append(source.checkpoint.iteration if source else 0)
        assert not list(snapshot.glob(".*.removing"))
    assert found == sorted(found)
    assert set(found) == {0, 2, 4, 6}
    assert len(found) > 30


@pytest.mark.process
@pytest.mark.parametrize("kills", [2, pytest.param(15, marks=pytest.mark.slow)])
def test_a_run_killed_inside_saves_trains_like_an_uninterrupted_one(
    kills: int, corpus: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(kills)
    config = small_config(corpus, tmp_path / "run", save_interval=1)
    undisturbed = saved.run
    if (train_iters := 3 * kills) != saved.config.training.train_iters:
        config["training"]["train_iters"] = train_iters
        undisturbed = finished(config | {"run_dir": str(tmp_path / "undisturbed"), "checkpoint": {}})
    monkeypatch.setenv("PYTHONPATH", HOOK)
    for kill in range(kills):
        held = tmp_path / f"held-{kill}"
        monkeypatch.setenv("HOLD_SAVE", str(rng.randint(1, 2)))
        monkeypatch.setenv("HELD", str(held))
        ranks = Ranks(config)
        while not held.exists():
            assert ranks.processes[0].poll() is None, ranks.wait().log
            time.sleep(0.02)
        ranks.send(signal.SIGKILL)
        assert ranks.wait().statuses == (-signal.SIGKILL,)
        assert list_checkpoints(ranks.directory / "checkpoints")[0].is_cut_off
    monkeypatch.delenv("HOLD_SAVE")
    result = finished(config)
    assert result.log.count("Its save was interrupted, so it was removed") == kills
    assert result.steps == undisturbed.steps
    last = f"iter_{train_iters:07d}"
    assert_same_checkpoint(result.checkpoints / last, undisturbed.checkpoints / last)


def going_on(corpus: str, saved: Saved, directory: Path, **keys: Any) -> dict[str, Any]:
    """A run that has the checkpoints of iterations 2 and 4, and resumes."""
    saved.copy(directory / "checkpoints")
    shutil.rmtree(directory / "checkpoints" / "iter_0000006")
    return small_config(corpus, directory) | keys


@pytest.mark.process
def test_a_rank_that_dies_during_a_load_does_not_mark_the_checkpoint_as_broken(
    corpus: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("AT_LOAD_RANK", "1")
    monkeypatch.setenv("AT_LOAD", "die")
    result = run(going_on(corpus, saved, tmp_path / "run", world_size=2))
    assert result.statuses == (Exit.LOST_PEERS, -signal.SIGKILL), result.log
    assert "lost its peers after iteration 0 (load)" in result.log
    assert not (result.directory / "FAILED").exists()
    assert (result.checkpoints / "iter_0000004").is_dir()


@pytest.mark.parametrize(
    "cause",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp"),
        RuntimeError("[/gloo/transport/tcp/pair.cc:537] Connection closed by peer"),
    ],
)
def test_an_error_wrapped_by_torch_during_a_load_keeps_its_cause(cause: RuntimeError, tmp_path: Path) -> None:
    with pytest.raises(type(cause), match=re.escape(str(cause))):
        raise_environment_fault(CheckpointException("load", {3: (cause, None)}), tmp_path)
    raise_environment_fault(CheckpointException("load", {3: (KeyError("a tensor"), None)}), tmp_path)


@pytest.mark.process
def test_failing_storage_during_a_load_does_not_mark_the_checkpoint_as_broken(
    corpus: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("AT_LOAD_RANK", "0")
    monkeypatch.setenv("AT_LOAD", str(errno.EIO))
    result = run(going_on(corpus, saved, tmp_path / "run"))
    assert result.statuses == (Exit.FAULT,)
    assert "distcp cannot be read (Input/output error)" in result.log
    assert "Traceback" not in result.log
    assert not (result.directory / "FAILED").exists()
    monkeypatch.delenv("AT_LOAD_RANK")
    assert finished(going_on(corpus, saved, tmp_path / "run")).steps[-1] == saved.run.steps[-1]


@pytest.mark.process
def test_training_continues_while_a_checkpoint_is_written(corpus: str, saved: Saved, tmp_path: Path) -> None:
    """The bytes are the same as when training waits, so the saved state is that of the step, not of a later one."""
    waiting = finished(small_config(corpus, tmp_path / "waiting", async_save=False))
    assert waiting.steps == saved.run.steps
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        assert_same_checkpoint(waiting.checkpoints / name, saved.run.checkpoints / name)
        for file in waiting.checkpoints.glob(f"{name}/*.distcp"):
            assert file.read_bytes() == (saved.run.checkpoints / name / file.name).read_bytes()
    assert [event["asynchronous"] for event in events(waiting)] == [False] * 3
    assert [event["asynchronous"] for event in events(saved.run)] == [True] * 3


def events(result: Run) -> list[dict[str, Any]]:
    return [event for event in result.events if event["event"] == "checkpoint"]


@pytest.mark.process
@pytest.mark.slow
def test_slow_storage_makes_saves_wait_for_each_other(
    corpus: str, saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("SLEEP_AT_FSYNC", "0.2")
    result = finished(small_config(corpus, tmp_path / "run", save_interval=1))
    assert result.steps == saved.run.steps
    assert [event["iteration"] for event in events(result)] == [1, 2, 3, 4, 5, 6]
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        assert_same_checkpoint(result.checkpoints / name, saved.run.checkpoints / name)


@pytest.mark.process
@pytest.mark.parametrize("failures", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_save_that_fails_temporarily_is_retried_once(
    failures: int, corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A background save fails on one of two ranks. The GPUs still have a valid state, so no step is lost."""
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("FAIL_RANK", "1")
    monkeypatch.setenv("FAIL_SAVES", str(failures))
    result = run(small_config(corpus, tmp_path / "run", save_interval=2) | {"world_size": 2})
    [line] = [line for line in result.log.splitlines() if line.endswith("The save is retried once")]
    assert re.search(r"could not be saved: rank 1 on \S+: .*/iter_0000002/.* \(errno 5\)", line)
    complete = [
        checkpoint.iteration for checkpoint in list_checkpoints(result.checkpoints) if checkpoint.flaw is None
    ]
    if failures == 1:
        assert result.statuses == (Exit.DONE, Exit.DONE), result.log
        assert {4, 6} < set(complete)
        assert len(complete) == 3
    else:
        assert result.statuses == (Exit.NOT_SAVED, Exit.NOT_SAVED), result.log
        assert complete == []
        assert not (result.directory / "FAILED").exists()  # another attempt may do


ON_A_SMALL_DISK = """
import json, sys
from tests.trainer.runs import run
result = run(json.loads(sys.argv[1]))
print(json.dumps([result.statuses, result.log]))
"""


def on_a_small_disk(size: str, config: dict[str, Any], tmp_path: Path) -> tuple[list[int], str]:
    """Statuses and log of a run, with a tmpfs at `disk`, in a user namespace; `left` is what it held at the end."""
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*namespace, "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = 'set -e; mount -t tmpfs -o "size=$1" none "$2"; "${@:4}"; cp -r "$2" "$3"'
    program = [sys.executable, "-c", ON_A_SMALL_DISK, json.dumps(config)]
    done = subprocess.run(
        [*namespace, "bash", "-c", script, "bash", size, str(disk), str(tmp_path / "left"), *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    statuses, log = json.loads(done.stdout)
    return statuses, log


@pytest.mark.process
def test_a_full_disk_fails_the_save_and_leaves_the_one_before(corpus: str, tmp_path: Path) -> None:
    """The file system has space for one checkpoint but not for two."""
    disk = tmp_path / "disk"
    config = gpt_config(corpus, tmp_path / "run") | {"world_size": 2}
    config["checkpoint"] = {"save_interval": 2, "save": str(disk), "keep_last": 1}
    statuses, log = on_a_small_disk("7m", config, tmp_path)
    assert statuses == [Exit.NOT_SAVED] * 2, log
    assert log.count("a checkpoint could not be saved: rank ") == 1
    assert f"{disk}/iter_0000004/" in log
    assert "No space left on device (errno 28)" in log
    assert "Traceback" not in log
    assert "errno 28" in (tmp_path / "run" / "FAILED").read_text()
    torn, whole = list_checkpoints(tmp_path / "left")
    assert (torn.iteration, torn.is_cut_off) == (4, True)
    assert (whole.iteration, checkpoint_files.problems(whole, hashes=True)) == (2, [])


@pytest.mark.process
def test_a_full_disk_that_holds_the_run_directory_too_is_marked_as_final(corpus: str, tmp_path: Path) -> None:
    """The files of the failed save are removed, so that there is space to record the reason."""
    config = gpt_config(corpus, tmp_path / "disk" / "run") | {"world_size": 2}
    config["checkpoint"] = {"save_interval": 2, "keep_last": 1}
    statuses, log = on_a_small_disk("7m", config, tmp_path)
    assert statuses == [Exit.NOT_SAVED] * 2, log
    left = tmp_path / "left" / "run"
    assert (left / "FAILED").exists()
    assert not list(left.glob(".FAILED*"))
    [torn] = [checkpoint for checkpoint in list_checkpoints(left / "checkpoints") if checkpoint.flaw]
    assert not list(torn.path.glob("*.distcp"))


@pytest.mark.process
def test_an_index_that_does_not_fit_on_the_disk_is_reported_in_one_line(corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path / "disk" / "run")
    config["training"]["train_iters"] = 200_000
    statuses, log = on_a_small_disk("1m", config, tmp_path)
    assert statuses == [Exit.REFUSED], log
    assert re.search(
        r"^trainer: .*/index-cache.* cannot be written \(.*(disk full|No space left)", log, re.MULTILINE
    )
    assert "Traceback" not in log
    assert (tmp_path / "left" / "run" / "FAILED").exists()


@pytest.mark.process
@pytest.mark.parametrize(("minutes", "is_time"), [(1e-9, True), (1e9, False)])
def test_a_save_is_due_when_its_interval_is_over(
    minutes: float, is_time: bool, saved: Saved, tmp_path: Path
) -> None:
    keys = dataclasses.replace(saved.config.checkpoint, save_interval_minutes=minutes)
    config = dataclasses.replace(saved.config, checkpoint=keys)
    log = Log(is_rank_0=False, progress=False)
    checkpoints = checkpoint.Checkpoints(tmp_path, config, None, log, lambda *_: None, lambda: None, {})
    assert checkpoints.vote().save == is_time


@pytest.mark.parametrize(("steps", "minutes", "seconds"), [(10, None, None), (10, 5, 300), (None, 0.5, 30)])
def test_the_time_between_saves(steps: int | None, minutes: float | None, seconds: float | None) -> None:
    config = CheckpointConfig(save_interval=steps, save_interval_minutes=minutes)
    assert interval_s(config) == seconds


@pytest.mark.process
def test_data_parallel_ranks_share_the_writing(corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path / "run")
    config["world_size"] = 2
    config["training"]["train_iters"] = 2
    result = finished(config)
    sizes = [
        sum(file.stat().st_size for file in result.checkpoints.glob(f"iter_0000002/__{rank}_*.distcp"))
        for rank in range(2)
    ]
    assert min(sizes) > 0.45 * sum(sizes)


def make(directory: Path, *iterations: int, pinned: tuple[int, ...] = (), torn: tuple[int, ...] = ()) -> None:
    for iteration in iterations:
        path = checkpoint_files.iteration_directory(directory, iteration)
        if iteration in torn:
            path.mkdir(parents=True)
        else:
            write_checkpoint(directory, iteration)
        if iteration in pinned:
            (path / PINNED).touch()


def remaining(directory: Path) -> list[int]:
    return sorted(checkpoint.iteration for checkpoint in list_checkpoints(directory))


def test_retention(tmp_path: Path) -> None:
    make(tmp_path, *range(10, 110, 10), pinned=(10,), torn=(100,))
    assert prune(tmp_path, keep_last=None, keep_every=40) == []
    removed = prune(tmp_path, keep_last=2, keep_every=40)
    assert [path.name for path in removed] == [f"iter_{number:07d}" for number in (70, 60, 50, 30, 20)]
    assert remaining(tmp_path) == [10, 40, 80, 90, 100]
    reasons = kept(list_checkpoints(tmp_path), keep_last=2, keep_every=40)
    assert reasons == {
        100: "not complete",
        90: "the newest",
        80: "keep_last = 2",
        40: "keep_every = 40",
        10: "pinned",
    }


def test_retention_keeps_checkpoints_until_they_are_evaluated(tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    make(checkpoints, 0, *range(10, 60, 10), torn=(40,))
    rules = {"keep_last": 1, "keep_every": None, "evaluation_every": 20}
    assert [path.name for path in prune(checkpoints, **rules, evaluated=evaluated(tmp_path))] == [
        "iter_0000030",
        "iter_0000010",
        "iter_0000000",
    ]
    assert kept(list_checkpoints(checkpoints), **rules)[20] == "to be evaluated"
    result = result_file(tmp_path, 20)
    result.parent.mkdir()
    result.touch()
    assert [path.name for path in prune(checkpoints, **rules, evaluated=evaluated(tmp_path))] == [
        "iter_0000020"
    ]
    assert remaining(checkpoints) == [40, 50]


@pytest.mark.process
def test_damaged_newer_checkpoints_do_not_count_toward_keep_last(saved: Saved, tmp_path: Path) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    cut(directory / "iter_0000006" / "__0_0.distcp", random.Random(0))
    lose(directory / "iter_0000004" / "common.pt", random.Random(0))
    assert prune(directory, keep_last=1, keep_every=None) == []
    source = saved.find(directory)
    assert source is not None
    assert source.path == directory / "iter_0000002"


@pytest.mark.process
def test_an_incomplete_checkpoint_is_not_mistaken_for_one_of_megatron_lm(
    saved: Saved, tmp_path: Path
) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    for name in (COMPLETE, STARTED):
        (directory / "iter_0000006" / name).unlink()
    source = saved.find(directory)
    assert source is not None
    assert source.path == directory / "iter_0000004"
    assert (directory / "iter_0000006.broken").is_dir()


@pytest.mark.process
def test_a_run_does_not_depend_on_the_tracker(
    saved: Saved, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved.copy(tmp_path / "checkpoints")
    (directory / TRACKER).unlink()
    (directory / TRACKER).mkdir()
    source = checkpoint.find(directory, saved.config, Log(is_rank_0=True, progress=False), no_beat)
    assert source is not None
    assert source.path == directory / "iter_0000006"
    assert f"{TRACKER} was not updated to iter_0000006" in capsys.readouterr().out


@pytest.mark.process
def test_reading_a_large_checkpoint_reports_progress(
    saved: Saved, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a beat for each turn with progress in reading, so there is none if the storage hangs."""
    monkeypatch.setattr(reading, "EXCHANGE_INTERVAL_S", 0.0)
    directory = saved.copy(tmp_path / "checkpoints")
    cut(directory / "iter_0000006" / "__0_0.distcp", random.Random(0))
    beats: list[None] = []
    log = Log(is_rank_0=False, progress=False)
    assert checkpoint.find(directory, saved.config, log, lambda: beats.append(None))
    assert len(beats) >= 5  # two candidates, two looks at sizes, and at least one while bytes were read


def test_checkpoints_of_megatron_lm_are_listed_by_its_tracker_and_never_removed(tmp_path: Path) -> None:
    make(tmp_path, 10, 20, 30, torn=(10, 20, 30))
    for iteration in (10, 20, 30):
        (checkpoint_files.iteration_directory(tmp_path, iteration) / "metadata.json").touch()
    (tmp_path / TRACKER).write_text("20")
    assert [(c.iteration, c.is_foreign) for c in list_checkpoints(tmp_path)] == [
        (30, False),
        (20, True),
        (10, True),
    ]
    make(tmp_path, 40, 50)
    assert prune(tmp_path, keep_last=1, keep_every=None) == [tmp_path / "iter_0000040"]


@pytest.mark.parametrize("text", ["", "12x", "release", "\0\0", "9" * 40])
def test_a_truncated_tracker_is_ignored(text: str, tmp_path: Path) -> None:
    make(tmp_path, 12)
    (tmp_path / TRACKER).write_text(text)
    assert [c.iteration for c in list_checkpoints(tmp_path)] == [12]


def test_boxes_cover_a_range_once_and_in_order() -> None:
    rng = random.Random(0)
    for _ in range(500):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        start, stop = sorted(rng.randint(0, math.prod(shape)) for _ in range(2))
        indices = torch.arange(math.prod(shape)).view(shape)
        covered = []
        for offsets, sizes, at in boxes(shape, start, stop):
            box = indices[tuple(slice(o, o + size) for o, size in zip(offsets, sizes, strict=True))]
            assert box.flatten().tolist() == list(range(at, at + math.prod(sizes)))
            covered += box.flatten().tolist()
        assert covered == list(range(start, stop))


@pytest.mark.gpu
@pytest.mark.parametrize("prepared", [0, 2000, 100_000])
def test_training_does_not_change_a_copy_from_a_gpu(prepared: int) -> None:
    buffer = HostBuffer()
    if prepared:
        buffer.prepare(prepared, torch.cuda.current_device())
    for size in (1000, 3000, 10):  # grows once, and is used again
        tensors = [torch.arange(size, device="cuda").to(dtype) for dtype in (torch.bfloat16, torch.float32)]
        expected = [tensor.cpu() for tensor in tensors]
        [(_, _, (_, copied))] = buffer.copy([("path", "name", ([], [(None, tensor) for tensor in tensors]))])
        for tensor in tensors:
            tensor.zero_()
        for (_, copy), original in zip(copied, expected, strict=True):
            assert copy.is_pinned()
            assert copy.untyped_storage().nbytes() == original.nbytes
            assert torch.equal(copy, original)


@pytest.mark.gpu
def test_copies_are_right_where_memory_cannot_be_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = HostBuffer(), HostBuffer()
    tensor = torch.arange(1000, device="cuda")
    first.copy([("path", "name", ([], [(None, tensor)]))])
    # CUDA refuses to register memory twice
    monkeypatch.setattr(writer.mmap, "mmap", lambda *arguments, **keywords: first._memory)
    [(_, _, (_, [(_, copy)]))] = second.copy([("path", "name", ([], [(None, tensor)]))])
    expected = tensor.cpu()
    tensor.zero_()
    torch.cuda.synchronize()
    assert torch.equal(copy, expected)
