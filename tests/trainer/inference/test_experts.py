"""Text generation by a mixture of experts that was trained with expert parallelism and a capacity."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.forked import run_ranks
from tests.trainer.inference.models import checkpoint
from tests.trainer.runs import GPT, MOE, environment, finished, free_port, gpt_config
from trainer.contract.errors import TrainerError
from trainer.distributed import groups
from trainer.inference import Options, generate, load_model
from trainer.inference.checkpoint import inference_config

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

PROMPTS = ["A", "in the beginning", "x = 1"]


@pytest.fixture(scope="module")
def run(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("run")
    config = gpt_config(corpus, directory, MOE | {"moe_expert_capacity_factor": 1.0}) | {"world_size": 2}
    config["parallelism"] = {"expert_model_parallel_size": 2}
    config["training"]["train_iters"] = 2
    finished(config)
    (directory / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    yield directory
    if torch.distributed.is_initialized():
        groups.finalize()


def test_the_most_likely_tokens_are_generated(run: Path) -> None:
    """In a batch, no token is dropped, whatever the capacity in training."""
    model, tokenizer = load_model(run, tokenizer="bytes", device="cpu")
    completions = list(generate(model, tokenizer, PROMPTS, Options(max_new_tokens=8)))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        tokens = tokenizer.encode(prompt)
        for _ in range(8):
            tokens.append(int(model.logits(tokens)[-1].argmax()))
        assert tokenizer.decode(tokens[-8:]) == completion.text


@pytest.mark.slow  # test_imported.py generates at TP2 and PP2 with experts
@pytest.mark.parametrize("size", ["--tensor-model-parallel-size", "--pipeline-model-parallel-size"])
def test_two_ranks_generate_what_one_does(size: str, run: Path) -> None:
    model, tokenizer = load_model(run, tokenizer="bytes", device="cpu")
    completions = generate(model, tokenizer, PROMPTS, Options(max_new_tokens=8))
    assert texts(run, size, "2") == [completion.text for completion in completions]


def test_experts_with_biases_are_not_divided() -> None:
    """A trained model cannot lose its biases."""
    record = checkpoint(GPT | {"num_moe_experts": 4})
    with pytest.raises(
        TrainerError, match=r"divides the experts.*\. Use 1 or divide the model with pipeline"
    ):
        inference_config(record, device="cpu", precision=None, tensor_parallel=2)


def texts(run: Path, *arguments: str) -> list[str]:
    """Completions from two ranks."""
    options = ("--tokenizer", "bytes", "--max-new-tokens", "8", "--device", "cpu", "--json")
    command = ("-m", "trainer.inference", str(run), *options, "--prompts", str(run / "prompts.jsonl"))
    port = free_port()
    environments = [environment(rank, 2, port) for rank in range(2)]
    ranks = run_ranks((*command, *arguments), environments)
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    return [json.loads(line)["text"] for line in ranks[0].stdout.splitlines()]
