"""A run resumes from the newest valid checkpoint, whatever was damaged, killed or unreadable."""

from __future__ import annotations

import dataclasses
import errno
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from tests.trainer.runs import Ranks, Run, finished, run
from tests.trainer.small_run import HOOK, small_config
from tests.trainer.tensors import assert_same_checkpoint
from trainer import checkpoint
from trainer.checkpoint import reading
from trainer.checkpoint.loading_errors import raise_environment_fault
from trainer.checkpoint.retention import prune
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMPLETE, STARTED, TRACKER, list_checkpoints
from trainer.metrics.console import Log


def no_beat() -> None:
    """A beat that does nothing."""


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
        return checkpoint.find(directory, config, {}, Log(is_rank_0=False, progress=False), no_beat)

    def assert_whole(self, path: Path) -> None:
        """All files of a checkpoint are as the run wrote them."""
        assert contents(path) == contents(self.run.checkpoints / path.name)


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != COMPLETE}


@pytest.fixture(scope="module")
def saved(
    corpus: str, tmp_path_factory: pytest.TempPathFactory, process_groups: ProcessGroupCollection
) -> Saved:
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
@pytest.mark.parametrize("times", [12, pytest.param(500, marks=pytest.mark.slow)])
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
    source = checkpoint.find(directory, saved.config, {}, Log(is_rank_0=True, progress=False), no_beat)
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
    source = checkpoint.find(tmp_path / "own", config, {}, Log(is_rank_0=False, progress=False), no_beat)
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
        checkpoint.find(directory, wider, {}, Log(is_rank_0=False, progress=False), no_beat)
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


@pytest.mark.slow  # kills at any operation, above
@pytest.mark.process
@pytest.mark.parametrize("kills", [2, 15])
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
        # torch raises nothing more specific on a CPU
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"
        ),
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
    source = checkpoint.find(directory, saved.config, {}, Log(is_rank_0=True, progress=False), no_beat)
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
    assert checkpoint.find(directory, saved.config, {}, log, lambda: beats.append(None))
    assert len(beats) >= 5  # two candidates, two looks at sizes, and at least one while bytes were read
