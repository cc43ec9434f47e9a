"""The user's own dataset: one order of samples in every layout, exact resumption, messages about invalid samples."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import MOE, Run, finished, gpt_config, run
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.files import checkpoint_files
from trainer.data.microbatch import OWN_POSITIONS
from trainer.data.own import MapSamples, Position, Provider, Refused, StreamSamples, open_samples
from trainer.data.own_run import NEW, Saved, open_own
from trainer.data.own_samples import Form
from trainer.data.progress import fresh

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("code_of_this_test")]

EXAMPLE = Path(__file__).parents[2] / "examples/custom_dataset.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example with its data, and variants that a user might write."""
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(EXAMPLE, folder)
    generator = numpy.random.default_rng(1)
    starts = generator.integers(0, 90, 300)
    tokens = (starts[:, None] + numpy.arange(64)).astype(numpy.uint16)
    (folder / "tokens.bin").write_bytes(tokens.tobytes())
    texts = [f"text {number} of the stream, {'and more ' * (number % 9)}" for number in range(140)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (folder / "streams.py").write_text(STREAMS)
    return folder


STREAMS = """\
import numpy
import os
import random

def sample(number, config):
    start = number * 7 % 100
    return {"tokens": (start + numpy.arange(config.model.seq_length + 1)) % 120}

def endless(split, config):
    number = 0
    while True:
        yield sample(number, config)
        number += 1

def rows(config):
    for number in range(30):
        yield {"tokens": sample(number, config)["tokens"].tolist()}

def hugging_face(split, config):
    from datasets import IterableDataset

    stream = IterableDataset.from_generator(rows, gen_kwargs={"config": config})
    return stream.repeat(None).with_format("numpy")

def short(split, config):
    for number in range(10):
        yield sample(number, config)

def unseeded(split, config):
    while True:
        yield sample(random.randrange(10**9), config)

def large_ids(split, config):
    return [sample(0, config), {"tokens": sample(0, config)["tokens"] + 10**6}]

class Late:
    def __init__(self, split, config):
        self.config, self.number = config, 0
    def state_dict(self):
        return {"number": self.number}
    def load_state_dict(self, state):
        self.number = state["number"]
    def __iter__(self):
        while True:
            yield sample(self.number, self.config)
            self.number += 1

class NotPlain(Late):
    def state_dict(self):
        return {"random": (1, 2)}

def fails(split, config):
    raise ValueError("no data")

def empty(split, config):
    return []

class Lines:
    def __len__(self):
        return 5
    def __getitem__(self, index):
        return {}["text"]

def fails_later(split, config):
    return Lines()

def of_rank(split, config):
    return [sample(int(os.environ["RANK"]), config)]

def only_training(split, config):
    return [sample(0, config)] if split == "train" else None

def half_masked(split, config):
    length = config.model.seq_length
    for number in range(100):
        # the same tokens are learned with any seq_length from 32 on
        yield {**sample(number, config), "loss_mask": numpy.arange(length) < 32}

def nothing(split, config):
    return None

def number(split, config):
    return 7
"""


def config_of(folder: Path, name: str, run_dir: Path, **data: Any) -> dict[str, Any]:
    config = gpt_config("", run_dir)
    file = "custom_dataset.py" if name in ("windows", "Texts") else "streams.py"
    config["data"] = {"dataset": f"{folder / file}:{name}", "num_workers": 0, **data}
    config["model"] |= {"position_embedding_type": "rope"}
    return config


def record(run: Run, iteration: int = 6) -> dict[str, Any]:
    return checkpoint_files.read_record(run.directory / f"checkpoints/iter_{iteration:07d}")


PIPELINE = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("windows", PIPELINE),
        ("Texts", {}),
        pytest.param("endless", {}, marks=pytest.mark.slow),
        pytest.param("hugging_face", {}, marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_reads_the_same_samples(
    name: str, layout: dict[str, int], folder: Path, corpus: str, tmp_path: Path
) -> None:
    """In the last attempt, two ranks with loader processes continue what one rank began."""
    config = config_of(folder, name, tmp_path / "run")
    config["training"] |= {"eval_iters": 1, "global_batch_size": 8}
    config["optimizer"]["lr_decay_iters"] = 6
    config["data"]["validation"] = [{"name": "pair", "datasets": [{"prefix": corpus}]}]
    at_once = finished(config)
    assert "valid/pair" in {split for _, split, _ in at_once.evaluations}
    parts = copy.deepcopy(config) | {"run_dir": str(tmp_path / "parts")}
    for last in (2, 4) if name == "Texts" else (3,):
        first = finished(parts | {"training": config["training"] | {"train_iters": last}})
        assert first.steps == at_once.steps[:last]
    parts["data"]["num_workers"] = 2
    last = finished(parts | {"world_size": 2, "parallelism": layout})
    numpy.testing.assert_allclose(last.steps, at_once.steps, rtol=0, atol=1e-4)
    assert record(last)["dataset"] == record(at_once)["dataset"]
    ends = [each for each in at_once.evaluations if each[0] == 6]
    assert [each[:2] for each in last.evaluations[-len(ends) :]] == [each[:2] for each in ends]
    numpy.testing.assert_allclose(last.evaluations[-1][2], ends[-1][2], rtol=0, atol=1e-4)
    assert ("are read again and skipped" in last.log) == (name == "endless")


@pytest.fixture
def alone() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def parsed(config: dict[str, Any]) -> TrainerConfig:
    return resolve(configuration.from_dict(TrainerConfig, config, "test"))


def provider(folder: Path, split: str, function: Any) -> Provider:
    return Provider(function, split, parsed(config_of(folder, "own", folder / "run")))


def test_samples_of_a_map_style_dataset_are_shuffled_in_each_epoch(folder: Path) -> None:
    samples = list(range(10))
    own = MapSamples(samples, provider(folder, "train", None))
    epochs = [[own.index(epoch * 10 + place) for place in range(10)] for epoch in range(3)]
    assert all(sorted(epoch) == samples for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs[0] == [1, 6, 5, 9, 0, 8, 2, 3, 7, 4]  # a resumed run relies on this order
    own.position = Position(consumed=13, first=13)
    later = [own.index(13 + place) for place in range(10)]
    assert sorted(later) == samples
    assert later != epochs[0]
    held_out = MapSamples(samples, provider(folder, "valid", None))
    assert [held_out.index(number) for number in range(12)] == [*range(10), 0, 1]


def test_a_stream_goes_on_from_its_position(folder: Path) -> None:
    """With a state, nothing is read again. Without one, the samples before are skipped."""
    config = parsed(config_of(folder, "Texts", folder / "run"))
    texts = open_samples(config, "train")
    assert isinstance(texts, StreamSamples)
    reader = texts.reader()
    first = [reader.read(number)["tokens"].tolist() for number in range(60)]
    assert len(set(map(tuple, first[:40]))) == 40
    assert set(map(tuple, first[40:])) <= set(map(tuple, first[:40]))  # the second epoch
    for state in ({"epoch": 1, "place": 5}, None):
        texts.position = Position(consumed=45, first=0, state=state)
        again = texts.reader()
        assert [again.read(number)["tokens"].tolist() for number in (45, 59)] == [first[45], first[59]]
    assert reader.state() == {"epoch": 1, "place": 20}
    later = StreamSamples(texts.provider, has_state=True)
    later.position = Position(consumed=100, first=100)  # the run began with other data
    assert later.reader().read(100)["tokens"].tolist() == first[0]


REFUSED = {
    "nothing": "returns None for 'train'",
    "number": "returns a int for 'train', which has neither __len__ and __getitem__ nor __iter__",
    "fails": r"fails for 'train': ValueError: no data \(.*streams.py:\d+\)",
    "empty": "returns no samples for 'train'",
    "fails_later": r"sample 0 of data.dataset = .* \(train, index \d\) cannot be read: KeyError: 'text'",
    "unseeded": "gives another first sample for 'train' each time",
    "Late": r"does not continue from its state: after the first sample, state_dict\(\) returns \{'number': 0\}",
    "NotPlain": r"state_dict\(\) of .* returns \{'random': \(1, 2\)\}, which JSON cannot represent",
}


@pytest.mark.parametrize(("name", "reason"), REFUSED.items())
def test_a_dataset_that_cannot_be_read_is_refused_before_the_first_step(
    name: str, reason: str, folder: Path, tmp_path: Path, alone: None
) -> None:
    config = parsed(config_of(folder, name, tmp_path / "run"))
    with pytest.raises(ConfigError, match=reason):
        open_own(config, NEW, fresh(config), is_needed=True, log=lambda line: None)


IDS = numpy.arange(64)
INVALID = {
    "a list": ([1, 2], "is a list, not a mapping with tokens, labels"),
    "another name": ({"input_ids": IDS}, "has input_ids; known are tokens, labels, loss_mask, position_ids"),
    "no tokens": ({"labels": IDS}, "has no tokens"),
    "no token for the last label": (
        {"tokens": IDS},
        r"has tokens of shape \[64\], not \[65\], since it has no labels",
    ),
    "two dimensions": ({"tokens": IDS[None], "labels": IDS}, r"has tokens of shape \[1, 64\], not \[64\]"),
    "lists of IDs": (
        {"tokens": IDS.tolist(), "labels": IDS},
        "has tokens of type list, not a tensor or a numpy",
    ),
    "floats": ({"tokens": IDS / 2, "labels": IDS}, "has tokens of type torch.float64, not integers"),
    "an ID without a row": (
        {"tokens": IDS, "labels": IDS * 1000},
        r"has labels\[63\] = 63000, but the embedding has 1,024 rows \(model.padded_vocab_size\)",
    ),
    "the label that is ignored elsewhere": (
        {"tokens": IDS, "labels": numpy.where(IDS < 5, -100, IDS)},
        r"has labels\[0\] = -100, but .*\. Set loss_mask to 0 where nothing is to be learned",
    ),
    "a mask of weights": (
        {"tokens": IDS, "labels": IDS, "loss_mask": numpy.full(64, 0.5)},
        "has loss_mask of type torch.float64, not integers",
    ),
    "a mask of counts": (
        {"tokens": IDS, "labels": IDS, "loss_mask": IDS},
        r"has loss_mask\[63\] = 63, but it must",
    ),
    "positions that nothing reads": (
        {"tokens": IDS, "labels": IDS, "position_ids": IDS},
        "has position_ids, but rotary embeddings do not read them",
    ),
}


@pytest.mark.parametrize(("sample", "reason"), INVALID.values(), ids=INVALID)
def test_an_invalid_sample_is_named(sample: Any, reason: str, folder: Path) -> None:
    own = MapSamples([sample], provider(folder, "valid", None))
    found = own[3]
    assert isinstance(found, Refused)
    assert re.search(rf"^sample 3 of data.dataset = '.*:own' \(valid, index 0\) {reason}", found.problem)


def test_labels_masks_and_learned_positions_are_those_of_the_sample(folder: Path) -> None:
    config = config_of(folder, "own", folder / "run")
    del config["model"]["position_embedding_type"]
    form = Form.of(parsed(config))
    sample = {"tokens": torch.arange(64), "labels": IDS[::-1], "loss_mask": IDS > 9, "position_ids": IDS % 8}
    found = form.checked(sample)
    assert {name: values.tolist() for name, values in found.items()} == {
        "tokens": IDS.tolist(),
        "labels": IDS[::-1].tolist(),
        "loss_mask": [0] * 10 + [1] * 54,
        OWN_POSITIONS: (IDS % 8).tolist(),
    }
    shifted = form.checked({"tokens": numpy.arange(65, dtype=numpy.uint16)})
    assert (shifted["tokens"].tolist(), shifted["labels"].tolist()) == (IDS.tolist(), (IDS + 1).tolist())
    assert shifted["loss_mask"].tolist() == [1] * 64
    assert shifted[OWN_POSITIONS].tolist() == IDS.tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_invalid_sample_ends_the_run_with_its_name(workers: int, folder: Path, tmp_path: Path) -> None:
    """Loader processes pass the message on, without torch's traceback."""
    for name, reason in (
        ("large_ids", f"sample 0 of data.dataset = '{folder}/streams.py:large_ids' (train, index "),
        (
            "short",
            "sample 10 of data.dataset = '{folder}/streams.py:short' (train) does not exist: the stream ends",
        ),
    ):
        ended = run(config_of(folder, name, tmp_path / name, num_workers=workers))
        assert set(ended.statuses) == {2}, ended.log
        assert reason.format(folder=folder) in ended.log
        assert "Traceback" not in ended.log


def test_ranks_with_different_data_are_refused(folder: Path, tmp_path: Path) -> None:
    config = config_of(folder, "of_rank", tmp_path / "run") | {"world_size": 2}
    refused = run(config)
    assert set(refused.statuses) == {2}
    assert "does not give all ranks the same samples for 'train'" in refused.log
    assert "differs on rank 1" in refused.log


def test_another_length_must_be_confirmed(folder: Path) -> None:
    saved = Saved(16, {"first": 0, "length": 100, "state": None}, may_change=False)
    assert saved.position_in(100, "own.py:f") == Position(16, 0, None)
    with pytest.raises(
        ConfigError, match=r"own.py:f has 101 samples, but the checkpoint was trained with 100 samples"
    ):
        saved.position_in(101, "own.py:f")
    confirmed = replace(saved, may_change=True)
    assert confirmed.position_in(101, "own.py:f") == Position(16, 16, None)
    assert replace(saved, dataset=None).position_in(7, "own.py:f") == Position(16, 16, None)


def test_pairs_and_samples_of_ones_own_are_counted_apart(folder: Path, corpus: str, tmp_path: Path) -> None:
    """Pairs that are read again continue where the run left them, which other samples do not change."""
    config = config_of(folder, "windows", tmp_path / "run")
    own, pairs = config["data"], {"train": [{"prefix": corpus}], "num_workers": 0}
    config["optimizer"]["lr_decay_iters"] = 8
    for last, data in ((2, own), (4, pairs), (6, own), (8, pairs)):
        names = [f"data.dataset@{last - 2}", f"data.train@{last - 2}"] if last > 2 else []
        training = config["training"] | {"train_iters": last}
        ended = finished(config | {"data": data, "training": training, "checkpoint": {"changed": names}})
    [stream] = record(ended, 8)["sampling"]["streams"]
    assert stream["read"] == 4 * config["training"]["global_batch_size"]


def test_experts_are_balanced_over_the_tokens_that_are_learned(folder: Path, tmp_path: Path) -> None:
    """Tokens that are not learned, at the end of each sample, change neither a loss nor a gradient."""
    config = config_of(folder, "half_masked", tmp_path / "short")
    config["model"] = MOE | {"seq_length": 32}
    usual = finished(config)
    longer = config | {"model": MOE, "run_dir": str(tmp_path / "longer"), "world_size": 2}
    longer["parallelism"] = PIPELINE | {"virtual_pipeline_model_parallel_size": 2}
    numpy.testing.assert_allclose(finished(longer).steps, usual.steps, rtol=0, atol=1e-4)


def test_early_stopping_needs_validation_samples_of_ones_own(
    folder: Path, tmp_path: Path, alone: None
) -> None:
    config = config_of(folder, "only_training", tmp_path / "run")
    config["training"] |= {"eval_iters": 1, "eval_interval": 2, "early_stopping": {"patience": 2}}
    own = parsed(config)
    with pytest.raises(
        ConfigError, match=r"training.early_stopping watches valid/loss, but .* returns None for 'valid'"
    ):
        open_own(own, NEW, fresh(own), is_needed=True, log=lambda line: None)
