"""What metrics.jsonl and the formulas behind it say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import GPT, Run, finished, gpt_config
from trainer import config as configuration
from trainer.config import TrainerConfig
from trainer.flops import flops_per_iteration
from trainer.metrics import drop_after
from trainer.resolve import resolve

GPT_1_3B = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 50304,
}
LLAMA_8_LAYERS = {
    "num_layers": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 4096,
    "swiglu": True,
    "vocab_size": 128256,
}


def test_the_first_line_names_the_formula_and_each_step_has_its_numbers(single_gpt: Run) -> None:
    start, *steps = single_gpt.events
    assert start["event"] == "start"
    assert "megatron-lm" in start["flop_formula"]
    assert start["tokens_per_iteration"] == 4 * GPT["seq_length"]
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    for step in steps:
        assert step["tokens_per_s"] == pytest.approx(start["tokens_per_iteration"] / step["step_time_s"])
        assert step["model_tflops_per_device"] * 1e12 * step["step_time_s"] == pytest.approx(
            start["flops_per_iteration"]
        )
        assert step["peak_memory_gib"] > 0
        assert "mfu" not in step


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        # tokens/s and TFLOP/s that Megatron-LM's formula gave for the same shapes
        pytest.param(GPT_1_3B, 514e12 / 60_727, id="GPT 1.3B"),
        pytest.param(LLAMA_8_LAYERS, 565e12 / 39_140, id="Llama, 8 layers"),
    ],
)
def test_flops_agree_with_megatron_lm(model: dict[str, Any], expected: float, tmp_path: Path) -> None:
    config = resolve(configuration.from_dict(TrainerConfig, gpt_config("x", tmp_path, model), "test"))
    per_token = flops_per_iteration(config) / (config.training.global_batch_size * config.model.seq_length)
    assert per_token == pytest.approx(expected, rel=0.005)


def test_lines_after_an_iteration_are_dropped_and_so_is_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"event": "step", "iteration": i}) + "\n" for i in range(1, 6)]
    path.write_text("".join(lines) + '{"event": "st')
    drop_after(path, 3)
    assert path.read_text() == "".join(lines[:3])
    drop_after(tmp_path / "absent", 3)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_interval_mfu_and_tensorboard(config: dict[str, Any]) -> None:
    config["logging"] = {"log_interval": 4, "tensorboard": True}
    config["peak_tflops"] = 0.5
    result = finished(config)
    assert [iteration for iteration, *_ in result.steps] == [4, 6]
    for step in result.events[1:]:
        assert step["mfu"] == pytest.approx(step["model_tflops_per_device"] / 0.5)
    assert list((result.directory / "tensorboard").glob("events.*"))
