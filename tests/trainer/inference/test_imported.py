"""Models from Hugging Face with experts or latent attention generate the tokens of transformers, with the cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.trainer.forked import run_ranks
from tests.trainer.huggingface.models import VOCAB_SIZE, huggingface_tokens, save_model, save_tokenizer
from tests.trainer.inference.models import ONE, TOKENIZER
from tests.trainer.runs import environment, free_port
from trainer.distributed import groups
from trainer.huggingface.importing import import_model
from trainer.inference import Options, generate
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.loading import load

pytestmark = [
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore"),  # Megatron-Core warns about its own defaults
]

COUNT = 12
PROMPTS = [
    torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 5, 40)
]
"""The longest passes the original length of the scaled rotary embeddings, 32."""


@pytest.fixture(scope="module", autouse=True)
def process_groups() -> Iterator[None]:
    yield
    groups.finalize()


@pytest.mark.parametrize(
    "case",
    [
        pytest.param("deepseek-experts", marks=pytest.mark.slow),
        "deepseek-groups",
        pytest.param("deepseek-llama3", marks=pytest.mark.slow),
        pytest.param("deepseek-without-query-latent", marks=pytest.mark.slow),
        pytest.param("deepseek-yarn", marks=pytest.mark.slow),
        "deepseek-yarn-mscale",
        pytest.param("mixtral", marks=pytest.mark.slow),
        pytest.param("mixtral-window", marks=pytest.mark.slow),
        "qwen3-moe",
    ],
)
def test_one_process_generates_the_tokens_of_transformers(case: str, tmp_path: Path) -> None:
    original = save_model(case, tmp_path / "original")
    import_model(original, tmp_path / "imported", print)
    model = load(find_checkpoint(tmp_path / "imported"), ONE, device="cpu")
    assert model.has_cache
    prompts = [TOKENIZER.decode(prompt) for prompt in PROMPTS]
    completions = generate(model, TOKENIZER, prompts, Options(max_new_tokens=COUNT))
    assert [one.tokens for one in completions] == huggingface_tokens(original, PROMPTS, COUNT)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param("--tensor-model-parallel-size", marks=pytest.mark.slow),  # test_command.py
        "--pipeline-model-parallel-size",
    ],
)
def test_two_ranks_generate_the_tokens_of_transformers(size: str, tmp_path: Path) -> None:
    """Latent attention with experts."""
    original = save_model("deepseek-experts", tmp_path / "original")
    import_model(original, tmp_path / "imported", print)
    texts = (" ".join(f"t{number}" for number in prompt) for prompt in PROMPTS)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    files = ("--tokenizer", str(save_tokenizer(tmp_path)), "--prompts", str(tmp_path / "prompts.jsonl"))
    options = ("--max-new-tokens", str(COUNT), "--device", "cpu", "--json", size, "2")
    port = free_port()
    ranks = run_ranks(
        ("-m", "trainer.inference", str(tmp_path / "imported"), *files, *options),
        [environment(rank, 2, port) for rank in range(2)],
    )
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    tokens = [json.loads(line)["tokens"] for line in ranks[0].stdout.splitlines()]
    assert tokens == huggingface_tokens(original, PROMPTS, COUNT)
