"""Blends, splits, sample order and the samples of each rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import EOD, finished, gpt_config, run, write_corpus
from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, TrainerConfig
from trainer.contract.errors import Exit
from trainer.contract.model.batch_size import Batch
from trainer.contract.rules.engine import SAMPLES, require
from trainer.data.corpora import CHECKED_TOKENS
from trainer.data.datasets import build_datasets
from trainer.data.loader import LoadSampler
from trainer.distributed.sequence import zigzag_positions


def trainer_config(config: dict[str, Any], data: dict[str, Any], **training: Any) -> TrainerConfig:
    document = config | {"data": {"num_workers": 0} | data, "training": config["training"] | training}
    return configuration.from_dict(TrainerConfig, document, "test")


def build(config: TrainerConfig, tmp_path: Path) -> dict[str, torch.utils.data.Dataset | None]:
    return build_datasets(config, tmp_path / "cache", vocab_size=1000, is_needed=True)


def share_of_high_tokens(dataset: torch.utils.data.Dataset | None, samples: int) -> float:
    """`other_corpus` has the tokens from 500 on."""
    return sum(int(dataset[i]["tokens"][0] >= 500) for i in range(samples)) / samples


@pytest.fixture
def parallel_state_of_one() -> Any:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


pytestmark = pytest.mark.usefixtures("parallel_state_of_one")


def test_each_split_reads_its_own_blend(
    config: dict[str, Any], corpus: str, other_corpus: str, tmp_path: Path
) -> None:
    data = {"train": [{"prefix": corpus}], "valid": [{"prefix": other_corpus}]}
    datasets = build(trainer_config(config, data, eval_iters=2), tmp_path)
    assert datasets.keys() == {"train", "valid"}
    assert share_of_high_tokens(datasets["train"], 24) == 0
    assert share_of_high_tokens(datasets["valid"], 8) == 1


@pytest.mark.parametrize(
    ("weights", "share"),
    [((3.0, 1.0), 0.25), ((1.0, 4.0), 0.8), ((None, None), 0.5)],
)
def test_a_blend_follows_its_weights_or_the_token_counts(
    weights: tuple[float | None, float | None],
    share: float,
    config: dict[str, Any],
    corpus: str,
    other_corpus: str,
    tmp_path: Path,
) -> None:
    datasets = [{"prefix": p, "weight": w} for p, w in zip((corpus, other_corpus), weights, strict=True)]
    wanted = trainer_config(config, {"datasets": datasets, "split": "1,0,0"}, train_iters=50)
    assert share_of_high_tokens(build(wanted, tmp_path)["train"], 200) == pytest.approx(share, abs=0.1)


def test_an_unweighted_blend_goes_through_the_data_again(
    config: dict[str, Any], corpus: str, other_corpus: str, tmp_path: Path
) -> None:
    wanted = trainer_config(
        config,
        {"datasets": [{"prefix": corpus}, {"prefix": other_corpus}], "split": "1,0,0"},
        train_iters=500,
    )
    assert len(build(wanted, tmp_path)["train"]) >= 2000


def test_evaluation_off_builds_no_evaluation_data(
    config: dict[str, Any], corpus: str, tmp_path: Path
) -> None:
    assert build(trainer_config(config, {"datasets": [{"prefix": corpus}]}), tmp_path).keys() == {"train"}


def test_an_empty_test_split_is_left_out(config: dict[str, Any], corpus: str, tmp_path: Path) -> None:
    wanted = trainer_config(config, {"datasets": [{"prefix": corpus}], "split": "9,1,0"}, eval_iters=1)
    assert build(wanted, tmp_path).keys() == {"train", "valid"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "data has no source of samples"),
        ({"mock": True, "train": [{"prefix": "CORPUS"}]}, "data.mock = true conflicts with data.train"),
        ({"datasets": [{"prefix": "/absent/corpus"}]}, "/absent/corpus.bin is not a file"),
        ({"datasets": [{"prefix": "CORPUS.bin"}]}, "is not a file"),
        (
            {"datasets": [{"prefix": "CORPUS", "weight": 1.0}, {"prefix": "CORPUS"}]},
            "weight = null is missing, but other datasets of data.datasets have a weight",
        ),
        ({"datasets": [{"prefix": "CORPUS"}], "split": "99990,8,2"}, "no document .* for valid"),
    ],
)
def test_data_that_cannot_be_read_is_an_error(
    data: dict[str, Any], message: str, config: dict[str, Any], corpus: str, tmp_path: Path
) -> None:
    data = json.loads(json.dumps(data).replace("CORPUS", corpus))
    wanted = trainer_config(config, data, eval_iters=1)

    def check_and_build() -> None:
        require(wanted, SAMPLES)
        build(wanted, tmp_path)

    with pytest.raises(ConfigError, match=message):
        check_and_build()


def test_a_corpus_without_a_token_is_an_error(config: dict[str, Any], tmp_path: Path) -> None:
    data = {"train": [{"prefix": write_corpus(tmp_path / "empty", documents=0)}]}
    with pytest.raises(ConfigError, match=r"empty\.bin is empty"):
        build(trainer_config(config, data), tmp_path)


def test_a_corpus_of_another_tokenizer_is_an_error(
    config: dict[str, Any], other_corpus: str, tmp_path: Path
) -> None:
    wanted = trainer_config(config, {"datasets": [{"prefix": other_corpus}], "split": "8,2,0"})
    with pytest.raises(ConfigError, match=r"token ID .* the embedding has 128 rows. Name the tokenizer"):
        build_datasets(wanted, tmp_path / "cache", vocab_size=128, is_needed=True)


@pytest.mark.process
def test_missing_data_ends_the_run_in_one_line(config: dict[str, Any]) -> None:
    config["data"]["datasets"] = [{"prefix": "/absent/corpus"}]
    result = run(config)
    assert result.statuses == (2,)
    assert result.log.splitlines()[-1].startswith("trainer: data.datasets: /absent/corpus.bin is not a file")


@pytest.mark.process
def test_mock_samples_and_loader_processes(config: dict[str, Any]) -> None:
    config["data"] = {"mock": True, "num_workers": 1}
    config["training"] |= {"train_iters": 2, "eval_iters": 1}
    result = finished(config)
    assert [(iteration, split) for iteration, split, _ in result.evaluations] == [(2, "valid"), (2, "test")]


@pytest.mark.process
def test_an_evaluation_does_not_depend_on_its_division_into_batches(
    short_documents: str, tmp_path: Path
) -> None:
    """The batches have different numbers of tokens that count."""

    def evaluation(global_batch_size: int, eval_iters: int) -> float:
        config = gpt_config(short_documents, tmp_path / str(eval_iters))
        config["training"] |= {"micro_batch_size": 1, "global_batch_size": global_batch_size}
        config["training"] |= {"train_iters": 1, "eval_iters": eval_iters}
        config["optimizer"] = {"lr": 1e-30, "lr_warmup_iters": 0}
        config["data"] |= {"eod_mask_loss": True, "eod_id": EOD}
        return finished(config).evaluations[0][2]

    assert evaluation(1, 8) == pytest.approx(evaluation(8, 1), rel=1e-7)


@pytest.mark.process
def test_samples_of_which_no_token_counts_have_no_loss(short_documents: str, tmp_path: Path) -> None:
    nothing = write_corpus(tmp_path / "nothing", documents=600, eod=EOD, lengths=(1, 2))
    config = gpt_config(short_documents, tmp_path / "run")
    blends = {"train": [{"prefix": short_documents}], "valid": [{"prefix": nothing}]}
    config["data"] = {**blends, "eod_mask_loss": True, "eod_id": EOD}
    config["training"] |= {"train_iters": 2, "eval_iters": 1}
    done = finished(config)
    assert done.evaluations == []
    assert "iteration 2: no valid loss, because the loss mask is 0 for every token" in done.log
    assert "nan" not in done.log.lower()


def test_the_ranks_of_a_step_read_its_samples_once_in_any_layout() -> None:
    def samples(dp_size: int, micro_batch_size: int) -> list[int]:
        read = []
        for rank in range(dp_size):
            for batch in LoadSampler([Batch(8, 8), Batch(16, 8)], micro_batch_size, rank, dp_size):
                read += batch
        return sorted(read)

    assert samples(1, 8) == samples(2, 2) == samples(4, 1) == samples(2, 4) == list(range(8, 24))


def test_the_chunks_of_a_sequence_pair_early_with_late() -> None:
    assert zigzag_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert zigzag_positions(8, 0, 1).tolist() == list(range(8))


@pytest.mark.process
def test_an_id_without_a_row_beyond_the_beginning_of_a_corpus_ends_the_run_in_a_line(tmp_path: Path) -> None:
    """The check at the start only reads CHECKED_TOKENS. On a GPU, later tokens would fail in a kernel."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{tmp_path}/c.bin", dtype=numpy.uint16)
    for token in (7, 60_000):
        builder.add_document(numpy.full(CHECKED_TOKENS, token), [CHECKED_TOKENS])
    builder.finalize(f"{tmp_path}/c.idx")
    config = gpt_config(f"{tmp_path}/c", tmp_path / "run")
    config["data"]["split"] = "1,0,0"
    result = run(config)
    assert result.statuses == (Exit.REFUSED,), result.log
    assert "Traceback" not in result.log
    [line] = [line for line in result.log.splitlines() if line.startswith("trainer: ")]
    assert "the data contains the token ID 60000, but the embedding has 1024 rows" in line
    assert "60000" in (result.directory / "FAILED").read_text()
