"""Checkpoints are written while training continues, and a save that fails leaves what was there before."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.forked import run_python
from tests.trainer.runs import GPT, Run, finished, gpt_config, run
from tests.trainer.single_rank import resolved
from tests.trainer.small_run import HOOK, small_config
from tests.trainer.tensors import assert_same_checkpoint
from trainer import checkpoint
from trainer.checkpoint import writer
from trainer.checkpoint.optimizer_state import boxes
from trainer.checkpoint.saving import interval_s
from trainer.checkpoint.writer import HostBuffer
from trainer.contract.config import CheckpointConfig
from trainer.contract.errors import Exit
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import list_checkpoints
from trainer.data.blend import Blend
from trainer.data.datasets import Reading
from trainer.metrics.console import Log


@pytest.fixture(scope="module")
def in_background(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that saved in the background after iterations 2, 4 and 6."""
    return finished(small_config(corpus, tmp_path_factory.mktemp("saved")))


@pytest.mark.process
def test_training_continues_while_a_checkpoint_is_written(
    corpus: str, in_background: Run, tmp_path: Path
) -> None:
    """The bytes are the same as when training waits, so the saved state is that of the step, not of a later one."""
    waiting = finished(small_config(corpus, tmp_path / "waiting", async_save=False))
    assert waiting.steps == in_background.steps
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        assert_same_checkpoint(waiting.checkpoints / name, in_background.checkpoints / name)
        for file in waiting.checkpoints.glob(f"{name}/*.distcp"):
            assert file.read_bytes() == (in_background.checkpoints / name / file.name).read_bytes()
    assert [event["asynchronous"] for event in events(waiting)] == [False] * 3
    assert [event["asynchronous"] for event in events(in_background)] == [True] * 3


def events(result: Run) -> list[dict[str, Any]]:
    return [event for event in result.events if event["event"] == "checkpoint"]


@pytest.mark.process
@pytest.mark.slow
def test_slow_storage_makes_saves_wait_for_each_other(
    corpus: str, in_background: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", HOOK)
    monkeypatch.setenv("SLEEP_AT_FSYNC", "0.2")
    result = finished(small_config(corpus, tmp_path / "run", save_interval=1))
    assert result.steps == in_background.steps
    assert [event["iteration"] for event in events(result)] == [1, 2, 3, 4, 5, 6]
    for name in ("iter_0000002", "iter_0000004", "iter_0000006"):
        assert_same_checkpoint(result.checkpoints / name, in_background.checkpoints / name)


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


NAMESPACE = ("unshare", "--user", "--map-root-user", "--mount", "true")

ON_A_SMALL_DISK = """
import ctypes, json, multiprocessing, os, shutil, subprocess, sys
from pathlib import Path
from tests.trainer.forked import be_python
from tests.trainer.runs import environment, free_port

size, disk, left, config, log = sys.argv[1:]
user, group, libc = os.getuid(), os.getgid(), ctypes.CDLL(None, use_errno=True)
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
if libc.unshare(CLONE_NEWNS | CLONE_NEWUSER):
    raise OSError(ctypes.get_errno(), "unshare")
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
    Path("/proc/self", name).write_text(text)
subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", disk], check=True)
values, port = json.loads(Path(config).read_text()), free_port()
Path(values["run_dir"]).mkdir(parents=True, exist_ok=True)
with open(log, "w") as file:
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
fork, count = multiprocessing.get_context("fork"), values["world_size"]
ranks = [
    fork.Process(target=be_python, args=(["-m", "trainer", "--config", config], environment(n, count, port)))
    for n in range(count)
]
for rank in ranks:
    rank.start()
for rank in ranks:
    rank.join()
Path(log + ".statuses").write_text(json.dumps([rank.exitcode for rank in ranks]))
shutil.copytree(disk, left)
"""


def on_a_small_disk(size: str, config: dict[str, Any], tmp_path: Path) -> tuple[list[int], str]:
    """Statuses and log of a run, with a tmpfs at `disk`, in a user namespace; `left` is what it held at the end."""
    if not shutil.which("unshare") or subprocess.run(NAMESPACE, check=False).returncode:
        pytest.skip("no user namespaces here")
    (tmp_path / "disk").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(config))
    names = ("disk", "left", "config.json", "log")
    done = run_python("-c", ON_A_SMALL_DISK, size, *(str(tmp_path / name) for name in names))
    assert done.returncode == 0, done.stderr
    return json.loads((tmp_path / "log.statuses").read_text()), (tmp_path / "log").read_text()


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


@pytest.mark.usefixtures("process_groups")
@pytest.mark.parametrize(("minutes", "is_time"), [(1e-9, True), (1e9, False)])
def test_a_save_is_due_when_its_interval_is_over(minutes: float, is_time: bool, tmp_path: Path) -> None:
    keys = CheckpointConfig(save_interval_minutes=minutes)
    config = dataclasses.replace(resolved(tmp_path, GPT), checkpoint=keys)
    log = Log(is_rank_0=False, progress=False)
    reading = Reading((Blend("train", 0, ()),), None, 0)
    checkpoints = checkpoint.Checkpoints(
        tmp_path, config, None, log, lambda *_: None, lambda: None, {}, reading
    )
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
