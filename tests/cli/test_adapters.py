"""What the commands say about runs with LoRA adapters and their checkpoints, before a job queues."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hpcgen import load_run, plan
from tests.cli.command import Ended, hpcgen
from tests.recorded_run import write_checkpoint
from tests.runs import minimal_run, write_yaml
from trainer.contract.files import checkpoint_files
from trainer.contract.resuming import base_model
from trainer.contract.resuming.hyperparameters import sections

LORA = {"rank": 4, "target_modules": ["linear_qkv"]}


def run_file(workplace: Path, **values: Any) -> Path:
    """A run of 20 steps."""
    training = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 20, "precision": "fp32"}
    return write_yaml(
        workplace / "run.yaml", minimal_run(paths={"run_dir": "run"}, training=training, **values)
    )


@pytest.fixture
def base(workplace: Path) -> Path:
    """The checkpoint of a complete model."""
    trainer = plan(load_run(run_file(workplace))).trainer
    assert trainer is not None
    return write_checkpoint(workplace / "base", 5, **sections(trainer))


@pytest.fixture
def adapters(workplace: Path, base: Path) -> Path:
    """A checkpoint with adapters of this model."""
    values = {"lora": LORA, "checkpoint": {"load": "base", "finetune": True}}
    trainer = plan(load_run(run_file(workplace, **values))).trainer
    assert trainer is not None
    origin = base_model.entry(checkpoint_files.describe(base))
    return write_checkpoint(workplace / "adapters", 10, **sections(trainer), origins={"base": origin})


def validated(workplace: Path, load: str, *, finetune: bool, lora: dict[str, Any] | None) -> Ended:
    values = {"checkpoint": {"load": load, "finetune": finetune}, **({"lora": lora} if lora else {})}
    return hpcgen("validate", "-c", run_file(workplace, **values))


def test_adapters_start_from_a_model_and_from_adapters(workplace: Path, adapters: Path) -> None:
    new = validated(workplace, "base", finetune=True, lora=LORA)
    assert new.status == 0, new.stderr
    assert re.search(r"parameters .* frozen, and [0-9,]+ of adapters", new.stdout)
    for finetune in (True, False):
        assert validated(workplace, "adapters", finetune=finetune, lora=LORA).status == 0


def test_what_does_not_fit_is_refused_before_the_queue(workplace: Path, adapters: Path) -> None:
    refused = {
        "checkpoint.finetune = false is false, but": ("base", False, LORA),
        "lora.rank is null, but": ("adapters", True, None),
        "lora.alpha = 2.0 differs from 4, with which": ("adapters", True, {**LORA, "alpha": 2.0}),
        "lora.rank = 8 differs from 4 in the checkpoint": ("adapters", False, {**LORA, "rank": 8}),
    }
    for message, (load, finetune, lora) in refused.items():
        found = validated(workplace, load, finetune=finetune, lora=lora)
        assert found.status == 2
        assert message in found.stderr


def test_a_model_that_is_gone_or_has_moved_is_noticed(workplace: Path, base: Path, adapters: Path) -> None:
    base.parent.rename(workplace / "elsewhere")
    found = validated(workplace, "adapters", finetune=False, lora=LORA)
    assert found.status == 2
    assert f"the adapters were trained on {base}" in found.stderr
    assert "is missing" in found.stderr
    record = checkpoint_files.read_record(adapters)
    assert base_model.find(record, str(workplace / "elsewhere")).path.parent == workplace / "elsewhere"


def test_inspect_names_the_model_of_adapters(base: Path, adapters: Path) -> None:
    found = hpcgen("checkpoint", "inspect", adapters)
    assert f"rank 4, alpha 4.0, target_modules [linear_qkv], of {base}" in found.stdout


def test_jobs_that_read_adapters_mount_their_model(workplace: Path, base: Path, adapters: Path) -> None:
    """The adapters that a run starts from may be elsewhere."""
    (workplace / "prompts.jsonl").write_text('{"prompt": "a"}')
    export = {"directory": "peft", "adapter": True}
    values = {"lora": LORA, "checkpoint": {"load": "adapters", "finetune": True}, "export": export}
    run = load_run(run_file(workplace, generation={"prompts": "prompts.jsonl"}, **values))
    for name in ("train", "generate", "export"):
        stage = plan(run, [name]).stages[name]
        assert {str(base.parent), str(adapters.parent)} <= set(stage.required), name
    assert stage.arguments[-1] == "--adapter"


def test_adapters_of_a_run_without_lora_cannot_be_exported(workplace: Path) -> None:
    file = run_file(workplace, export={"directory": "peft", "adapter": True})
    refused = hpcgen("render", "export", "-c", file)
    assert refused.status == 2
    assert "export.adapter = true has no effect, because lora.rank is null" in refused.stderr
