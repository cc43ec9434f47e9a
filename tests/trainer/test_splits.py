"""Documents and weights of each split, tested with Megatron-Core's own datasets."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from hpcgen.slurm.training_data import empty_split
from tests.trainer.runs import write_corpus
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.resuming.sampling import draws
from trainer.contract.rules.engine import SAMPLES, require
from trainer.data.blend import Blend, plan_blends
from trainer.data.corpora import cut, split_shares
from trainer.data.datasets import build_datasets
from trainer.data.gpt import Vocabulary

SPLITS = ("99990,8,2", "949,50,1", "8,1,1", "1,1,1", "0.7,0.2,0.1", "1,0,0", "9,0,1", "98,2,0")


@pytest.fixture(autouse=True)
def parallel_state_of_one() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def trainer_config(config: dict[str, Any], data: dict[str, Any], **training: Any) -> TrainerConfig:
    document = config | {"data": data, "training": config["training"] | {"eval_iters": 1} | training}
    return configuration.from_dict(TrainerConfig, document, "test")


def pairs(directory: Path, *documents: int) -> list[dict[str, str]]:
    return [
        {"prefix": write_corpus(directory / f"pair-{number}", documents=count)}
        for number, count in enumerate(documents)
    ]


def planned(config: TrainerConfig, said: list[str] | None = None) -> dict[str, Blend]:
    blends = plan_blends(config, Path("unread"), 1000, [].append if said is None else said.append)
    return {split: blend for split, (blend,) in blends.items()}


@pytest.mark.parametrize("split", SPLITS)
def test_each_document_of_a_pair_is_in_exactly_one_split(split: str) -> None:
    shares = [share for share in split_shares(split).values() if share is not None]
    for count in [*range(1, 400), 12_501, 8_200_003]:
        bounds = [cut(count, share) for share in shares]
        assert (bounds[0][0], bounds[-1][1]) == (0, count)
        assert all(one[1] == next_one[0] for one, next_one in itertools.pairwise(bounds))


@pytest.mark.parametrize("split", SPLITS)
def test_hpcgen_knows_before_the_job_which_sets_are_empty(split: str) -> None:
    shares = split_shares(split)
    for count in [*range(1, 400), 6_249, 6_250, 12_501]:
        sizes = {
            name: end - first for name, share in shares.items() if share for first, end in [cut(count, share)]
        }
        empty = [name for name in ("train", "valid") if not sizes.get(name)]
        assert empty_split(split, [count], evaluates=True) == (empty[0] if empty else None)
        assert empty_split(split, [count], evaluates=False) == ("train" if "train" in empty else None)


def test_pairs_are_cut_and_read_as_megatrons_builder_does_it(config: dict[str, Any], tmp_path: Path) -> None:
    for pair in pairs(tmp_path, 23, 120, 301):
        wanted = trainer_config(config, {"datasets": [pair], "split": "8,1,1"})
        blends = planned(wanted)
        theirs = BlendedMegatronDatasetBuilder(
            GPTDataset,
            [blend.num_samples for blend in blends.values()],
            lambda: True,
            GPTDatasetConfig(
                random_seed=wanted.training.seed,
                sequence_length=64,
                path_to_cache=str(tmp_path / "theirs"),
                tokenizer=Vocabulary(1000),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
                blend=([pair["prefix"]], None),
                split="8,1,1",
            ),
        ).build()
        ours = build_datasets(wanted, tmp_path / "ours", 1000, True)
        for (split, blend), dataset in zip(blends.items(), theirs, strict=True):
            [part] = blend.parts
            assert (part.documents.first, part.documents.end) == (dataset.indices[0], dataset.indices[-1] + 1)
            assert dataset.unique_description_hash == ours[split].unique_description_hash
            assert all(torch.equal(dataset[i]["tokens"], ours[split][i]["tokens"]) for i in range(4))


def test_a_document_of_several_sequences_is_not_divided(config: dict[str, Any], tmp_path: Path) -> None:
    builder = IndexedDatasetBuilder(f"{tmp_path}/sentences.bin", dtype=numpy.uint16)
    for sentences in itertools.islice(itertools.cycle((3, 1, 7, 2)), 60):
        builder.add_document(numpy.arange(10 * sentences), [10] * sentences)
    builder.finalize(f"{tmp_path}/sentences.idx")
    blends = planned(
        trainer_config(config, {"datasets": [{"prefix": f"{tmp_path}/sentences"}], "split": "50,30,20"})
    )
    corpus = IndexedDataset(f"{tmp_path}/sentences")
    bounds = [
        bound
        for blend in blends.values()
        for part in blend.parts
        for bound in (part.documents.first, part.documents.end)
    ]
    assert set(bounds) <= set(corpus.document_indices.tolist())
    assert (bounds[0], bounds[-1]) == (0, len(corpus))
    assert bounds[1:-1:2] == bounds[2:-1:2]


def test_pairs_without_a_document_in_a_split_are_left_out_of_it(
    config: dict[str, Any], tmp_path: Path
) -> None:
    large, small, other = pairs(tmp_path, 40, 3, 60)
    wanted = trainer_config(config, {"datasets": [large, small, other], "split": "90,9,1"})
    said: list[str] = []
    datasets = build_datasets(wanted, tmp_path / "cache", 1000, True, said.append)
    assert [len(blend.parts) for blend in planned(wanted).values()] == [3, 2, 1]
    assert len(datasets["valid"]) == 4
    assert datasets["test"][3]["tokens"].shape == (64,)
    [of_valid] = [line for line in said if "valid: 1 of 3 corpora are left out" in line]
    assert of_valid.endswith(small["prefix"])
    assert any("test: 2 of 3 corpora are left out" in line for line in said)


def test_a_split_without_any_document_is_an_error_that_says_what_to_do(
    config: dict[str, Any], tmp_path: Path
) -> None:
    small = pairs(tmp_path, 40, 30)
    with pytest.raises(ConfigError) as caught:
        planned(trainer_config(config, {"datasets": small}))
    for advice in ("more than 2.5%", "fewer pairs", "data.valid", "eval_iters = 0"):
        assert advice in str(caught.value)
    followed = planned(trainer_config(config, {"datasets": small, "split": "95,2.6,2.4"}))
    assert [part.documents.end - part.documents.first for part in followed["valid"].parts] == [1, 1]
    assert planned(trainer_config(config, {"datasets": small}, eval_iters=0)).keys() == {"train"}


def test_an_empty_test_split_is_logged(config: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    wanted = trainer_config(config, {"datasets": pairs(tmp_path, 40, 30), "split": "95,5,0.01"})
    assert planned(wanted, said).keys() == {"train", "valid"}
    assert (
        [line for line in said if line.startswith("data: warning: data.split")]
        == [line for line in said if "for test" in line]
        != []
    )


def test_a_test_split_without_weight_is_no_warning(config: dict[str, Any], tmp_path: Path) -> None:
    said: list[str] = []
    wanted = trainer_config(config, {"datasets": pairs(tmp_path, 40, 30), "split": "95,5,0"})
    assert planned(wanted, said).keys() == {"train", "valid"}
    assert "data: test: none, since data.split = '95,5,0' gives it no weight" in said
    assert not [line for line in said if "warning" in line]


def test_a_split_without_pairs_of_its_own_is_skipped_and_logged(
    config: dict[str, Any], tmp_path: Path
) -> None:
    said: list[str] = []
    train, valid = pairs(tmp_path, 40, 30)
    blends = planned(trainer_config(config, {"train": [train], "valid": [valid]}), said)
    assert {split: blend.parts[0].documents.end for split, blend in blends.items()} == {
        "train": 40,
        "valid": 30,
    }
    assert "data: test: none, since data.test is empty" in said


def test_a_pair_in_two_splits_is_refused_under_any_name(config: dict[str, Any], tmp_path: Path) -> None:
    train, other = pairs(tmp_path, 20, 10)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"link{suffix}").symlink_to(f"{train['prefix']}{suffix}")
    link = {"prefix": str(tmp_path / "link")}
    with pytest.raises(
        ConfigError, match=r"data\.valid: .*/link is the same pair as .*/pair-0 in data\.train"
    ):
        planned(trainer_config(config, {"train": [train], "valid": [other, link]}))


def test_weights_default_to_the_tokens_that_each_pair_has_in_the_split(
    config: dict[str, Any], tmp_path: Path
) -> None:
    """A pair with few long documents and one with many short ones. Long documents get shorter towards validation."""
    for name, lengths in {"long": [300] * 36 + [50] * 4, "short": [10] * 400}.items():
        builder = IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", dtype=numpy.uint16)
        for length in lengths:
            builder.add_document(numpy.arange(length), [length])
        builder.finalize(f"{tmp_path}/{name}.idx")
    datasets = [{"prefix": f"{tmp_path}/{name}"} for name in ("long", "short")]
    wanted = trainer_config(
        config, {"datasets": datasets, "split": "90,10,0"}, train_iters=250, eval_iters=30
    )
    built = build_datasets(wanted, tmp_path / "cache", 1000, True)
    for split, tokens in {"train": (36 * 300, 360 * 10), "valid": (4 * 50, 40 * 10)}.items():
        counts = numpy.bincount(built[split].dataset_index)
        expected = numpy.array(tokens) / sum(tokens) * len(built[split])
        assert numpy.abs(counts - expected).max() <= 1


def test_no_blend_draws_more_from_a_pair_than_requested() -> None:
    random = numpy.random.default_rng(0)
    for _ in range(200):
        weights = random.pareto(0.5, int(random.integers(2, 100))) + 1e-9
        weights = (weights / weights.sum()).tolist()
        size = int(random.integers(1, 5000))
        dataset_index, sample_index = numpy.zeros(size, numpy.int16), numpy.zeros(size, numpy.int64)
        helpers.build_blending_indices(dataset_index, sample_index, weights, len(weights), size, False)
        drawn = numpy.bincount(dataset_index, minlength=len(weights))
        assert (drawn <= [draws(weight, size) for weight in weights]).all()


def test_many_small_pairs_and_a_large_one_make_a_blend(config: dict[str, Any], tmp_path: Path) -> None:
    """Megatron's builder gives up here: "The train blend oversamples the contributing datasets"."""
    datasets = pairs(tmp_path, 41, *[3] * 12)
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 115}
    wanted = trainer_config(config, {"train": datasets}, train_iters=1)
    assert len(build_datasets(wanted, tmp_path / "cache", 1000, True)["train"]) == 115


def test_a_pair_that_does_not_fit_together_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    [pair] = pairs(tmp_path, 20)
    wanted = trainer_config(config, {"train": [pair]})
    tokens, index = Path(f"{pair['prefix']}.bin"), Path(f"{pair['prefix']}.idx")
    content = index.read_bytes()
    for damaged in (content[:-8], content[:20], b"", b"\0" * 100, content[:40] + b"\1\1" + content[42:]):
        index.write_bytes(damaged)
        with pytest.raises(
            ConfigError,
            match=r"pair-0\.(idx is (truncated|not a Megatron index)|bin has [\d,]+ bytes, but its \.idx)",
        ):
            planned(wanted)
    index.write_bytes(content)
    tokens.write_bytes(tokens.read_bytes()[:-2])
    with pytest.raises(ConfigError, match=r"[mM]ake the pair again"):
        planned(wanted)


def test_tokens_that_would_be_read_for_ever_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    prefix = f"{tmp_path}/three-tokens"
    Path(f"{prefix}.bin").write_bytes(struct.pack("<3H", 1, 2, 3))
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 3, 0, 0, 1)  # one document of 3 tokens
    )
    wanted = trainer_config(config, {"train": [{"prefix": prefix}]}, train_iters=1_000_000)
    with pytest.raises(ConfigError, match=r"would read .*three-tokens for 85,333,333 epochs"):
        planned(wanted)


@pytest.mark.parametrize("split", ["", "1,1", "0,1,1", "1,-1,0", "a,b,c", "1,1,1,1", "nan,1,1"])
def test_a_split_that_is_not_three_weights_is_refused(split: str, config: dict[str, Any]) -> None:
    config["data"] = {"datasets": [{"prefix": "/corpus"}], "split": split}
    with pytest.raises(ConfigError, match="three weights"):
        require(configuration.from_dict(TrainerConfig, config, "test"), SAMPLES)
