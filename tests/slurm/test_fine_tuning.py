"""Adapters trained on chats, from the files of chats to evaluated answers, on a real Slurm that kills the training."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.data.chat_corpora import chat, write_chats, write_tokenizer
from tests.patience import wait_until
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import curve, hpcgen, log_of, profile_text, ranks_of

RUN = """\
name: chats
cluster: ./cluster.yaml
paths: {run_dir: run}
slurm: {train: {time: "5:00", nodes: 2, ntasks_per_node: 1}}
data:
  tokenizer: {kind: huggingface, tokenizer_file: model/tokenizer.json, eod_token: "<|endoftext|>"}
  corpus: {directory: corpus-CHATS, source: {directory: CHATS}, chat: {}}
  split: "9,1,0"
  num_workers: 0
model:
  {num_layers: 2, hidden_size: 32, num_attention_heads: 2, seq_length: 64, swiglu: true, normalization: RMSNorm,
   add_bias_linear: false, position_embedding_type: rope, untie_embeddings_and_output_weights: true}
training:
  {micro_batch_size: 1, global_batch_size: 4, train_iters: 200, precision: fp32, eval_iters: 1, eval_interval: 50}
optimizer: {lr: 1.0e-2, lr_warmup_iters: 1}
checkpoint: {save_interval: 12LOAD}
answers: {prompts: prompts.jsonl, max_new_tokens: 8}
"""

LOAD = ", load: base/checkpoints, finetune: true"
ADAPTERS = """\
lora: {rank: 4}
generation: {prompts: prompts.jsonl, max_new_tokens: 8}
evaluation: {data: [{name: ants, prefix: ants}]}
"""
SPIDER, ANT = "How many legs has a spider?", "How many legs has an ant?"
QUESTIONS = [{"messages": [{"role": "user", "content": question}]} for question in (SPIDER, ANT)]


@pytest.fixture
def directory(tmp_path: Path, stand_in: str) -> Path:
    """A tokenizer, chats with wrong answers for the model, with right ones for its adapters, and a pair to evaluate."""
    (tmp_path / "cluster.yaml").write_text(profile_text(stand_in))
    write_tokenizer(tmp_path / "model")
    for name, spider, ant in (("wrong", "Two.", "Nine."), ("right", "Eight.", "Six.")):
        chats = [chat(SPIDER, spider, ANT, ant, system="Be brief."), chat(SPIDER, spider), chat(ANT, ant)]
        write_chats(tmp_path / name / "chats.jsonl", chats * 13)
    write_chats(tmp_path / "prompts.jsonl", QUESTIONS)
    write_chats(tmp_path / "ants.jsonl", [chat(ANT, "Six.")])
    return tmp_path


@pytest.mark.slow
def test_chats_train_adapters_that_are_killed_requeued_generated_with_evaluated_and_exported(
    slurm_cluster: SlurmCluster, directory: Path
) -> None:
    run = directory / "run.yaml"
    options = ("-c", str(run))
    base = ("--set=paths.run_dir=base", "--set=training.train_iters=60")
    local = ("--launcher=local", "--set=slurm.train={nodes: 1}")
    tokenizer = ("--tokenizer=model/tokenizer.json", "--eod-token=<|endoftext|>")

    run.write_text(RUN.replace("CHATS", "wrong").replace("LOAD", ""))
    hpcgen("data", "plan", *options, cwd=directory)
    hpcgen("data", "prepare", *options, cwd=directory)
    hpcgen("submit", "train", *options, *base, *local, cwd=directory)
    run.write_text(RUN.replace("CHATS", "right").replace("LOAD", LOAD) + ADAPTERS)
    hpcgen("data", "plan", *options, cwd=directory)
    hpcgen("data", "prepare", *options, cwd=directory)
    hpcgen("data", "tokenize", "ants.jsonl", "--chat", "--output-prefix=ants", *tokenizer, cwd=directory)
    hpcgen("submit", "train", *options, "--set=paths.run_dir=undisturbed", *local, cwd=directory)

    def submit(stage: str, *sets: str) -> str:
        """Submits a stage. Returns the ID of its job."""
        environment = {**os.environ, **slurm_cluster.env}
        return hpcgen("submit", stage, *options, *sets, cwd=directory, env=environment).split()[0]

    def completed(stage: str, *sets: str) -> None:
        job_id = submit(stage, *sets)
        state = slurm_cluster.wait(job_id)
        assert state == "COMPLETED", (directory / f"run/{stage}-{job_id}.log").read_text()

    job_id = submit("train")
    wait_for_step(directory, 16)
    os.kill(ranks_of(slurm_cluster, job_id)[1], signal.SIGKILL)
    wait_for_attempt(directory, 2)
    slurm_cluster.run("scancel", "--batch", "--signal=USR2", job_id)
    assert slurm_cluster.wait(job_id) == "COMPLETED", log_of(run, job_id)
    assert int(slurm_cluster.show(job_id)["Restarts"]) == 1
    epoch = int(re.findall(r"in (\d+) samples of 64 tokens", log_of(run, job_id))[0])
    first, *resumed = starts(directory)
    assert (first, len(resumed)) == (0, 2)
    assert 4 * resumed[0] > epoch, "after the first epoch"
    assert 4 * resumed[0] % epoch, "in the middle of one"
    found = {iteration: loss for iteration, (loss, _) in curve(run).items()}
    assert found == pytest.approx(losses(directory / "undisturbed"), rel=1e-4)

    answers = [line["answer"] for line in json_lines(directory / "run/answers.jsonl")]
    assert [answers[:2], answers[-2:]] == [["Two.", "Nine."], ["Eight.", "Six."]]
    completed("generate")
    texts = json_lines(directory / "run/generation/prompts.jsonl")
    assert [line["text"] for line in texts] == ["Eight.", "Six."]
    completed("evaluate")
    [result] = [json.loads(file.read_text()) for file in directory.glob("run/evaluation/iter_*.json")]
    assert result["data"][0]["answers_only"]
    assert result["data"][0]["tokens"] == len(texts[1]["tokens"])
    completed("export", "--set=export={directory: merged}")
    assert (directory / "merged/model.safetensors").is_file()
    completed("export", "--set=export={directory: adapter, adapter: true}")
    assert (directory / "adapter/adapter_model.safetensors").is_file()
    report = hpcgen("report", "run", cwd=directory)
    assert "chats: done, iteration 200 of 200" in report
    assert "evaluation of iteration 200: ants loss" in report


def starts(directory: Path) -> list[int]:
    """Iterations from which the attempts began."""
    return [
        line["iteration"] for line in json_lines(directory / "run/metrics.jsonl") if line["event"] == "start"
    ]


def losses(run_dir: Path) -> dict[int, float]:
    lines = json_lines(run_dir / "metrics.jsonl")
    return {line["iteration"]: line["loss"] for line in lines if line["event"] == "step"}


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_step(directory: Path, number: int) -> None:
    wait_until(lambda: number in losses(directory / "run"), lambda: "")


def wait_for_attempt(directory: Path, number: int) -> None:
    wait_until(lambda: len(starts(directory)) >= number, lambda: "")
