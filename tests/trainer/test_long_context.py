"""The example that extends a trained model to longer sequences, in small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.command import hpcgen
from tests.trainer.runs import ROOT, write_corpus

pytestmark = pytest.mark.process

EXAMPLE = ROOT / "examples/long_context.yaml"
VOCAB = 512
SMALL = {
    "cluster": "./tiny-cluster.yaml",
    "data.split": "1,0,0",
    "data.num_workers": 0,
    "data.tokenizer.kind": "bytes",
    "data.tokenizer.tokenizer_file": "null",
    "data.tokenizer.eod_token": "null",
    "data.eod_id": 500,
    "model.num_layers": 2,
    "model.hidden_size": 64,
    "model.ffn_hidden_size": 96,
    "model.num_attention_heads": 4,
    "model.num_query_groups": 2,
    "model.vocab_size": VOCAB,
    "training.precision": "fp32",
    "training.global_batch_size": 4,
    "training.eval_iters": 0,
    "slurm.train.nodes": 1,
    "slurm.train.time": "10:00",
}
SHORT = {
    "paths.run_dir": "short",
    "model.seq_length": 64,
    "model.max_position_embeddings": 64,
    "model.rope_scaling": "null",
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.sequence_parallel": "false",
    "parallelism.context_parallel_size": 1,
    "slurm.train.ntasks_per_node": 1,
    "training.train_iters": 40,
    "optimizer.lr": 1e-2,
    "optimizer.lr_warmup_iters": 2,
    "checkpoint.load": "null",
    "checkpoint.finetune": "false",
}
LONG = {
    "paths.run_dir": "long",
    "model.seq_length": 256,
    "model.max_position_embeddings": 256,
    "model.rope_scaling.original_max_position_embeddings": 64,
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.sequence_parallel": "false",
    "parallelism.context_parallel_size": 2,
    "slurm.train.ntasks_per_node": 2,
    "training.train_iters": 4,
    "optimizer.lr_warmup_iters": 1,
    "checkpoint.load": "short/checkpoints",
}


def losses(settings: dict[str, object]) -> list[float]:
    """Losses of the example with these settings."""
    options = [word for key, value in (SMALL | settings).items() for word in ("--set", f"{key}={value}")]
    ended = hpcgen("submit", "train", "-c", EXAMPLE.name, "--launcher", "local", *options)
    assert ended.status == 0, ended.stderr
    events = map(json.loads, Path(str(settings["paths.run_dir"]), "metrics.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["event"] == "step"]


@pytest.mark.slow  # the page about long contexts runs its steps
def test_the_example_extends_a_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-cluster.yaml").write_text(f"extends: local\npython: {stand_in}\nstartup_time_s: 1\n")
    (tmp_path / "llama").mkdir()
    write_corpus(tmp_path / "llama/long-documents", documents=400, eod=500)
    shutil.copy(EXAMPLE, tmp_path)
    short, long = losses(SHORT), losses(LONG)
    assert short[-1] < short[0] - 1.5
    assert long[0] < short[0] - 1
    assert long[-1] < long[0]
