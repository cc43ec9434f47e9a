"""The memory estimate of a program with DeepSpeed: formulas, the model's size, warnings and the table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from hpcgen.cli.main import cli
from hpcgen.planning.deepspeed.facts import Device, Facts
from hpcgen.planning.deepspeed.memory import Estimate, ModelSize, estimate, setup_of
from hpcgen.planning.memory import GIB
from hpcgen.run_plan.summary import for_people, summarize
from tests.planning.deepspeed.test_check import MICRO, zero
from tests.planning.deepspeed.test_file import with_deepspeed
from tests.planning.test_program import mistakes, planned
from tests.runs import write_yaml

BILLION = 1e9
SIZE = ModelSize(parameters=8 * BILLION, trainable=8 * BILLION, largest_layer=0.5 * BILLION)
NO_BUFFERS = {"contiguous_gradients": False, "stage3_max_live_parameters": 0}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}


def estimated(stage: int, states: Device = "none", param: Device = "none", **config: Any) -> Estimate:
    """The estimate in bf16 for 16 ranks on two nodes, without DeepSpeed's buffers on the GPU."""
    offloads = {"offload_optimizer": {"device": states}, "offload_param": {"device": param}}
    document = {**zero(stage, **offloads, **NO_BUFFERS), "bf16": {"enabled": True}, **config}
    return estimate(SIZE, setup_of(Facts(config=document, ranks=16, ranks_per_node=8, model_parallel_size=1)))


@pytest.mark.parametrize(
    ("stage", "optimizer", "param", "bytes_per_parameter"),
    [
        (0, "none", "none", 2 + 2 + 4 + 12),
        (1, "none", "none", 2 + 2 + (4 + 12) / 16),
        (1, "cpu", "none", 2),
        (2, "none", "none", 2 + (2 + 4 + 12) / 16),
        (2, "cpu", "none", 2),
        (3, "none", "none", (2 + 2 + 4 + 12 - 2) / 16 + 2 / 16 + 4 / 16),
        (3, "cpu", "none", 2 / 16 + 4 / 16),
        (3, "nvme", "nvme", 4 / 16),
    ],
)
def test_gpu_memory_of_each_stage(
    stage: int, optimizer: Device, param: Device, bytes_per_parameter: float
) -> None:
    """The largest module has a sixteenth of the parameters: 4 bytes for each of its parameters in stage 3."""
    assert estimated(stage, optimizer, param).gpu == pytest.approx(bytes_per_parameter * SIZE.parameters)


def test_host_and_disks_hold_what_the_gpu_does_not() -> None:
    node = SIZE.parameters / 2
    assert estimated(3, "cpu", "cpu").host == pytest.approx(1.5 * 18 * node)
    assert estimated(3, "cpu").host == pytest.approx(1.5 * 16 * node)
    assert estimated(2).host == pytest.approx(1.5 * 4 * SIZE.parameters * 8)
    assert estimated(3, "nvme", "nvme").nvme == pytest.approx(18 * node)
    assert estimated(3, "cpu", "cpu").nvme == 0


def test_precision_and_optimizer_change_the_bytes() -> None:
    parameters = SIZE.parameters
    in_fp32 = {"data_types": {"grad_accum_dtype": "fp32"}}
    assert estimated(1, **in_fp32).gpu == pytest.approx((2 + 2 + 4 + 16 / 16) * parameters)
    assert estimated(2, **in_fp32).gpu == pytest.approx((2 + (4 + 16) / 16) * parameters)
    assert estimated(2, bf16={}).gpu == pytest.approx((4 + (4 + 16) / 16) * parameters)
    lion = {"optimizer": {"type": "Lion"}}
    assert estimated(2, **lion).gpu == pytest.approx((2 + (2 + 4 + 8) / 16) * parameters)
    low = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert estimated(2, **low).gpu == pytest.approx((2 + (2 + 2 + 2 + 4) / 16) * parameters)


def test_buffers_and_adapters_count() -> None:
    config = {**zero(2, overlap_comm=True, reduce_bucket_size=1e8), "bf16": {"enabled": True}}
    facts = Facts(config=config, ranks=16, ranks_per_node=8, model_parallel_size=1)
    found = estimate(ModelSize(parameters=1e9, trainable=1e6, largest_layer=0), setup_of(facts))
    assert found.gpu_buffers == 2 * 1e8 * 2
    assert found.gpu_states == pytest.approx(2e9 + 18 * 1e6 / 16)


def test_the_model_is_read_from_its_config(tmp_path: Path) -> None:
    write_yaml(tmp_path / "model" / "config.json", LLAMA)
    values = with_deepspeed({**MICRO, **zero(2), "bf16": {"enabled": True}}, model="model")
    plan = planned(tmp_path, values)
    found = summarize(plan)["deepspeed"]
    parameters = 8_030_261_248  # Meta's number for Llama 3 8B
    buffer_bytes = 5e8 * 2
    assert found["memory_gib_per_gpu"] * GIB == pytest.approx(parameters * (2 + 18 / 16) + buffer_bytes)
    assert found["train_batch_size"] is None
    assert dict(for_people(summarize(plan)))["deepspeed"] == "ZeRO stage 2"


def test_a_model_that_cannot_fit_is_an_error(tmp_path: Path) -> None:
    config = {**MICRO, **zero(1), "bf16": {"enabled": True}}
    values = with_deepspeed(config, parameters=60e9)
    override = ", or use --set memory_check=warning"
    gpu, host = (mistake.removesuffix(override) for mistake in mistakes(tmp_path, values))
    plan = planned(tmp_path, {**values, "memory_check": "warning"})
    assert [warning for warning in plan.warnings if "deepspeed" in warning] == [gpu, host]
    assert (
        "zero_optimization.stage = 1 results in about 280.3 GiB on a GPU with 79.6 GiB, even without activ"
        in gpu
    )
    assert "results in about 2682 GiB on a node with 1870 GiB of memory; compare the stages" in host
    plan = planned(tmp_path, with_deepspeed({**config, **zero(3)}, parameters=60e9))
    assert not [warning for warning in plan.warnings if "deepspeed" in warning]
    assert mistakes(tmp_path, with_deepspeed({**config, "unknown": 1}, parameters=60e9))[0].count("GiB") == 0


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        ({"model": "nowhere"}, "no such file"),
        ({"model": "run.yaml"}, "program.deepspeed.model = run.yaml cannot be used"),
        ({"model": "m.json", "parameters": 1e9}, "program.deepspeed.parameters = 1000000000.0 is ignored"),
    ],
)
def test_mistakes_about_the_model(tmp_path: Path, section: dict[str, Any], expected: str) -> None:
    write_yaml(tmp_path / "m.json", LLAMA)
    [mistake] = mistakes(tmp_path, with_deepspeed({**MICRO}, **section))
    assert expected in mistake


def test_the_command_compares_stages_and_offloads(tmp_path: Path) -> None:
    config = {**MICRO, **zero(3, offload_optimizer={"device": "cpu"}), "bf16": {"enabled": True}}
    file = write_yaml(tmp_path / "run.yaml", with_deepspeed(config, parameters=60e9))
    lines = CliRunner().invoke(cli, ["memory", "-c", str(file)], catch_exceptions=False).stdout.splitlines()
    [marked] = [line.split() for line in lines if line.startswith("*")]
    assert marked[:4] == ["*", "3", "cpu", "none"]
    assert marked[-1] == "yes"
    assert lines[1].split() == ["0", "none", "none", "1,117.6", "2,682.2", "0.0", "no"]
    assert lines[-1].split() == ["available", "79.6", "1,870.2"]
    rows = json.loads(CliRunner().invoke(cli, ["memory", "-c", str(file), "--json"]).stdout)
    assert [row["fits"] for row in rows] == [False] * 5 + [True] * 5
    assert rows[8]["estimate"]["nvme"] == pytest.approx(16 * 60e9 / 2)


def test_the_command_needs_the_size_of_the_model(tmp_path: Path) -> None:
    file = write_yaml(tmp_path / "run.yaml", with_deepspeed(MICRO))
    result = CliRunner().invoke(cli, ["memory", "-c", str(file)])
    assert "program.deepspeed has neither model nor parameters; set model" in str(result.exception)
