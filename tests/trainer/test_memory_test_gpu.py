"""The memory test on a real GPU (make test-gpu): what it measures, and a stage that does not fit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.runs import LLAMA, MOE, finished, gpt_config, write_corpus
from tests.trainer.test_memory_test import EP2, PP2, configuration, run_test

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU = {"device": "cuda"}
LARGE = {"hidden_size": 1024, "num_attention_heads": 8, "seq_length": 1024}


def stages_of(path: Path) -> list[dict[str, Any]]:
    return json.loads((path.parent / "run/memory-test.json").read_text())["stages"]


def test_one_rank_allocates_what_its_training_does(tmp_path: Path) -> None:
    document = (
        gpt_config(write_corpus(tmp_path / "corpus", documents=400), tmp_path / "training", LLAMA | LARGE)
        | ON_GPU
    )
    document["training"] |= {"precision": "bf16", "train_iters": 3}
    trained = finished(document)
    peak = max(event["peak_memory_gib"] for event in trained.events if event["event"] == "step")
    path = configuration(tmp_path, LLAMA | LARGE, {}, training={"precision": "bf16"}, **ON_GPU, world_size=1)
    done = run_test(path, sys.executable)
    assert done.returncode == 0, done.stderr
    (stage,) = stages_of(path)
    assert stage["allocated_gib"] == pytest.approx(peak, rel=0.02)
    assert stage["allocated_gib"] < stage["in_use_gib"] < stage["device_gib"]


@pytest.mark.parametrize("training", [{}, {"fp8": "hybrid"}], ids=["bf16", "fp8"])
def test_every_stage_is_measured(training: dict[str, Any], tmp_path: Path) -> None:
    training = {"precision": "bf16", **training}
    path = configuration(tmp_path, MOE | LARGE, PP2 | EP2, training=training, **ON_GPU)
    done = run_test(path, sys.executable)
    assert done.returncode == 0, done.stderr
    assert all(0 < stage["allocated_gib"] < stage["in_use_gib"] for stage in stages_of(path))


def test_a_stage_that_does_not_fit_says_so(tmp_path: Path) -> None:
    path = configuration(tmp_path, LLAMA | {"num_layers": 8, "hidden_size": 65_536}, PP2, **ON_GPU)
    done = run_test(path, sys.executable)
    assert done.returncode == 1
    assert all("does not fit" in stage["error"] for stage in stages_of(path))
