"""The mean of the last checkpoints of a run, which training, generation and export read like any checkpoint."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.command import hpcgen
from tests.trainer.runs import LLAMA, MOE, TWO_LAYERS, Run, finished, gpt_config, run
from tests.trainer.tensors import load_all
from trainer.contract.errors import TrainerError
from trainer.contract.files import checkpoint_files
from trainer.huggingface.averaging import average
from trainer.huggingface.exporting import Options, export
from trainer.inference.checkpoint import find_checkpoint, inference_config

pytestmark = pytest.mark.process


def train(corpus: str, directory: Path, model: dict[str, Any], **changes: Any) -> Run:
    config = gpt_config(corpus, directory, model) | {"checkpoint": {"save_interval": 1}, **changes}
    config["training"] |= {"train_iters": 3, "precision": "bf16"}
    return finished(config)


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of two tensor-parallel ranks, so that its tensors consist of pieces."""
    layout = {"world_size": 2, "parallelism": {"tensor_model_parallel_size": 2}}
    return train(corpus, tmp_path_factory.mktemp("trained"), LLAMA, **layout)


@pytest.fixture(scope="module")
def averaged(trained: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("averaged") / "mean"
    average(trained.directory, 2, directory, print)
    return directory / "iter_0000003"


def assert_mean(averaged: Path, sources: list[Path]) -> None:
    """All tensors are the means of those in `sources`, of which some differ."""
    tensors, originals = load_all(averaged), [load_all(source) for source in sources]
    assert tensors.keys() == {name for name in originals[0] if not name.startswith("optimizer.")}
    for name, tensor in tensors.items():
        mean = torch.stack([each[name].float() for each in originals]).mean(0).to(tensor.dtype)
        torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-8)
    assert any(not torch.equal(tensor, originals[0][name]) for name, tensor in tensors.items())


def test_the_weights_are_means(trained: Run, averaged: Path) -> None:
    sources = [checkpoint_files.iteration_directory(trained.checkpoints, number) for number in (2, 3)]
    assert_mean(averaged, sources)
    record = checkpoint_files.read_record(averaged)
    assert [each["path"] for each in record["averaged"]] == [str(source) for source in sources]
    assert all(len(each["record_sha256"]) == 64 for each in record["averaged"])
    assert not checkpoint_files.problems(checkpoint_files.describe(averaged), hashes=True)


@pytest.mark.slow
def test_experts_are_averaged_one_at_a_time(corpus: str, tmp_path: Path) -> None:
    ended = train(corpus, tmp_path / "run", MOE | TWO_LAYERS)
    average(ended.checkpoints, 3, tmp_path / "mean", print)
    sources = [checkpoint_files.iteration_directory(ended.checkpoints, number) for number in (1, 2, 3)]
    assert_mean(tmp_path / "mean/iter_0000003", sources)


def test_training_starts_from_the_mean_and_does_not_resume_it(
    averaged: Path, corpus: str, tmp_path: Path
) -> None:
    config = gpt_config(corpus, tmp_path / "run", LLAMA)
    config["training"] |= {"train_iters": 1, "precision": "bf16"}
    config["optimizer"] = {"lr": 1e-30, "lr_warmup_iters": 0}
    config["checkpoint"] = {"load": str(averaged.parent)}
    refused = run(config)
    assert refused.statuses == (2,)
    assert "has only weights (hpcgen checkpoint average wrote it)" in refused.log
    config["checkpoint"]["finetune"] = True
    ended = finished(config)
    tensors, expected = load_all(ended.checkpoints / "iter_0000001"), load_all(averaged)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=1e-20)


def test_the_mean_is_exported_and_read_for_generation(averaged: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    found = find_checkpoint(averaged.parent)
    config = inference_config(found, device="cpu", precision=None)
    assert config.model.num_layers == LLAMA["num_layers"]
    options = Options(family=None, dtype=None, vocab_size=None, tokenizer=None, eos_token=None, check=False)
    export(found.path, tmp_path / "hf", options, print)
    exported = load_file(tmp_path / "hf/model.safetensors")["model.embed_tokens.weight"]
    embedding = load_all(averaged)["embedding.word_embeddings.weight"]
    assert torch.equal(exported, embedding[: len(exported)])


def test_what_has_no_mean_is_refused_and_leaves_nothing(trained: Run, corpus: str, tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"has 3 complete checkpoints, not 4"):
        average(trained.directory, 4, tmp_path / "mean", print)
    other = tmp_path / "other"
    for number, model in ((1, LLAMA), (2, LLAMA | {"num_layers": 2})):
        config = gpt_config(corpus, tmp_path / f"run-{number}", model)
        config["training"]["train_iters"] = number
        config["optimizer"]["lr_warmup_iters"] = 0
        config["checkpoint"] = {"save": str(tmp_path / f"run-{number}/saved")}
        path = checkpoint_files.iteration_directory(finished(config).directory / "saved", number)
        other.mkdir(exist_ok=True)
        path.rename(other / path.name)
    with pytest.raises(TrainerError, match=r"iter_0000001 has another model than iter_0000002: .*num_layers"):
        average(other, 2, tmp_path / "mean", print)
    assert not [*tmp_path.glob("*mean*")]


def test_a_changed_file_is_refused(trained: Run, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for number in (2, 3):
        source = checkpoint_files.iteration_directory(trained.checkpoints, number)
        (copy / source.name).symlink_to(source)
    (copy / "iter_0000002").unlink()
    damaged = copy / "iter_0000002"
    damaged.mkdir()
    for file in checkpoint_files.iteration_directory(trained.checkpoints, 2).iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    [first, *_] = sorted(damaged.glob("*.distcp"))
    content = bytearray(first.read_bytes())
    content[len(content) // 2] ^= 1
    first.write_bytes(content)
    with pytest.raises(TrainerError, match=r"iter_0000002: .*SHA-256 differs"):
        average(copy, 2, tmp_path / "mean", print)
    assert not [*tmp_path.glob("*mean*")]


AVERAGE_UNTIL_KILLED = """
import itertools, os, signal, sys
from pathlib import Path
from trainer.huggingface.averaging import average

numbers, last = itertools.count(), int(sys.argv[3])

def deadly(function):
    def call(*arguments):
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)
    return call

for name in ("fsync", "rename"):
    setattr(os, name, deadly(getattr(os, name)))
average(Path(sys.argv[1]), 2, Path(sys.argv[2]), print)
"""
"""Averages, and dies before a call of fsync or rename."""


def test_a_killed_average_leaves_no_directory_that_looks_complete(
    trained: Run, tmp_path: Path, stand_in: str
) -> None:
    """It is killed before each of its writes becomes durable, and the next one is not disturbed by what is left."""
    sources = sorted(trained.checkpoints.rglob("*"))
    before = {path: path.stat().st_mtime_ns for path in sources}
    mean = tmp_path / "mean"
    for deaths in itertools.count():
        words = [stand_in, "-c", AVERAGE_UNTIL_KILLED, str(trained.directory), str(mean), str(deaths)]
        status = subprocess.run(words, check=False, capture_output=True).returncode
        if mean.exists():  # from then on, only its entry in the directory above may be lost
            break
        assert status in (-signal.SIGKILL, 128 + signal.SIGKILL)
    assert deaths > 5
    assert {path: path.stat().st_mtime_ns for path in sorted(trained.checkpoints.rglob("*"))} == before
    found = checkpoint_files.describe(mean / "iter_0000003")
    assert checkpoint_files.problems(found, hashes=True) == []
    assert_mean(found.path, [trained.checkpoints / f"iter_000000{number}" for number in (2, 3)])
    assert len(list(tmp_path.glob(".mean.*"))) in (deaths - 1, deaths)


def test_the_command_prints_what_it_did(
    trained: Run, tmp_path: Path, stand_in: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", stand_in)
    mean = tmp_path / "mean"
    made = hpcgen("checkpoint", "average", trained.directory, "--last", 3, "-o", mean)
    assert made.status == 0, made.stderr
    assert f"wrote the mean of iterations 1, 2, 3 to {mean}/iter_0000003" in made.stderr
    assert f"checkpoint: {{load: {json.dumps(str(mean))}, finetune: true}}" in made.stderr
    shown = hpcgen("checkpoint", "inspect", mean)
    assert "3, weights only" in shown.stdout
    assert f"the mean of iterations 1, 2, 3 of {trained.checkpoints}" in shown.stdout
    again = hpcgen("checkpoint", "average", trained.directory, "--last", 3, "-o", mean)
    assert again.status == 2
    assert f"{mean} exists already" in again.stderr
    without = hpcgen("checkpoint", "average", trained.directory, "--ema", "-o", tmp_path / "ema")
    assert without.status == 2
    assert "was trained without training.ema_decay" in without.stderr
    assert hpcgen("checkpoint", "average", trained.directory, "-o", tmp_path / "ema").status == 2
