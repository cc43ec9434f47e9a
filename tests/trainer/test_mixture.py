"""Runs whose mixture, length or data changes at a resume: each pair continues where it was left."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.gpt_dataset import GPTDataset

from hpcgen.planning.mixture import readings
from tests.trainer.runs import write_corpus
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.model.batch_size import Batches
from trainer.contract.resuming import provenance, record_shape
from trainer.contract.resuming.hyperparameters import differences, sections
from trainer.contract.resuming.sampling import draws
from trainer.data.blend import Blend
from trainer.data.datasets import Reading, located, open_datasets, plan
from trainer.data.progress import fresh, resumed

ROWS = 1000


@pytest.fixture(autouse=True)
def parallel_state_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@dataclass
class Sample:
    """A sample that a run has read: its pair, the order of Core that it is from, and its number there."""

    prefix: str
    order: str
    number: int
    length: int
    """Number of samples of the order."""


@dataclass
class History:
    """What a run reads, attempt by attempt, without the training. Its checkpoints are records, as in COMPLETE."""

    directory: Path
    document: dict[str, Any]
    iteration: int = 0
    consumed: int = 0
    record: dict[str, Any] | None = None
    samples: list[Sample] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def config(self, data: dict[str, Any], training: dict[str, Any], seq_length: int = 64) -> TrainerConfig:
        return configuration.from_dict(
            TrainerConfig,
            self.document
            | {
                "data": data,
                "training": self.document["training"] | training,
                "model": self.document["model"] | {"seq_length": seq_length},
            },
            "test",
        )

    def train(self, steps: int, data: dict[str, Any], seq_length: int = 64, **training: Any) -> list[Sample]:
        """An attempt of some steps that ends with a checkpoint. Returns its samples."""
        config = self.config(data, training, seq_length)
        files = provenance.examine(config, self.record)
        assert not files.to_hash
        progress = fresh(config, files.origins)
        if self.record is not None:
            progress = resumed(config, files.origins, self.record, self.iteration, self.consumed)
        self.said = []
        cache = self.directory / "cache"
        blends = plan(config, cache, ROWS, self.said.append, progress)
        self.check_readings(config, blends["train"])
        dataset = open_datasets(blends, config, cache, ROWS, is_needed=True)["train"]
        assert dataset is not None
        assert len(dataset) >= progress.end
        reading, first = Reading(blends["train"], dataset, self.consumed), self.consumed
        for batch in itertools.islice(Batches(config.training, self.iteration, self.consumed), steps):
            self.iteration, self.consumed = self.iteration + 1, batch.first + batch.size
            reading.at(self.consumed)  # as if each step saved a checkpoint
        sampling = reading.at(self.consumed)
        assert sampling is not None
        record = {
            **sections(config),
            "iteration": self.iteration,
            "consumed_samples": self.consumed,
            "origins": files.origins,
            "sampling": sampling.to_dict(),
        }
        self.record = json.loads(json.dumps(record))
        assert [*record_shape._sampling_problems(self.record["sampling"])] == []
        found = [_sample(dataset, number) for number in range(first, self.consumed)]
        self.samples += found
        return found

    def check_readings(self, config: TrainerConfig, blends: Sequence[Blend]) -> None:
        """What `hpcgen validate` says before an attempt is what the attempt then reads.

        It rounds where a later stage begins, by a sample for each stage before.
        """
        is_exact = all(
            dataset.weight
            for mixture in [each.train for each in config.data.stages]
            or [config.data.datasets or config.data.train]
            for dataset in mixture
        )
        found = [
            (part, stream, blend, number)
            for number, blend in enumerate(blends)
            for part, stream in zip(blend.parts, blend.sampling.current, strict=True)
        ]
        for (part, stream, blend, number), said in zip(found, readings(config, self.record), strict=True):
            assert (said.prefix, said.stage) == (part.prefix, blend.stage)
            if is_exact and said.read is not None:
                assert abs(said.read - stream.read) <= number
                remaining = part.start + draws(part.weight, blend.num_samples) - stream.read
                assert abs(said.remaining - remaining) <= number

    def forget_streams(self) -> None:
        """Make the record one of the trainer of hpcgen 0.2.0."""
        assert self.record is not None
        del self.record["sampling"]

    @property
    def read(self) -> dict[str, int]:
        """Number of samples read of each pair, as the record says."""
        assert self.record is not None
        streams = self.record["sampling"]["streams"]
        return {Path(stream["pair"]["prefix"]).name: stream["read"] for stream in streams}

    def numbers(self, name: str, samples: list[Sample] | None = None) -> list[int]:
        """Numbers of the samples of a pair, in the order of reading."""
        chosen = self.samples if samples is None else samples
        return [sample.number for sample in chosen if Path(sample.prefix).name == name]


def _sample(dataset: torch.utils.data.Dataset, number: int) -> Sample:
    order, position = located(dataset, number)
    return Sample(
        order.dataset_path, order.unique_description_hash, position, order.sample_index.shape[0] - 1
    )


def assert_nothing_is_repeated_or_skipped(samples: list[Sample]) -> None:
    """Each order of each pair is read from its first sample on, without gaps, and to its end before the next one."""
    orders: dict[str, dict[str, list[Sample]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        orders[sample.prefix][sample.order].append(sample)
    for of_pair in orders.values():
        for read in of_pair.values():
            assert [sample.number for sample in read] == list(range(len(read)))
        *complete, _ = of_pair.values()
        assert all(len(read) == read[0].length for read in complete)


@pytest.fixture
def history(config: dict[str, Any], tmp_path: Path) -> History:
    config["training"] |= {"global_batch_size": 8, "train_iters": 100, "eval_iters": 0}
    return History(tmp_path, config)


def mixture(directory: Path, split: str | None = None, **weights: float | None) -> dict[str, Any]:
    """A mixture of pairs by name, which are written when they are first named. Each pair has other documents."""
    pairs = []
    for name, weight in weights.items():
        prefix = directory / name
        if not Path(f"{prefix}.idx").exists():
            write_corpus(prefix, documents=30 + 10 * len(name), first_token=sum(map(ord, name)) % 400)
        pairs.append({"prefix": str(prefix), "weight": weight})
    return {"train": pairs} if split is None else {"datasets": pairs, "split": split}


def test_a_mixture_that_changes_repeats_and_skips_nothing(history: History, tmp_path: Path) -> None:
    """70/30 to 30/70 after 800 of 1,000 steps, which trained 480 samples twice and skipped 2,560."""
    for name in ("code", "docs"):
        write_corpus(tmp_path / name, documents=6000, first_token=len(name))
    history.train(800, mixture(tmp_path, code=0.7, docs=0.3), train_iters=1000)
    assert history.read == {"code": 4480, "docs": 1920}
    last = history.train(200, mixture(tmp_path, code=0.3, docs=0.7), train_iters=1000)
    assert history.read == {"code": 4960, "docs": 3040}
    assert history.numbers("code", last) == list(range(4480, 4960))
    assert history.numbers("docs", last) == list(range(1920, 3040))
    assert_nothing_is_repeated_or_skipped(history.samples)
    assert "data: train: NEW MIXTURE from sample 6,400 on" in "\n".join(history.said)
    [code] = [line for line in history.said if line.startswith(f"data: train: {tmp_path}/code: ")]
    assert "4,480 samples of 64 tokens read (0.4" in code
    assert "480 to read" in code


def test_the_first_mixture_of_a_run_is_read_in_megatrons_order(history: History, tmp_path: Path) -> None:
    """Core's own classes with a plain blend name the same index files, and give the same samples."""
    data = mixture(tmp_path, a=0.2, bb=0.5, ccc=0.3)
    config = history.config(data, {"train_iters": 60})
    blends = plan(config, tmp_path / "cache", ROWS, history.said.append)
    ours = open_datasets(blends, config, tmp_path / "cache", ROWS, is_needed=True)["train"]
    assert isinstance(ours, BlendedDataset)
    parts = [
        GPTDataset(
            GPTDataset.build_low_level_dataset(pair["prefix"], ours.config),
            pair["prefix"],
            numpy.arange(30 + 10 * len(Path(pair["prefix"]).name), dtype=numpy.int32),
            draws(pair["weight"], 480),
            ours.split,
            ours.config,
        )
        for pair in data["train"]
    ]
    theirs = BlendedDataset(parts, [0.2, 0.5, 0.3], 480, ours.config)
    assert theirs.unique_description_hash == ours.unique_description_hash
    assert [part.unique_description_hash for part in ours.datasets] == [
        part.unique_description_hash for part in parts
    ]
    numpy.testing.assert_array_equal(theirs.dataset_index, ours.dataset_index)


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_any_history_reads_each_pair_in_order(seed: int, history: History, tmp_path: Path) -> None:
    """Pairs come, leave and return; weights, lengths, batch sizes and ramp-ups change. Some epochs end in between."""
    generator = random.Random(seed)
    data: dict[str, Any] = {}
    for attempt in range(6):
        names = generator.sample(["a", "bb", "ccc", "dddd"], generator.randint(1, 4))
        weights = {name: generator.choice([0.01, 0.3, 1.0, 5.0]) for name in names}
        if not data or generator.random() < 0.7:
            data = mixture(tmp_path, **dict.fromkeys(names) if generator.random() < 0.3 else weights)
        size = generator.choice([4, 8, 12])
        rampup = [4, 4, generator.choice([40, 100])] if size > 4 and generator.random() < 0.4 else None
        steps = generator.randint(0, 25)
        history.train(
            steps,
            data,
            train_iters=history.iteration + steps + generator.choice([0, 1, 40, 400]),
            global_batch_size=size,
            rampup_batch_size=rampup,
        )
        if attempt == 0 and generator.random() < 0.5:
            history.forget_streams()  # as if the trainer of hpcgen 0.2.0 had begun
    assert_nothing_is_repeated_or_skipped(history.samples)
    assert len(history.samples) == history.consumed


def test_an_unchanged_run_reads_the_same_samples_however_often_it_resumes(
    history: History, tmp_path: Path
) -> None:
    data = mixture(tmp_path, a=0.2, bb=0.5, ccc=0.3)
    at_once = History(tmp_path, history.document)
    at_once.train(100, data)
    for steps in (1, 30, 0, 69):
        history.train(steps, data)
    assert history.samples == at_once.samples
    assert history.record == at_once.record
    assert len(history.record["sampling"]["phases"]) == 1


def test_a_change_gives_the_same_samples_however_often_the_run_resumes(
    history: History, tmp_path: Path
) -> None:
    first, second = mixture(tmp_path, a=0.2, bb=0.8), mixture(tmp_path, bb=0.3, ccc=0.7)
    at_once = History(tmp_path, history.document)
    for run, steps in ((at_once, (40,)), (history, (7, 20, 13))):
        run.train(10, first)
        for each in steps:
            run.train(each, second)
    assert history.samples == at_once.samples
    assert history.record["sampling"] == at_once.record["sampling"]


def test_a_longer_run_reads_its_epoch_to_the_end(history: History, tmp_path: Path) -> None:
    """More epochs would make Megatron-Core shuffle the pair again from its first sample on."""
    data = mixture(tmp_path, a=None)
    history.train(5, data, train_iters=5)
    [order] = history.record["sampling"]["streams"][0]["orders"]
    assert order == {"seed": 1234, "num_samples": 40}
    history.train(40, data, train_iters=45)
    assert_nothing_is_repeated_or_skipped(history.samples)
    orders = history.record["sampling"]["streams"][0]["orders"]
    assert [each["seed"] for each in orders] == [1234, 1235]
    assert any("shuffled again from its sample " in line for line in history.said)
    assert not any("NEW MIXTURE" in line for line in history.said)


def test_new_data_begins_at_its_first_sample(history: History, tmp_path: Path) -> None:
    history.train(20, mixture(tmp_path, old=None))
    history.train(5, mixture(tmp_path, new=None), train_iters=30)
    assert history.numbers("new") == list(range(40))
    [total] = [line for line in history.said if "1 corpus" in line]
    assert "80 samples from sample 160 on" in total
    [new] = [line for line in history.said if line.startswith(f"data: train: {tmp_path}/new")]
    assert "nothing read, 80 to read" in new
    assert any(f"{tmp_path}/old: no longer read, 160 samples of 64 tokens" in line for line in history.said)


def test_a_pair_that_returns_continues_where_it_was_left(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=0.5, bb=0.5))
    history.train(10, mixture(tmp_path, bb=None))
    history.train(10, mixture(tmp_path, bb=0.5, a=0.5))
    assert history.read == {"a": 80, "bb": 160}
    assert_nothing_is_repeated_or_skipped(history.samples)


def test_a_moved_pair_continues(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=0.5, bb=0.5))
    (tmp_path / "moved").mkdir()
    for name in ("a.idx", "a.bin"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    pairs = [
        {"prefix": str(tmp_path / "bb"), "weight": 0.2},
        {"prefix": str(tmp_path / "moved/a"), "weight": 0.8},
    ]
    history.train(5, {"train": pairs})
    assert history.numbers("a") == list(range(40 + 32))
    assert any(
        f"moved/a: continues {tmp_path}/a, 40 samples of 64 tokens read" in line for line in history.said
    )


def test_a_pair_with_other_content_begins_again(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=0.5, bb=0.5))
    write_corpus(tmp_path / "a", documents=77)
    history.train(10, mixture(tmp_path, a=0.5, bb=0.5))
    assert history.numbers("a", history.samples[80:]) == list(range(40))
    assert history.numbers("bb") == list(range(80))


def test_a_pair_overwritten_with_documents_of_the_same_lengths_begins_again(
    history: History, tmp_path: Path
) -> None:
    """The .idx is the same, and no hash of the .bin is known."""
    data = mixture(tmp_path, a=0.5, bb=0.5)
    history.train(10, data)
    size = (tmp_path / "a.bin").stat().st_size
    (tmp_path / "a.bin").write_bytes(b"\7\0" * (size // 2))
    assert history.numbers("a", history.train(10, data)) == list(range(40))
    assert history.numbers("bb") == list(range(80))


def test_pairs_with_the_same_lengths_are_told_apart(history: History, tmp_path: Path) -> None:
    """All documents have 100 tokens, so the .idx files are the same."""
    for name, first in (("a", 0), ("bb", 300), ("ccc", 400)):
        write_corpus(tmp_path / name, documents=60, first_token=first, lengths=(100, 101))
    history.train(10, mixture(tmp_path, a=0.25, bb=0.75))
    history.train(10, mixture(tmp_path, ccc=0.5, bb=0.25, a=0.25))
    assert history.read == {"a": 40, "bb": 80, "ccc": 40}
    assert_nothing_is_repeated_or_skipped(history.samples)
    for suffix in (".idx", ".bin"):
        shutil.copy(tmp_path / f"bb{suffix}", tmp_path / f"copied{suffix}")  # with another time
    copied = history.train(5, mixture(tmp_path, copied=None))
    assert history.numbers("copied", copied) == list(range(40))


def test_a_pair_at_its_path_continues_before_one_that_looks_like_it(history: History, tmp_path: Path) -> None:
    """An archive has set the times of both pairs to the same second, and no hash is known."""
    for name, first in (("a", 0), ("bb", 300)):
        write_corpus(tmp_path / name, documents=60, first_token=first, lengths=(100, 101))
        os.utime(tmp_path / f"{name}.bin", (1_700_000_000, 1_700_000_000))
    history.train(10, mixture(tmp_path, a=None))
    history.train(10, mixture(tmp_path, bb=0.5, a=0.5))
    assert history.numbers("a") == list(range(80 + 40))
    assert history.numbers("bb") == list(range(40))


def test_a_pair_that_is_listed_twice_is_read_twice_as_in_megatron(history: History, tmp_path: Path) -> None:
    data = mixture(tmp_path, a=0.3, bb=0.4)
    data["train"].append(data["train"][0] | {"weight": 0.3})
    history.train(10, data)
    history.train(10, data)
    assert len(history.record["sampling"]["phases"]) == 1
    counts = numpy.bincount(history.numbers("a"))
    assert set(counts.tolist()) == {2}
    data["train"][2]["weight"] = 0.1
    again = history.train(10, data)
    assert min(history.numbers("a", again)) == len(counts)


def test_samples_of_another_length_are_other_samples(history: History, tmp_path: Path) -> None:
    """They begin at the pair's first. Samples of the old length continue when it comes back."""
    data = mixture(tmp_path, a=0.5, bb=0.5)
    history.train(10, data)
    longer = history.train(5, data, seq_length=128)
    assert history.numbers("a", longer) == list(range(20))
    assert any("a: nothing read, " in line for line in history.said)
    back = history.train(10, data)
    assert history.numbers("a", back) == list(range(40, 80))


def test_another_split_makes_other_samples(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, "8,1,1", a=0.5, bb=0.5))
    other = history.train(5, mixture(tmp_path, "7,2,1", a=0.5, bb=0.5))
    assert history.numbers("a", other) == list(range(20))


def test_another_seed_shuffles_only_what_has_not_begun(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=None))
    history.train(40, mixture(tmp_path, a=0.5, bb=0.5), seed=7)
    assert_nothing_is_repeated_or_skipped(history.samples)
    orders = {Path(s["pair"]["prefix"]).name: s["orders"] for s in history.record["sampling"]["streams"]}
    assert [order["seed"] for order in orders["a"]][:1] == [1234]
    assert [order["seed"] for order in orders["bb"]][:1] == [7]
    assert any("training.seed = 7 shuffles no order" in line for line in history.said)


def staged(data: dict[str, Any], *stages: tuple[int | None, dict[str, float | None]]) -> dict[str, Any]:
    """The pairs of a mixture, in stages that end at an iteration and have weights of their own by pair."""
    [key] = {"datasets", "train"} & data.keys()
    pairs = {Path(pair["prefix"]).name: pair["prefix"] for pair in data[key]}
    return {
        **data,
        "stages": [
            {
                "name": f"stage-{number}",
                "until_iter": until,
                "train": [{"prefix": pairs[name], "weight": weight} for name, weight in weights.items()],
            }
            for number, (until, weights) in enumerate(stages, 1)
        ],
    }


@pytest.mark.parametrize("split", [None, "8,1,1"])
def test_stages_mix_as_a_run_that_changes_its_mixture(
    split: str | None, history: History, tmp_path: Path
) -> None:
    """Three stages in one configuration read what three configurations with one mixture each read."""
    names = mixture(tmp_path, split, a=None, bb=None, ccc=None)
    weights = ({"a": 0.7, "bb": 0.3}, {"bb": None, "ccc": None}, {"a": 0.2, "ccc": 0.8})
    data = staged(names, *zip((30, 55, None), weights, strict=True))
    history.train(100, data)
    by_hand = History(tmp_path, history.document)
    for steps, each in zip((30, 25, 45), weights, strict=True):
        by_hand.train(steps, mixture(tmp_path, split, **each))
    assert [sample.prefix for sample in history.samples] == [sample.prefix for sample in by_hand.samples]
    assert history.read == by_hand.read
    assert [phase["first"] for phase in history.record["sampling"]["phases"]] == [0, 240, 440]
    assert_nothing_is_repeated_or_skipped(history.samples)
    assert any(
        line.startswith("data: train, stage stage-2: NEW MIXTURE from sample 240 on") for line in history.said
    )


@pytest.mark.parametrize("cuts", [(29, 1, 70), (30, 25, 45), (5, 40, 9, 46)])
def test_stages_read_the_same_samples_wherever_a_run_is_interrupted(
    cuts: tuple[int, ...], history: History, tmp_path: Path
) -> None:
    names = mixture(tmp_path, a=None, bb=None, ccc=None)
    same = {"bb": 3.0, "ccc": 1.0}
    data = staged(names, (30, {"a": 0.7, "bb": 0.3}), (55, same), (60, same), (None, {"a": 0.2, "ccc": 0.8}))
    at_once = History(tmp_path, history.document)
    at_once.train(100, data)
    for steps in cuts:
        history.train(steps, data)
    assert history.samples == at_once.samples
    assert history.record["sampling"] == at_once.record["sampling"]
    assert [phase["first"] for phase in at_once.record["sampling"]["phases"]] == [0, 240, 480]


def test_a_longer_run_lengthens_only_its_last_stage(history: History, tmp_path: Path) -> None:
    data = staged(mixture(tmp_path, a=None, bb=None), (30, {"a": 1.0}), (None, {"bb": 1.0}))
    history.train(20, data, train_iters=25)
    assert history.read == {"a": 160}
    history.train(40, data, train_iters=60)
    assert history.read == {"a": 240, "bb": 240}
    assert_nothing_is_repeated_or_skipped(history.samples)


def test_a_moved_pair_does_not_change_the_stages(history: History, tmp_path: Path) -> None:
    names = mixture(tmp_path, a=None, bb=None)
    weights = {"a": 0.7, "bb": 0.3}
    history.train(10, staged(names, (30, weights), (None, {"bb": 1.0})))
    for suffix in (".idx", ".bin"):
        shutil.move(tmp_path / f"a{suffix}", tmp_path / f"moved{suffix}")
    moved = {"train": [{"prefix": str(tmp_path / "moved")}, names["train"][1]]}
    weights = {"moved": 0.7, "bb": 0.3}
    config = history.config(staged(moved, (30, weights), (None, {"bb": 1.0})), {})
    files = provenance.examine(config, history.record)
    assert [*differences(files.saved, config)] == []
    weights["bb"] = 0.5
    config = history.config(staged(moved, (30, weights), (None, {"bb": 1.0})), {})
    files = provenance.examine(config, history.record)
    assert [change.name for change in differences(files.saved, config)] == ["data.stages"]


def test_stages_end_at_iterations_whatever_their_batch_sizes(history: History, tmp_path: Path) -> None:
    data = staged(mixture(tmp_path, a=None, bb=None), (30, {"a": 1.0}), (None, {"bb": 1.0}))
    history.train(10, data, global_batch_size=4)
    history.train(50, data, rampup_batch_size=[4, 4, 80])
    steps_of_4 = 10 + 10  # the ramp-up ends after 80 samples, of which 40 are read
    assert history.read == {"a": 4 * steps_of_4 + 8 * (30 - steps_of_4), "bb": 8 * 30}


@pytest.mark.parametrize("split", [None, "8,1,1"])
def test_a_record_without_streams_is_replayed(split: str | None, history: History, tmp_path: Path) -> None:
    """A checkpoint of hpcgen 0.2.0, for a pair that moved, one that left and one that came."""
    history.train(10, mixture(tmp_path, split, a=0.2, bb=0.5, ccc=0.3))
    read = history.read
    history.forget_streams()
    for suffix in (".idx", ".bin"):
        shutil.move(tmp_path / f"a{suffix}", tmp_path / f"elsewhere{suffix}")
    history.train(0, mixture(tmp_path, split, dddd=0.1, bb=0.5, elsewhere=0.4))
    assert history.read == {"elsewhere": read["a"], "bb": read["bb"], "ccc": read["ccc"], "dddd": 0}
    history.train(10, mixture(tmp_path, split, dddd=0.1, bb=0.5, elsewhere=0.4))
    assert history.numbers("bb") == list(range(80))


def test_a_replay_that_needs_a_missing_pair_is_refused(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=None, bb=None))
    history.forget_streams()
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").unlink()
    with pytest.raises(
        ConfigError, match=r"how much of each pair was read, and .*/a is missing or has changed"
    ):
        history.train(1, mixture(tmp_path, bb=None))


def test_a_missing_pair_with_a_weight_does_not_hide_the_others(history: History, tmp_path: Path) -> None:
    history.train(10, mixture(tmp_path, a=0.5, bb=0.5))
    history.forget_streams()
    for suffix in (".idx", ".bin"):
        (tmp_path / f"a{suffix}").unlink()
    history.train(10, mixture(tmp_path, bb=None))
    assert history.numbers("bb") == list(range(40 + 80))
    assert any("warning" in line and f"{tmp_path}/a is missing" in line for line in history.said)


def test_a_ramp_up_keeps_the_position(history: History, tmp_path: Path) -> None:
    data = mixture(tmp_path, a=0.5, bb=0.5)
    history.train(10, data, rampup_batch_size=[4, 4, 60])
    history.train(10, data)
    assert_nothing_is_repeated_or_skipped(history.samples)
    assert history.consumed == 80 + sum(
        batch.size
        for batch in itertools.islice(
            Batches(history.config(data, {"rampup_batch_size": [4, 4, 60]}).training), 10
        )
    )
