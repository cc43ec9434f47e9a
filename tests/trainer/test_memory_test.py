"""The memory test: a rank of each pipeline stage trains alone, and uses the memory that it would use among others."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.trainer.runs import DEEPSEEK_V3, LLAMA, MOE, gpt_config
from tests.trainer.test_rank_memory import MOE as BALANCED
from tests.trainer.test_rank_memory import rank_alone, ranks_of
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.memory_test import MemoryTestConfig, StageMemory
from trainer.memory_test.__main__ import failure, measure_all
from trainer.memory_test.rank import prepared

pytestmark = pytest.mark.process

SLOW = pytest.mark.slow
PP2, EP2, CP2 = ({f"{axis}_parallel_size": 2} for axis in ("pipeline_model", "expert_model", "context"))
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def configuration(
    directory: Path,
    model: dict[str, Any],
    layout: dict[str, Any],
    *,
    training: dict[str, Any] | None = None,
    **values: Any,
) -> Path:
    """The configuration file for a training on 64 ranks."""
    document = gpt_config("none", directory / "run", model)
    document |= {"world_size": 64, "parallelism": layout, "data": {"mock": True}} | values
    document["training"] |= {"global_batch_size": 4096, "rampup_batch_size": [2048, 1024, 10_000]}
    document["training"] |= training or {}
    stages = layout.get("pipeline_model_parallel_size", 1)
    trainer = from_dict(TrainerConfig, document, "test")
    test = MemoryTestConfig(
        trainer=trainer, at_once=torch.cuda.device_count() or 2, estimated_gib=(1.5,) * stages
    )
    path = directory / "memory-test.config.json"
    path.write_text(json.dumps(dataclasses.asdict(test)))
    return path


def run_test(path: Path, python: str) -> subprocess.CompletedProcess[str]:
    """Runs the test with this Python, which also starts a process for each stage."""
    return subprocess.run(
        [python, "-m", "trainer.memory_test", "--config", str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DEEPSEEK_V3, PP2 | EP2 | CP2 | TP2 | {"expert_tensor_parallel_size": 2}),
        pytest.param(MOE, PP2 | EP2 | TP2 | {"expert_tensor_parallel_size": 2}, marks=SLOW),
        pytest.param(
            LLAMA,
            PP2 | {"virtual_pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
            marks=SLOW,
        ),
    ],
    ids=["latent-attention-predicting", "experts-divided", "interleaved"],
)
def test_every_stage_trains_alone(model: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    # a stand-in has imported Megatron-Core, whose collectives a rank of several replaces before the import
    done = run_test(configuration(tmp_path, model, layout), sys.executable)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/memory-test.json").read_text())["stages"]
    assert [stage["stage"] for stage in result] == list(range(layout["pipeline_model_parallel_size"]))
    assert all(stage["in_use_gib"] > 0.1 and stage["microbatch_s"] > 0 for stage in result)
    assert not any(stage["error"] for stage in result)
    assert "memory-test: every stage ran; the fullest is stage" in done.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["memory-test.json"]


def test_stages_without_a_result_are_named(stand_in: str, tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, PP2 | {"context_parallel_size": 3})
    done = run_test(path, stand_in)
    assert done.returncode == 1
    assert "memory-test: ERROR: stages without a result: 0, 1\n" in done.stderr
    result = json.loads((tmp_path / "run/memory-test.json").read_text())
    assert result["config"] == str(path)
    assert [(stage["in_use_gib"], stage["error"]) for stage in result["stages"]] == [
        (None, "its process ended with status 1 (above)")
    ] * 2


def test_stages_that_do_not_fit_are_distinguished_from_those_that_failed() -> None:
    full, lost, measured = (
        StageMemory(stage=stage, rank=stage, estimated_gib=1.0, in_use_gib=size, error=error)
        for stage, size, error in [
            (0, 79.0, "does not fit: CUDA out of memory"),
            (1, None, "x"),
            (2, 3.0, ""),
        ]
    )
    assert failure([full, lost, measured]) == (
        "stages without a result: 1; "
        "stages that do not fit: 0 (use more pipeline stages, a smaller micro_batch_size or recomputation)"
    )


def test_the_signal_that_ended_a_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = configuration(tmp_path, LLAMA, {})
    config = from_dict(MemoryTestConfig, json.loads(path.read_text()), "test")
    killed = tmp_path / "python"
    killed.write_text("#!/bin/sh\nkill -KILL $$\n")
    killed.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(killed))
    [stage] = measure_all(config, path)
    assert stage.error == "its process ended with signal SIGKILL (above)"


def test_an_interrupted_test_leaves_no_result_of_another_configuration(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, {})
    result = tmp_path / "run/memory-test.json"
    result.parent.mkdir()
    result.write_text("{}")
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.memory_test", "--config", str(path)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        os.killpg(process.pid, signal.SIGKILL)
    assert not result.exists()


def test_a_result_that_cannot_be_written_is_one_line(stand_in: str, tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, {})
    (tmp_path / "run").write_text("a file")
    done = run_test(path, stand_in)
    assert done.returncode == 1
    assert done.stderr.startswith("memory-test: ERROR: cannot write memory-test.json or temporary files: ")
    assert "Traceback" not in done.stderr


def test_it_measures_the_rank_with_the_last_part_of_the_sequence(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, PP2 | TP2 | {"context_parallel_size": 4})
    config = from_dict(MemoryTestConfig, json.loads(path.read_text()), "test")
    assert [config.rank_of_stage(stage) for stage in range(2)] == [6, 32 + 6]


def test_the_first_step_in_fp16_allocates_the_state_of_the_optimizer(stand_in: str, tmp_path: Path) -> None:
    """With the default loss scale of 2^32, the first steps would be skipped."""
    path = configuration(tmp_path, LLAMA, {})
    document = json.loads(path.read_text())
    document["trainer"]["training"]["precision"] = "fp16"
    path.write_text(json.dumps(document))
    done = run_test(path, stand_in)
    assert done.returncode == 0, done.stderr


def test_it_runs_no_more_microbatches_than_are_in_flight(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, PP2 | TP2)
    config = from_dict(MemoryTestConfig, json.loads(path.read_text()), "test").trainer
    micro_batch_size = config.training.micro_batch_size
    assert prepared(config).training.global_batch_size == 3 * 2 * 16 * micro_batch_size
    with_graphs = dataclasses.replace(
        config, training=dataclasses.replace(config.training, cuda_graph_impl="transformer_engine")
    )
    assert prepared(with_graphs).training.global_batch_size == 4096


@pytest.mark.slow  # test_rank_memory.py compares both with the estimate
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(EP2, 2, id="EP2"),
        pytest.param(PP2 | EP2, 4, id="PP2xEP2"),
        pytest.param(PP2 | TP2, 4, id="PP2xTP2"),
    ],
)
def test_a_rank_alone_allocates_what_it_does_among_others(
    layout: dict[str, Any], world_size: int, tmp_path: Path
) -> None:
    document = gpt_config("none", tmp_path / "run", BALANCED | {"num_layers": 2})
    document |= {"world_size": world_size, "parallelism": layout}
    document["training"] |= {"micro_batch_size": 4, "global_batch_size": 16, "transformer_impl": "torch"}
    path = tmp_path / "config.json"
    among_others = ranks_of(document, path)
    rank = world_size // 2  # of the last stage
    alone = rank_alone(document, path, rank)
    assert alone["parameter_bytes"] == among_others[rank]["parameter_bytes"]
    # Threads of gloo release what they exchange late.
    assert alone["activation_bytes"] == pytest.approx(among_others[rank]["activation_bytes"], rel=0.12)
