"""Documents of training samples."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from tests.recorded_run import write_checkpoint
from tests.trainer.forked import run_python
from tests.trainer.runs import environment
from trainer.contract.files.checkpoint_files import METADATA, TRACKER

pytestmark = pytest.mark.process


def samples(config: dict[str, Any], path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path.write_text(json.dumps(config))
    command = ("-m", "trainer.data.samples", "--config", str(path), *arguments)
    return run_python(*command, env=environment(0, 1, "0"))


def test_the_documents_of_a_batch_hold_the_tokens_that_it_trains_on(
    config: dict[str, Any], corpus: str, other_corpus: str, tmp_path: Path
) -> None:
    """The corpora have no common tokens, so a document of the wrong pair would fail the test."""
    config["data"]["datasets"] = [{"prefix": corpus, "weight": 1.0}, {"prefix": other_corpus, "weight": 1.0}]
    config["model"]["vocab_size"] = 1100
    found = samples(config, tmp_path / "config.json", "4", "11")
    assert found.returncode == 0, found.stderr
    lines = [line.split(": ") for line in found.stdout.splitlines()]
    assert [int(sample) for sample, *_ in lines] == list(range(4, 12))
    assert {prefix for _, prefix, _ in lines} == {corpus, other_corpus}
    for sample, prefix, documents in lines:
        assert holds(
            prefix, [int(document) for document in documents.split()], tokens_of(config, int(sample))
        )


def holds(prefix: str, documents: list[int], tokens: list[int]) -> bool:
    """True if the tokens are in the documents in sequence, beginning in the first and ending in the last."""
    pair = IndexedDataset(prefix)
    texts = [pair[document].tolist() for document in documents]
    text = [token for each in texts for token in each]
    starts = range(len(texts[0]))
    return any(text[start : start + len(tokens)] == tokens for start in starts)


def tokens_of(config: dict[str, Any], sample: int) -> list[int]:
    """A sample from Megatron-Core itself."""
    import torch

    from trainer.contract import config as configuration
    from trainer.contract.config.resolve import resolve
    from trainer.data.datasets import build_datasets

    parsed = resolve(configuration.from_dict(configuration.TrainerConfig, config, "test"))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        cache = Path(config["run_dir"]) / "index-cache"
        datasets = build_datasets(parsed, cache, 1152, True, lambda line: None)
        return datasets["train"][sample]["tokens"].tolist()
    finally:
        torch.distributed.destroy_process_group()


def test_samples_that_the_run_does_not_read_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    found = samples(config, tmp_path / "config.json", "3", "24")
    assert found.returncode == 2
    assert "3 to 24 is outside of the run's samples, 0 to 23" in found.stderr


def test_samples_are_found_after_a_changed_batch_size(config: dict[str, Any], tmp_path: Path) -> None:
    """Three of six steps had 8 samples, the others have the configuration's 4: 36 samples, not 24."""
    write_checkpoint(tmp_path / "run/checkpoints", 3, consumed_samples=24)
    assert "35: " in samples(config, tmp_path / "config.json", "35").stdout
    refused = samples(config, tmp_path / "config.json", "36")
    assert (refused.returncode, "36 to 36 is outside of the run's samples, 0 to 35" in refused.stderr) == (
        2,
        True,
    )


def test_samples_of_a_megatron_lm_checkpoint_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "theirs/iter_0000003"
    path.mkdir(parents=True)
    (path / METADATA).write_text("{}")
    (path.parent / TRACKER).write_text("3")
    config["checkpoint"] = {"load": str(path.parent)}
    refused = samples(config, tmp_path / "config.json", "0")
    assert (refused.returncode, "iter_0000003 is Megatron-LM's" in refused.stderr) == (2, True)
