"""How often to save, what a save and a failure cost, and the space that checkpoints and data take."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hpcgen.config.presets import PRESETS
from hpcgen.data.indexed_dataset import IndexedDatasetWriter, token_dtype
from hpcgen.planning import storage
from hpcgen.planning.checkpointing import checkpoint_bytes
from hpcgen.planning.storage import LUSTRE_TIERS, SaveCosts
from hpcgen.text import size_text
from tests.planning.cases import trainer_of
from tests.runs import big_run, planned
from trainer.contract.config import CheckpointConfig, ModelConfig, TrainerConfig
from trainer.contract.config.resolve import resolve_model

GB = 1e9
ROOT = Path(__file__).parents[2]
GPT3_PRESETS = ("125m", "375m", "857m", "1.3b", "13b", "30b", "175b")


def costs(stall_s=60.0, latency_s=None, restart_s=600.0, hours=24.0) -> SaveCosts:
    return SaveCosts(
        stall_s=stall_s,
        latency_s=stall_s if latency_s is None else latency_s,
        restart_s=restart_s,
        between_failures_s=3600 * hours,
    )


@pytest.mark.parametrize(("hours", "minutes"), [(24, 117), (6, 57), (0.25, 9.1)])
def test_the_best_interval_is_that_of_dalys_figures(hours, minutes):
    """Figures 3 to 5 of the paper, with a save of 5 and a restart of 10 minutes."""
    assert costs(300, hours=hours).best_interval_s / 60 == pytest.approx(minutes, rel=0.01)


def lost_in_simulation(each: SaveCosts, interval_s: float, segments: int = 20_000) -> float:
    """The lost part of the time of many intervals, with failures at random times."""
    chance = random.Random(0)
    total_s, until_failure_s = 0.0, chance.expovariate(1 / each.between_failures_s)

    def passes(needed_s: float) -> bool:
        nonlocal total_s, until_failure_s
        spent_s = min(needed_s, until_failure_s)
        total_s, until_failure_s = total_s + spent_s, until_failure_s - spent_s
        if spent_s < needed_s:
            until_failure_s = chance.expovariate(1 / each.between_failures_s)
        return spent_s == needed_s

    for _ in range(segments):
        while not passes(interval_s + each.stall_s):
            while not passes(each.restart_s):
                pass
    return 1 - segments * interval_s / total_s


@pytest.mark.parametrize(
    ("hours", "interval_s"), [(24, 600), (24, 7000), (24, 50_000), (2, 1800), (0.5, 900), (0.5, 4000)]
)
def test_the_lost_time_is_that_of_a_simulation(hours, interval_s):
    each = costs(120, hours=hours)
    assert each.lost(interval_s) == pytest.approx(lost_in_simulation(each, interval_s), abs=0.01)


@pytest.mark.parametrize("hours", [0.5, 5, 50, 500])
@pytest.mark.parametrize("stall_s", [0.5, 30, 300])
def test_no_other_interval_loses_less_than_the_best(stall_s, hours):
    each = costs(stall_s, hours=hours)
    best_s = each.best_interval_s
    assert each.lost(best_s) <= min(each.lost(factor * best_s) for factor in (0.5, 0.8, 1.25, 2)) + 1e-4


def test_saves_in_the_background_are_no_closer_than_they_take():
    each = costs(1, latency_s=1200, hours=1)
    assert each.best_interval_s == 1200
    assert each.lost(60) > each.lost(600) > each.lost(1200)
    assert costs(1e6, hours=0.01).lost(60) == 1.0


def test_llama_3_failed_every_three_hours(tmp_path):
    """419 interruptions in 54 days (arXiv 2407.21783)."""
    assert pytest.approx(3.09, abs=0.01) == storage.GPU_HOURS_BETWEEN_FAILURES / 16_384


def test_a_sync_save_stalls_as_long_as_it_takes_and_an_async_one_for_its_copy(tmp_path):
    trainer = planned(tmp_path, big_run()).trainer
    in_background = storage.save_costs(trainer, 40, 300, None)
    assert in_background.stall_s == pytest.approx(2444 / 128 / 24.5 + 0.011 * 40, rel=0.01)
    assert in_background.between_failures_s == pytest.approx(3600 * 50_677 / 128, rel=1e-3)
    waiting = planned(tmp_path, big_run(checkpoint={"async_save": False})).trainer
    assert storage.save_costs(waiting, 40, 300, 128).stall_s == 40
    assert storage.save_costs(waiting, 40, 300, 128).between_failures_s == 3600


@pytest.mark.parametrize(
    ("keys", "saves", "kept"),
    [
        ({}, 50, 50),
        ({"keep_last": 3}, 50, 4),
        ({"keep_last": 3}, 2, 2),
        ({"keep_last": 3, "keep_every": 100}, 50, 14),
        ({"keep_last": 3, "keep_best": True}, 50, 5),
    ],
)
def test_a_new_checkpoint_is_complete_before_an_old_one_is_removed(keys, saves, kept):
    assert storage.kept_checkpoints(CheckpointConfig(**keys), 1000, saves) == kept


@pytest.mark.parametrize(
    ("keys", "interval_s", "by_steps"),
    [
        ({"save_interval": 100}, 500, True),
        ({"save_interval_minutes": 30}, 1800, False),
        ({"save_interval": 100, "save_interval_minutes": 30}, 500, True),
        ({"save_interval": 1000, "save_interval_minutes": 30}, 1800, False),
    ],
)
def test_a_save_comes_by_steps_or_by_the_clock(keys, interval_s, by_steps):
    checkpoint = CheckpointConfig(**keys)
    assert storage.save_interval_s(checkpoint, 5) == interval_s
    assert storage.saves_by_steps(checkpoint, 5) == by_steps


@pytest.mark.parametrize(("vocab_size", "id_bytes"), [(50257, 2), (128256, 4)])
def test_the_sizes_of_a_pair_are_those_of_its_files(tmp_path: Path, vocab_size, id_bytes):
    documents, tokens = 7, storage.DOCUMENT_TOKENS
    found = storage.data_size(documents * tokens, vocab_size)
    assert found.bin == documents * tokens * id_bytes
    with (
        (tmp_path / "a.bin").open("wb") as bin_file,
        (tmp_path / "a.idx").open("wb") as idx_file,
        IndexedDatasetWriter(bin_file, token_dtype(vocab_size)) as writer,
    ):
        writer.add_documents(np.zeros(documents * tokens, np.int64), np.full(documents, tokens))
        writer.write_index(idx_file)
    assert (tmp_path / "a.bin").stat().st_size == found.bin
    assert (tmp_path / "a.idx").stat().st_size == found.idx
    assert found.jsonl > found.compressed > 0


def size(preset: str) -> int:
    """Bytes of a checkpoint of a preset with GPT-2's vocabulary."""
    shape = {"padded_vocab_size": 50304, **PRESETS[preset].sections["model"]}
    return checkpoint_bytes(trainer_of(resolve_model(ModelConfig(**shape)), precision="bf16"))


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def sizes() -> list[str]:
    rates = [tier.gb_s(tier.largest_tib) for tier in LUSTRE_TIERS] + [
        storage.BLOB_GB_S["blob, large regions"]
    ]
    return [
        f"| `{preset}` | {size_text(size(preset))} | {size(preset) / storage.TIB:.4f} | "
        + " | ".join(seconds_text(size(preset) / GB / rate) for rate in rates)
        + " |"
        for preset in GPT3_PRESETS
    ]


def tiers() -> list[str]:
    return [
        f"  | {tier.name} | {tier.mb_s_per_tib} | {tier.smallest_tib} | {tier.largest_tib} | "
        f"{tier.gb_s(tier.smallest_tib):g} to {tier.gb_s(tier.largest_tib):g} |"
        for tier in LUSTRE_TIERS
    ]


def intervals(trainer: TrainerConfig) -> Iterator[str]:
    for ranks in (128, 1024, 4096, 16384):
        each = storage.save_costs(replace(trainer, world_size=ranks), size("175b") / 64e9, 600, None)
        best_s = each.best_interval_s
        lost = f"{each.lost(best_s):.1%} | {each.lost(1800):.1%}"
        yield f"| {ranks:,} | {each.between_failures_s / 3600:,.1f} h | {seconds_text(best_s)} | {lost} |"


def data() -> Iterator[str]:
    for tokens, text in (
        (300 * 10**9, "300 billion"),
        (627 * 10**9, "627 billion"),
        (15 * 10**12, "15 trillion"),
    ):
        small, large = storage.data_size(tokens, 50257), storage.data_size(tokens, 128256)
        sizes = (small.compressed, small.jsonl, small.bin, large.bin, small.idx)
        yield f"| {text} | {' | '.join(map(size_text, sizes))} |"


def test_the_page_has_these_figures(tmp_path):
    page = (ROOT / "docs" / "storage.md").read_text()
    trainer = planned(tmp_path, big_run()).trainer
    for line in (*sizes(), *tiers(), *intervals(trainer), *data()):
        assert f"{line}\n" in page


@pytest.mark.parametrize(
    ("gb_s", "azures_minutes", "minutes"),
    [(19.2, 2.04, 2.12), (64, 0.61, 0.64), (128, 0.31, 0.32), (256, 0.15, 0.16)],
)
def test_azures_times_divide_gibibytes_by_gigabytes(gb_s, azures_minutes, minutes):
    assert round(2.3 * 1024 / gb_s / 60, 2) == azures_minutes
    assert round(size("175b") / GB / gb_s / 60, 2) == minutes
    assert size("175b") / storage.TIB == pytest.approx(2.22, abs=0.005)
