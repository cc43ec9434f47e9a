"""Run files and cluster profiles as the tests need them: written to a folder, loaded, planned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan
from hpcgen.config.loader import Run
from hpcgen.errors import FileErrors, Problem
from hpcgen.run_plan.plan import Plan
from hpcgen.stages import STAGES

MODEL_STAGES = tuple(name for name, stage in STAGES.items() if not stage.runs_user_program)
"""Stages that a run file with a model can have."""
SHAPE = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 128}


def minimal_run(**sections: Any) -> dict[str, Any]:
    """A run of a tiny model on this machine that breaks no rule; `sections` replace its own."""
    return {
        "name": "mini",
        "cluster": "local",
        "paths": {"run_dir": "/runs/mini"},
        "model": SHAPE,
        "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 10, "precision": "fp32"},
        "optimizer": {"lr": 1e-3},
        "data": {"mock": True},
        **sections,
    }


def big_run(**sections: Any) -> dict[str, Any]:
    """GPT-3 175B on 16 NDv5 nodes; `sections` replace its own."""
    return {
        "name": "big",
        "cluster": "azure-ndv5",
        "preset": "175b",
        "paths": {"run_dir": "/shared/runs/big"},
        "container": {"image": "/shared/images/gpt.sqsh"},
        "slurm": {"train": {"nodes": 16, "time": "1-00:00:00"}},
        "data": {"datasets": [{"prefix": "/shared/data/pile"}]},
        "checkpoint": {"keep_last": 5},
        **sections,
    }


def write_yaml(path: Path, values: Mapping[str, Any]) -> Path:
    """The values as YAML (JSON is YAML)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
    return path


def loaded(directory: Path, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> Run:
    """The run file of these values, written into `directory` and loaded."""
    return load_run(write_yaml(directory / "run.yaml", values), overrides)


def refused(directory: Path, values: Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[Problem, ...]:
    """The mistakes in keys and values for which the run file of these values is refused."""
    with pytest.raises(FileErrors) as error:
        loaded(directory, values, overrides)
    return error.value.mistakes


def planned(
    directory: Path,
    values: Mapping[str, Any],
    stages: Sequence[str] = ("train",),
    overrides: Sequence[str] = (),
) -> Plan:
    """The plan of a run whose data files are all there."""
    return plan(loaded(directory, values, overrides), stages, exists=lambda path: True)
