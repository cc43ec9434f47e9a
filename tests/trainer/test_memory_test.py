"""The memory test: a rank of each pipeline stage trains alone, and uses the memory that it would use among others."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import DEEPSEEK_V3, LLAMA, MOE, environment, gpt_config
from tests.trainer.test_rank_memory import MOE as BALANCED
from tests.trainer.test_rank_memory import ranks_of
from trainer.contract.config import TrainerConfig, from_dict
from trainer.contract.memory_test import MemoryTestConfig
from trainer.memory_test.rank import prepared, rank_of_stage

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


def run_test(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trainer.memory_test", "--config", str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (DEEPSEEK_V3, {"pipeline_model_parallel_size": 4} | EP2 | CP2),
        (MOE, PP2 | EP2 | TP2 | {"expert_tensor_parallel_size": 2}),
        pytest.param(
            LLAMA,
            PP2 | {"virtual_pipeline_model_parallel_size": 2, "num_distributed_optimizer_instances": 2},
            marks=SLOW,
        ),
    ],
    ids=["latent-attention-predicting", "experts-divided", "interleaved"],
)
def test_every_stage_trains_alone(model: dict[str, Any], layout: dict[str, Any], tmp_path: Path) -> None:
    done = run_test(configuration(tmp_path, model, layout))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run/memory-test.json").read_text())["stages"]
    number = layout["pipeline_model_parallel_size"]
    assert [(stage["stage"], stage["rank"]) for stage in result] == [
        (stage, stage * 64 // number) for stage in range(number)
    ]
    assert all(stage["in_use_gib"] > 0.1 and stage["microbatch_s"] > 0 for stage in result)
    assert not any(stage["error"] for stage in result)
    assert "memory-test: every stage ran; the fullest is stage" in done.stdout
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["memory-test.json"]


def test_stages_without_a_result_are_named(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, PP2 | {"context_parallel_size": 3})
    done = run_test(path)
    assert done.returncode == 1
    assert "memory-test: ERROR: stages without a result: 0, 1." in done.stderr
    result = json.loads((tmp_path / "run/memory-test.json").read_text())["stages"]
    assert [(stage["in_use_gib"], stage["error"]) for stage in result] == [
        (None, "its process ended with status 1 (above)")
    ] * 2


def test_it_runs_no_more_microbatches_than_are_in_flight(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA, PP2 | TP2)
    config = from_dict(MemoryTestConfig, json.loads(path.read_text()), "test").trainer
    micro_batch_size = config.training.micro_batch_size
    assert prepared(config).training.global_batch_size == 3 * 2 * 16 * micro_batch_size
    assert prepared(config).training.rampup_batch_size is None
    with_graphs = dataclasses.replace(
        config, training=dataclasses.replace(config.training, cuda_graph_impl="transformer_engine")
    )
    assert prepared(with_graphs).training.global_batch_size == 4096


@pytest.mark.parametrize(
    "layout", [pytest.param(PP2 | EP2, id="EP2"), pytest.param(PP2 | TP2, id="TP2", marks=SLOW)]
)
def test_a_rank_alone_allocates_what_it_does_among_others(layout: dict[str, Any], tmp_path: Path) -> None:
    document = gpt_config("none", tmp_path / "run", BALANCED)
    document |= {"world_size": 4, "parallelism": layout}
    document["training"] |= {"micro_batch_size": 4, "global_batch_size": 32, "transformer_impl": "torch"}
    path = tmp_path / "config.json"
    among_others = ranks_of(document, path)
    for stage in range(2):
        rank = rank_of_stage(from_dict(TrainerConfig, document, "test"), stage)
        subprocess.run(
            [sys.executable, "-m", "tests.trainer.rank_memory", str(path)],
            env=environment(rank, 4, "1") | {"ALONE": "1"},
            check=True,
        )
        alone = json.loads(Path(f"{path}.{rank}").read_text())
        assert alone["parameter_bytes"] == among_others[rank]["parameter_bytes"]
        # Threads of gloo release what they exchange late.
        assert alone["activation_bytes"] == pytest.approx(among_others[rank]["activation_bytes"], rel=0.12)
