"""What `validate` says about the pairs of a training: samples read so far and samples to read."""

from __future__ import annotations

import dataclasses
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from hpcgen.planning.mixture import Reading, pair_readings, readings
from hpcgen.run_plan import pair_summary
from hpcgen.run_plan.pair_summary import doubts
from tests.recorded_run import CONFIG, write_checkpoint
from trainer.contract import config as configuration
from trainer.contract.config import Dataset, DataStage, TrainerConfig
from trainer.contract.files import checkpoint_files
from trainer.contract.resuming import provenance

TOKENS = 2048 * 256 * 100
"""Tokens of each pair, which are as many as 100 steps read."""


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    for name in ("code", "docs"):
        with (tmp_path / f"{name}.bin").open("wb") as file:
            file.truncate(2 * TOKENS)  # a sparse file
        (tmp_path / f"{name}.idx").write_bytes(
            struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 2, 3)
            + struct.pack("<2i2q3q", TOKENS - ord(name[0]), ord(name[0]), 0, 2 * TOKENS - 2, 0, 1, 2)
        )
    return [str(tmp_path / name) for name in ("code", "docs")]


def trainer(prefixes: list[str], *weights: float | None) -> TrainerConfig:
    pairs = [{"prefix": prefix, "weight": weight} for prefix, weight in zip(prefixes, weights, strict=True)]
    document: dict[str, Any] = {**CONFIG, "name": "gpt", "run_dir": "/runs/gpt", "data": {"train": pairs}}
    return configuration.from_dict(TrainerConfig, document, "test")


def test_a_new_run_reads_its_pairs_by_weight(prefixes: list[str]) -> None:
    assert readings(trainer(prefixes, 0.7, 0.3), None) == [
        Reading(prefixes[0], 0, 179_200, 7.0, 179_200 * 2048, None, 1000 / 7),
        Reading(prefixes[1], 0, 76_800, 3.0, 76_800 * 2048, None, 1000 / 3),
    ]
    assert [reading.epochs for reading in readings(trainer(prefixes, None, None), None)] == [5.0, 5.0]


def test_a_stage_begins_where_the_stages_before_leave_each_pair(prefixes: list[str]) -> None:
    config = trainer(prefixes, None, None)
    code, docs = (Dataset(prefix=prefix, weight=1.0) for prefix in prefixes)
    stages = (
        DataStage(name="main", train=(code, dataclasses.replace(docs, weight=3.0)), until_iter=800),
        DataStage(name="decay", train=(docs,)),
    )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, stages=stages))
    found = readings(config, None)
    samples = 800 * 256
    assert [(each.stage, each.prefix, each.read, each.remaining) for each in found] == [
        ("main", prefixes[0], 0, samples // 4),
        ("main", prefixes[1], 0, 3 * samples // 4),
        ("decay", prefixes[1], 3 * samples // 4, 200 * 256),
    ]
    lines = [text for _, text in pair_summary.for_people([dataclasses.asdict(each) for each in found])]
    assert lines[1].startswith(
        f"stage main, {prefixes[1]}: 0 samples read, 153,600 to read (about 6.00 epochs, "
    )
    assert lines[2].startswith(
        f"stage decay, {prefixes[1]}: 51,200 to read after 153,600 samples (about 2.00 "
    )


def test_the_rest_of_a_run_is_what_its_checkpoint_has_not_read(prefixes: list[str], tmp_path: Path) -> None:
    config = trainer(prefixes, 0.3, 0.7)
    streams = [
        {
            "pair": provenance.identify_pair(prefix),
            "documents": {"first": 0, "end": 2, "tokens": TOKENS},
            "seq_length": 2048,
            "orders": [],
            "read": read,
        }
        for prefix, read in zip(prefixes, (143_360, 61_440), strict=True)
    ]
    path = write_checkpoint(tmp_path, 800, sampling={"streams": streams, "phases": []})
    record = checkpoint_files.read_record(path)
    found = readings(config, record)
    assert [(each.read, each.remaining) for each in found] == [(143_360, 15_360), (61_440, 35_840)]
    swapped = readings(trainer(prefixes[::-1], 0.7, 0.3), record)
    assert [each.read for each in swapped] == [61_440, 143_360]
    del record["sampling"]  # as in checkpoints of hpcgen 0.2.0
    assert [each.read for each in readings(config, record)] == [None, None]


def test_a_pair_that_was_overwritten_may_have_been_read(prefixes: list[str], tmp_path: Path) -> None:
    """Only its hash could tell whether it is another one."""
    config = trainer(prefixes, 0.3, 0.7)
    stream = {
        "pair": provenance.identify_pair(prefixes[0]),
        "documents": {"first": 0, "end": 2, "tokens": TOKENS},
        "seq_length": 2048,
        "orders": [],
        "read": 1000,
    }
    path = write_checkpoint(tmp_path, 800, sampling={"streams": [stream], "phases": []})
    os.utime(f"{prefixes[0]}.bin", (1, 1))
    assert readings(config, checkpoint_files.read_record(path))[0].read is None


def test_nothing_is_said_before_a_checkpoint_of_megatron_lm(prefixes: list[str], tmp_path: Path) -> None:
    """It does not say here how many samples it has read."""
    run = tmp_path / "run"
    config = dataclasses.replace(trainer(prefixes, 0.7, 0.3), run_dir=str(run))
    assert pair_readings(config)
    (run / "checkpoints/iter_0000010").mkdir(parents=True)
    for name in (checkpoint_files.METADATA, checkpoint_files.COMMON):
        (run / "checkpoints/iter_0000010" / name).touch()
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("10")
    assert pair_readings(config) == []


def test_nothing_is_said_without_the_pairs(prefixes: list[str]) -> None:
    Path(f"{prefixes[0]}.idx").unlink()
    assert readings(trainer(prefixes, 0.7, 0.3), None) == []


def doubted(config: TrainerConfig) -> list[str]:
    return [f"{problem.path} {problem.reason}" for problem in doubts(config, readings(config, None))]


def test_texts_that_are_read_too_often_are_doubted(prefixes: list[str]) -> None:
    assert doubted(trainer(prefixes, 0.3, 0.7))[0].startswith(
        f"data.train is read too often: the run reads {prefixes[1]} for 7.0 epochs. Beyond about 4 epochs"
    )
    assert "10.0 epochs, and" not in doubted(trainer(prefixes, 0.5, 0.5))[0]
    assert "for 5.0 epochs, and 1 other pair more than 4" in doubted(trainer(prefixes, None, None))[0]
    short = trainer(prefixes, 0.5, 0.5)
    short = dataclasses.replace(short, training=dataclasses.replace(short.training, train_iters=800))
    assert doubted(short) == []


def test_a_pair_with_a_negligible_weight_is_doubted(prefixes: list[str]) -> None:
    repeated, unread = doubted(trainer(prefixes, 1.0, 1e-9))
    assert "for 10.0 epochs" in repeated
    assert unread.startswith(
        f"data.train has a pair that the run hardly reads: {prefixes[1]} gives at most one"
    )


def test_epochs_of_an_earlier_attempt_count(prefixes: list[str]) -> None:
    config = trainer(prefixes, 0.5, 0.5)
    found = [
        Reading(prefixes[0], 30_000, 10_000, 1.2, 10_000 * 2048),
        Reading(prefixes[1], 0, 10, 0.1, 20_480),
    ]
    assert "for 4.8 epochs" in next(doubts(config, found)).reason
