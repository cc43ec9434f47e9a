"""Megatron-Core's index files are correct after builds in advance, kills at any point and any damage."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.forked import run_python
from tests.trainer.index_builds import build_until, fail_to_build, killed_at, started, status_of
from tests.trainer.runs import ROOT, environment, write_corpus
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.data.datasets import build_datasets
from trainer.data.index_files import Index, complete

SAMPLES = 24


@pytest.fixture(autouse=True)
def parallel_state_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def document(config: dict[str, Any], tmp_path: Path) -> dict[str, Any]:
    """Two pairs, of which validation reads one: four indices."""
    pairs = [write_corpus(tmp_path / name, documents=count) for name, count in (("a", 40), ("b", 3))]
    config["data"] = {"datasets": [{"prefix": pair} for pair in pairs], "split": "90,10,0"}
    config["training"]["eval_iters"] = 1
    return config


@pytest.fixture
def wanted(document: dict[str, Any]) -> TrainerConfig:
    return configuration.from_dict(TrainerConfig, document, "test")


class Start:
    """The start of a run: its output, and the samples that it would train on."""

    def __init__(self, config: TrainerConfig, cache: Path) -> None:
        self.said: list[str] = []
        datasets = build_datasets(config, cache, 1000, True, self.said.append)
        self.samples = [datasets["train"][i]["tokens"].tolist() for i in range(SAMPLES)]

    @property
    def text(self) -> str:
        return "\n".join(self.said)

    @property
    def has_built(self) -> bool:
        return "data: built" in self.text


def contents(cache: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in cache.iterdir()}


@pytest.mark.process
def test_training_finds_every_index_that_the_command_built(document: dict[str, Any], tmp_path: Path) -> None:
    document |= {"device": "cuda", "world_size": 512}
    file = tmp_path / "trainer.json"
    file.write_text(json.dumps(document))
    command = ("-m", "trainer.data.index_cache", "--config", str(file))
    result = run_python(*command, env=environment(0, 1, "0"))
    assert result.returncode == 0, result.stderr
    assert "data: built 4 indices" in result.stdout
    cache = tmp_path / "run" / "index-cache"
    built = contents(cache)
    assert len([name for name in built if name.endswith("-record.json")]) == 4
    start = Start(configuration.from_dict(TrainerConfig, document, "test"), cache)
    assert "4 of 4 indices" in start.text
    assert not start.has_built
    assert contents(cache) == built


@pytest.mark.process
def test_a_mistake_ends_the_command_in_one_line(document: dict[str, Any], tmp_path: Path) -> None:
    """No megatron.core is imported for a file that cannot be read."""
    result = subprocess.run(
        [sys.executable, "-m", "trainer.data.index_cache", "--config", str(tmp_path / "absent.json")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("index cache: ")
    assert "absent.json" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.process
@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_kill_at_any_point_the_next_run_completes_the_index(
    stride: int, document: dict[str, Any], tmp_path: Path
) -> None:
    document["training"]["eval_iters"] = 0
    wanted = configuration.from_dict(TrainerConfig, document, "test")
    undisturbed = Start(wanted, tmp_path / "undisturbed")
    expected = contents(tmp_path / "undisturbed")
    last = 12 + 12 + 10  # two pairs and their blend
    for point in range(1, last + 1, stride):
        cache = tmp_path / f"killed-at-{point}"
        assert killed_at(point, wanted, cache)
        assert Start(wanted, cache).samples == undisturbed.samples
        assert contents(cache) == expected
    assert not killed_at(last + 1, wanted, tmp_path / "completed")


@pytest.mark.process
@pytest.mark.parametrize("point", [9, *(pytest.param(n, marks=pytest.mark.slow) for n in (6, 11))])
def test_after_a_kill_during_a_rebuild_the_next_run_completes_the_index(
    point: int, wanted: TrainerConfig, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    undisturbed = Start(wanted, cache)
    expected = contents(cache)
    [shuffle] = cache.glob("*GPTDataset-valid-shuffle_index.npy")
    shuffle.write_bytes(bytes(shuffle.stat().st_size))
    assert killed_at(point, wanted, cache)
    assert Start(wanted, cache).samples == undisturbed.samples
    assert contents(cache) == expected


@pytest.mark.process
def test_concurrent_builds_make_the_same_files(wanted: TrainerConfig, tmp_path: Path) -> None:
    Start(wanted, tmp_path / "alone")
    cache = tmp_path / "shared"
    builds = [started(build_until, wanted, cache, None) for _ in range(4)]
    assert [status_of(build) for build in builds] == [0] * 4
    assert contents(cache) == contents(tmp_path / "alone")


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
@pytest.mark.parametrize(
    "name",
    [
        "GPTDataset-train-sample_index.npy",
        "GPTDataset-valid-document_index.npy",
        "BlendedDataset-train-dataset_index.npy",
        "GPTDataset-train-description.txt",
        "GPTDataset-valid-record.json",
    ],
)
def test_a_damaged_file_is_named_and_built_again(
    name: str, damage: Callable[[Path], None], wanted: TrainerConfig, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    undisturbed = Start(wanted, cache)
    expected = contents(cache)
    damage(next(cache.glob(f"*{name}")))
    start = Start(wanted, cache)
    assert "data: warning: the index" in start.text
    assert "built 1 index" in start.text
    assert start.samples == undisturbed.samples
    assert contents(cache) == expected
    assert not Start(wanted, cache).has_built


class Planted:
    """A pickle that creates a directory when it is unpickled."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.directory),)


@pytest.mark.parametrize("is_array", [True, False])
def test_an_index_with_code_in_it_is_never_loaded(
    is_array: bool, wanted: TrainerConfig, tmp_path: Path
) -> None:
    """Anyone who can write to a shared cache can also write its record, and Core loads pickled objects."""
    undisturbed = Start(wanted, tmp_path / "cache")
    path = next((tmp_path / "cache").glob("*GPTDataset-train-document_index.npy"))
    planted = Planted(tmp_path / "planted")
    path.write_bytes(pickle.dumps(planted))
    if is_array:
        numpy.save(path, numpy.array([planted], dtype=object), allow_pickle=True)
    record = Path(str(path).replace("document_index.npy", "record.json"))
    forged = json.loads(record.read_text())
    forged["files"][path.name] = {
        "size": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    record.write_text(json.dumps(forged))
    start = Start(wanted, tmp_path / "cache")
    assert "document_index.npy is not an array of numbers" in start.text
    assert start.samples == undisturbed.samples
    assert not planted.directory.exists()


def test_indices_are_checked_while_the_cyclic_gc_lets_other_threads_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11 fails if two threads parse at once, as numpy does with each header."""

    def index(key: str) -> Index:
        return Index(
            key, key, ("a.npy",), None, lambda made: numpy.save(made / f"{key}-a.npy", numpy.arange(5))
        )

    indices = [index(f"index{number}") for number in range(200)]
    said: list[str] = []
    complete(indices, tmp_path, said.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(4))
    threshold = gc.get_threshold()
    gc.freeze()
    gc.callbacks.append(lambda *arguments: time.sleep(0))
    gc.set_threshold(5)
    try:
        complete(indices, tmp_path, said.append)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.pop()
        gc.unfreeze()
    assert "200 of 200 indices" in said[-1]


def test_an_index_left_incomplete_by_megatron_is_not_used(wanted: TrainerConfig, tmp_path: Path) -> None:
    """Core writes files in place, and later only checks that they exist."""
    undisturbed = Start(wanted, tmp_path / "undisturbed")
    expected = contents(tmp_path / "undisturbed")
    cache = tmp_path / "cache"
    cache.mkdir()
    for name, content in expected.items():
        if not name.endswith("-record.json"):
            (cache / name).write_bytes(content[: len(content) // 2])
    start = Start(wanted, cache)
    assert "has no record" in start.text
    assert start.samples == undisturbed.samples
    assert contents(cache) == expected


def test_another_corpus_under_the_same_name_is_noticed(wanted: TrainerConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    before = Start(wanted, cache)
    os.utime(tmp_path / "b.idx")  # copied again with the same content
    assert not Start(wanted, cache).has_built
    write_corpus(tmp_path / "a", documents=40, first_token=500)
    start = Start(wanted, cache)
    assert f"train of {tmp_path}/a was made from another version of {tmp_path}/a.idx" in start.text
    assert start.samples != before.samples
    assert start.samples == Start(wanted, tmp_path / "new").samples


def test_a_cache_that_is_complete_need_not_be_writable(wanted: TrainerConfig, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    Start(wanted, cache)
    times = {path: path.stat().st_mtime_ns for path in (cache, *cache.iterdir())}
    Start(wanted, cache)
    assert {path: path.stat().st_mtime_ns for path in (cache, *cache.iterdir())} == times


@pytest.mark.process
def test_when_rank_0_cannot_build_no_rank_waits(wanted: TrainerConfig, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    ranks = [started(fail_to_build, wanted, tmp_path, number) for number in range(2)]
    assert [status_of(process) for process in ranks] == [0, 0]
    for number in range(2):
        assert "cache cannot be written (File exists)" in (tmp_path / f"rank-{number}").read_text()
