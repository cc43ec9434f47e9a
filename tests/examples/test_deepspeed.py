"""examples/deepspeed: every run file renders, and the programs train, resume and change the world size on the CPU."""

from __future__ import annotations

import json
import math
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hpcgen.api import plan, render
from hpcgen.config.loader import load_run
from tests.examples.deepspeed import (
    EXAMPLES,
    copy_checkpoints,
    needs_deepspeed,
    pretrain,
    run_python,
    run_ranks,
)
from tests.examples.exports import export_pair

RUN_FILES = sorted(EXAMPLES.glob("*.yaml"))
MAKE_MODEL = """\
import json, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
torch.manual_seed(1)
AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1])).save_pretrained(sys.argv[2])
"""
CASES = {
    "zero2": {"stage": 2},
    "zero2-offload": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero3": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


@pytest.mark.process
@pytest.mark.parametrize("path", RUN_FILES, ids=lambda path: path.stem)
def test_every_run_file_renders(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES)
    run = load_run(path)
    script = render(plan(run, ["run"]), "run")
    assert f"--job-name=ds-{path.stem.replace('_', '-')}" in script
    assert '"zero_optimization": {"stage": ' in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_pretraining_files_differ_only_in_what_their_names_say() -> None:
    """Everything but the model, the batch and ZeRO's settings is the same."""
    texts = {}
    for path in EXAMPLES.glob("zero*.yaml"):
        name = path.stem
        text = path.read_text().replace(name, "NAME").replace(name.replace("_", "-"), "NAME")
        body = text[text.index("# ") :].partition("\n")[2].partition("      zero_optimization:")[0]
        skipped = (
            "  run: {",
            "--model",
            "model:",
            "--seq-length",
            "--checkpoints",
            "--activation",
            "train_micro",
        )
        texts[name] = [line for line in body.splitlines() if not any(word in line for word in skipped)]
    assert len(texts) == 6
    assert all(lines == texts["zero1"] for lines in texts.values())


# ==== the programs; these need DEEPSPEED_PYTHON ====


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens, and a tiny GPT-2 with random weights."""
    folder = tmp_path_factory.mktemp("deepspeed")
    text = b"".join(path.read_bytes() for path in sorted(EXAMPLES.glob("*.py")))
    np.frombuffer(text, np.uint8).astype("<u2").tofile(folder / "tokens.bin")
    (folder / "tokens.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, 1, 2) + bytes(32))
    done = run_python("-c", MAKE_MODEL, "models/gpt2-tiny.json", folder / "model")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def uninterrupted(folder: Path) -> dict[int, float]:
    """Losses of ZeRO-1 on two ranks."""
    return pretrain(folder, "zero1", {"stage": 1}, 8)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("name", CASES)
def test_every_stage_resumes_on_the_curve_of_zero1(
    name: str, folder: Path, uninterrupted: dict[int, float]
) -> None:
    first = pretrain(folder, name, CASES[name], 4)
    second = pretrain(folder, name, CASES[name], 8)
    assert (list(first), list(second)) == ([1, 2, 3, 4], [5, 6, 7, 8])
    tolerance = 1e-4 if name == "zero3" else 2e-6
    assert first | second == pytest.approx(uninterrupted, abs=tolerance)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_universal_checkpoint_continues_the_curve_on_other_ranks(
    stage: int, before: int, after: int, folder: Path, uninterrupted: dict[int, float]
) -> None:
    name, zero = f"universal-{stage}-{before}", {"stage": stage}
    pretrain(folder, name, zero, 4, before, gradient_accumulation_steps=4 // before)
    target = copy_checkpoints(folder, name, f"{name}-{after}")
    convert = ["-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
    done = run_python(*convert, f"--input_folder={target / '4'}", f"--output_folder={target / '4_universal'}")
    assert done.returncode == 0, done.stderr
    found = pretrain(folder, target.name, zero, 8, after, gradient_accumulation_steps=4 // after)
    expected = {step: uninterrupted[step] for step in (5, 6, 7, 8)}
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("model", ["gpt2-tiny", "llama-tiny"])
def test_zero3_initializes_the_weights_of_a_new_model(model: str, folder: Path) -> None:
    config = folder / "new.json"
    text = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 3}}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    config.write_text(json.dumps(text | {"optimizer": optimizer}))
    output = run_ranks(
        2,
        folder / f"new-{model}",
        *("pretrain.py", f"--deepspeed_config={config}", f"--model=models/{model}.json", "--seq-length=64"),
        *(f"--data={folder / 'tokens'}", "--steps=1", f"--checkpoints={folder / 'new' / model}"),
    )
    loss = float(output.partition("loss ")[2].partition(",")[0])
    assert loss == pytest.approx(math.log(257), abs=0.3)


@pytest.mark.slow
@needs_deepspeed
def test_weights_that_were_not_initialized_are_noticed() -> None:
    done = run_python("-c", "import pretrain; pretrain.check_first_loss(41.0, 257)")
    assert done.returncode == 1
    assert "the first loss is 41.00, but a new model with 257 tokens starts near 5.55" in done.stderr
    assert run_python("-c", "import pretrain; pretrain.check_first_loss(5.6, 257)").returncode == 0


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize(("stage", "options"), [(3, ()), (2, ("--lora-rank=4",))], ids=["sft", "lora"])
def test_fine_tuning_lowers_the_loss_and_resumes(
    stage: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    assert run_python("tiny_chat_model.py", tmp_path).returncode == 0
    export_pair(tmp_path / "conversations.jsonl", tmp_path / "model", tmp_path, "--chat")
    config = tmp_path / "config.json"
    automatic = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": stage == 3}
    optimizer = {"lr": "auto", "weight_decay": "auto", "torch_adam": True}
    config.write_text(
        json.dumps(
            dict.fromkeys(automatic, "auto")
            | {"zero_optimization": zero, "optimizer": {"type": "AdamW", "params": optimizer}}
        )
    )
    command = [
        *("sft.py", f"--deepspeed_config={config}", f"--model={tmp_path / 'model'}", "--fp32", "--lr=1e-2"),
        *(f"--data={tmp_path / 'export'}", f"--directory={tmp_path / 'out'}"),
        *("--micro-batch-size=4", "--max-length=128", "--save-every=6", *options),
    ]
    first = run_ranks(2, tmp_path / "first", *command, "--steps=6")
    (tmp_path / "out/done").unlink()
    second = run_ranks(2, tmp_path / "second", *command, "--steps=12")
    assert (tmp_path / "out/checkpoints/checkpoint-12/trainer_state.json").exists()
    weights = "adapter_model.safetensors" if options else "model.safetensors"
    assert (tmp_path / "out/model" / weights).stat().st_size > 10_000
    assert (tmp_path / "out/done").exists()
    found = [fine_tuning_losses(text) for text in (first, second)]
    assert [len(each) for each in found] == [6, 6]
    assert found[1][-1] < found[0][0] - 0.3


def fine_tuning_losses(output: str) -> list[float]:
    """The losses that transformers printed."""
    return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
