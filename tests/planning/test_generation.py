"""The stages generate and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hpcgen.errors import ConfigErrors
from hpcgen.planning.stage import StagePlan
from tests.runs import minimal_run, planned

PROMPTS = {"prompts": "prompts.jsonl"}


def stage_plan(directory: Path, stage: str, *overrides: str, **sections: Any) -> StagePlan:
    run = minimal_run(slurm={"defaults": {"nodes": 4, "time": "1:00:00"}}, **sections)
    return planned(directory, run, [stage], overrides).stages[stage]


def messages(directory: Path, stage: str, *overrides: str, **sections: Any) -> str:
    with pytest.raises(ConfigErrors) as error:
        stage_plan(directory, stage, *overrides, **sections)
    return "\n".join(error.value.messages)


def test_the_job_continues_the_prompts_with_the_checkpoints_of_the_run(tmp_path: Path) -> None:
    tokenizer = {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": "<end>"}
    generation = PROMPTS | {"temperature": 0.5, "top_k": 40, "stop": ["a b"], "precision": "bf16"}
    stage = stage_plan(
        tmp_path,
        "generate",
        "parallelism.tensor_model_parallel_size=2",
        "slurm.generate.ntasks_per_node=4",
        generation=generation,
        data={"tokenizer": tokenizer, "mock": True},
    )
    assert stage.arguments == (
        *("-m", "trainer.inference", "/runs/mini/checkpoints", f"--prompts={tmp_path}/prompts.jsonl"),
        *("--output=/runs/mini/generation/prompts.jsonl", f"--tokenizer={tmp_path}/tokenizer.json"),
        *("--eod-token=<end>", "--device=cpu", "--tensor-model-parallel-size=2"),
        *("--temperature=0.5", "--top-k=40", "--precision=bf16", "--stop=a b"),
    )
    assert stage.inputs == (f"{tmp_path}/prompts.jsonl", f"{tmp_path}/tokenizer.json")
    assert stage.allocation.nodes == 1  # slurm.defaults.nodes is for training
    assert (
        stage_plan(tmp_path, "generate", "slurm.generate.nodes=2", generation=PROMPTS).allocation.nodes == 2
    )


def test_mistakes_are_found_before_the_job_starts(tmp_path: Path) -> None:
    assert "generation.prompts is missing" in messages(tmp_path, "generate")
    found = messages(tmp_path, "generate", generation=PROMPTS | {"top_p": 0.5})
    assert "generation.top_p" in found
    assert "has no effect at temperature 0" in found
    layout = ("slurm.generate.ntasks_per_node=3", "generation.tensor_model_parallel_size=2")
    found = messages(tmp_path, "generate", *layout, generation=PROMPTS)
    assert "results in TP x PP = 2 x 1 = 2, which does not divide the 3 ranks of the job" in found
    assert "export.directory is missing" in messages(tmp_path, "export")


def test_the_newest_checkpoint_is_exported_with_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    stage = stage_plan(tmp_path, "export", export={"directory": "model", "dtype": "bf16"})
    assert stage.arguments == (
        *("-m", "trainer.huggingface", "export", "/runs/mini/checkpoints", f"--to={tmp_path}/model"),
        *("--dtype=bf16", "--tokenizer=gpt2"),
    )
    assert stage.allocation.nodes == 1
    bytes_run = {"tokenizer": {"kind": "bytes"}, "mock": True}
    stage = stage_plan(tmp_path, "export", export={"directory": "model"}, data=bytes_run)
    assert not any(argument.startswith("--tokenizer") for argument in stage.arguments)
