"""Chats on real GPUs (make test-gpu): losses of a CPU, exact resumption, evaluation, and a model that ends its turn."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.data.chat_corpora import write_tokenizer
from tests.trainer import runs
from tests.trainer.chat_pairs import random_chats, write_chats
from tests.trainer.evaluate import parts
from tests.trainer.runs import LLAMA, QWEN, ROOT, Run, finished
from tests.trainer.test_answers import QUESTIONS, chats_of_questions
from tests.trainer.test_gpu import CP2, EP2, PP2, TP2_SP, needs_gpus, on_gpus, with_engine

LOSS_TOLERANCE = 0.02
"""As for documents in tests/trainer/test_gpu.py."""
NORM_TOLERANCE = 0.05
"""Relative tolerance of gradient norms in bf16. A wrong mask changes them by more than a third."""
FP8_TOLERANCES = 0.05, 0.2

EXPERTS = LLAMA | {"num_layers": 2, "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48}
EXPERTS |= {"moe_aux_loss_coeff": 1e-2, "moe_z_loss_coeff": 1e-3}
SHAPES = {"llama": LLAMA, "qwen": QWEN, "experts": EXPERTS, "predicting": LLAMA | {"mtp_num_layers": 1}}
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    with_engine,
]


@pytest.fixture(autouse=True)
def processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No forks, which would have seen the GPU."""
    for module in (runs, parts):
        monkeypatch.setattr(module, "ForkedPython", runs.new_process)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a pair of chats of 50 tokens on average, for samples of 128."""
    return write_chats(tmp_path_factory.mktemp("chats") / "pair", random_chats(120, (8, 100)))


def learning(
    chats: str, directory: Path, model: dict[str, Any], gpus: int = 1, layout: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Four steps of a run that learns the chats in bf16 on GPUs."""
    config = on_gpus(chats, directory, gpus, layout or {}, model)
    config["data"] = {"train": [{"prefix": chats}], "num_workers": 0, "sft": True}
    config["training"] |= {"train_iters": 4, "micro_batch_size": 2}
    return config


def columns(run: Run) -> numpy.ndarray:
    """Losses and gradient norms of the steps."""
    return numpy.array([step[1:3] for step in run.steps]).T


def two(name: str, layout: dict[str, Any], title: str) -> Any:
    return pytest.param(name, 2, layout, {}, {}, id=f"{name}-{title}", marks=needs_gpus(2))


@pytest.mark.parametrize(
    ("name", "gpus", "layout", "data", "training"),
    [
        pytest.param("llama", 1, {}, {}, {}, id="packed"),
        pytest.param("llama", 1, {}, {"sft_packing": False}, {}, id="one-chat-per-sample"),
        pytest.param("llama", 1, {}, {}, {"cross_entropy_fusion_impl": "native"}, id="native-cross-entropy"),
        pytest.param("llama", 1, {}, {}, {"deterministic_mode": True}, id="deterministic"),
        pytest.param("llama", 1, {}, {}, {"fp8": "hybrid"}, id="fp8-tensorwise"),
        pytest.param("llama", 1, {}, {}, {"fp8": "hybrid", "fp8_recipe": "delayed"}, id="fp8-delayed"),
        pytest.param("llama", 1, {}, {}, RECOMPUTE, id="recompute"),
        pytest.param("qwen", 1, {}, {}, {}, id="qwen"),
        pytest.param("experts", 1, {}, {}, {}, id="experts"),
        pytest.param("predicting", 1, {}, {}, {}, id="predicting"),
        two("llama", CP2, "CP2"),
        two("qwen", CP2, "CP2"),
        two("llama", TP2_SP, "TP2+SP"),
        two("llama", PP2, "PP2"),
        two("experts", EP2, "EP2"),
        two("predicting", CP2, "CP2"),
    ],
)
def test_chats_train_as_on_a_cpu(
    name: str,
    gpus: int,
    layout: dict[str, Any],
    data: dict[str, Any],
    training: dict[str, Any],
    chats: str,
    tmp_path: Path,
) -> None:
    """Both start from the same checkpoint, since GPUs draw other random numbers than CPUs."""
    config = learning(chats, tmp_path / "gpu", SHAPES[name], gpus, layout)
    config["data"] |= data
    reference = copy.deepcopy(config) | {"device": "cpu", "run_dir": str(tmp_path / "cpu")}
    reference |= {"world_size": 1, "parallelism": {}}
    reference["training"]["precision"] = "fp32"
    config["training"] |= training
    start = reference | {"run_dir": str(tmp_path / "start")}
    finished(start)
    for each in (config, reference):
        each["checkpoint"] = {"load": f"{start['run_dir']}/checkpoints", "finetune": True}
    losses, norms = columns(finished(config))
    expected, expected_norms = columns(finished(reference))
    of_losses, of_norms = FP8_TOLERANCES if "fp8" in training else (LOSS_TOLERANCE, NORM_TOLERANCE)
    numpy.testing.assert_allclose(losses, expected, rtol=0, atol=of_losses)
    numpy.testing.assert_allclose(norms, expected_norms, rtol=of_norms)


def test_a_deterministic_run_resumes_exactly_in_its_second_epoch(chats: str, tmp_path: Path) -> None:
    config = learning(chats, tmp_path / "through", LLAMA)
    config["training"] |= {"deterministic_mode": True, "train_iters": 10}
    config["optimizer"]["lr_decay_iters"] = 10
    through = finished(config)
    resumed = copy.deepcopy(config) | {"run_dir": str(tmp_path / "resumed")}
    first = copy.deepcopy(resumed)
    first["training"]["train_iters"] = 7
    finished(first)
    assert finished(resumed).steps == through.steps


@pytest.mark.parametrize(
    ("gpus", "sizes"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {}, id="two-replicas", marks=needs_gpus(2)),
        pytest.param(2, {"tensor_model_parallel_size": 2}, id="TP2", marks=needs_gpus(2)),
    ],
)
def test_an_evaluation_of_chats_has_the_loss_of_a_cpu(
    gpus: int, sizes: dict[str, int], chats: str, tmp_path: Path
) -> None:
    run = finished(learning(chats, tmp_path / "run", LLAMA))

    def loss(device: str, precision: str, world_size: int = 1, **sizes: int) -> float:
        directory = tmp_path / f"{device}-{precision}"
        config = parts.configuration(
            run.checkpoints,
            directory,
            world_size,
            data=[{"name": "chats", "prefix": chats}],
            precision=precision,
            **sizes,
        )
        [result] = parts.evaluated(config | {"device": device}, iteration=4)[0].data
        assert result.answers_only
        assert result.loss is not None
        return result.loss

    expected = loss("cpu", "fp32")
    assert loss("cuda", "fp32", gpus, **sizes) == pytest.approx(expected, rel=1e-5)
    assert loss("cuda", "bf16", gpus, **sizes) == pytest.approx(expected, rel=5e-3)


def test_a_model_that_learns_chats_answers_them_and_ends_its_turn(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path / "tokenizer")
    prefix, vocab_size = chats_of_questions(file, tmp_path)
    config = learning(prefix, tmp_path / "run", LLAMA | {"vocab_size": vocab_size})
    config["training"]["train_iters"] = 60
    config["optimizer"] = {"lr": 5e-3, "lr_warmup_iters": 2}
    prompts = tmp_path / "questions.jsonl"
    lines = [{"messages": [{"role": "user", "content": question}]} for question in QUESTIONS]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    config["answers"] = {"prompts": str(prompts), "tokenizer": str(file), "max_new_tokens": 30}
    trained = finished(config)
    found = [json.loads(line) for line in (trained.directory / "answers.jsonl").read_text().splitlines()]
    expected = [(answer, "stop") for answer in QUESTIONS.values()]
    assert [(each["answer"], each["finish_reason"]) for each in found[-2:]] == expected
    words = ["-m", "trainer.inference", str(trained.checkpoints), "--chat", "--tokenizer", str(file)]
    said = subprocess.run(
        [sys.executable, *words], input="Hi\n", capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.startswith("> hello hello!\n> ")
