"""Training of adapters: at every layout, with a frozen base model, resumed and started from other checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.trainer.runs import LLAMA, MOE, Run, finished, gpt_config, run
from tests.trainer.tensors import assert_predicted_size, load_all
from trainer.contract.files.checkpoint_files import read_record, record_text
from trainer.inference.checkpoint import find_checkpoint, inference_config
from trainer.inference.loading import load_part
from trainer.lora.adapter import is_adapter

pytestmark = pytest.mark.process

TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
SP = {"sequence_parallel": True}
SLOW = pytest.mark.slow


def lora_config(
    corpus: str, run_dir: Path, base: Run, model: dict[str, Any] = LLAMA, **lora: Any
) -> dict[str, Any]:
    """Six steps of adapters of the model in the run `base`."""
    config = gpt_config(corpus, run_dir, model)
    config["lora"] = {"rank": 4, "alpha": 8.0, **lora}
    config["checkpoint"] = {"load": str(base.checkpoints), "finetune": True}
    return config


@pytest.fixture(scope="module")
def single_lora(corpus: str, single_llama: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An uninterrupted run of one process."""
    config = lora_config(corpus, tmp_path_factory.mktemp("lora"), single_llama)
    config["checkpoint"]["save_interval"] = 3
    return finished(config)


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        pytest.param(TP2 | PP2 | SP, 4, id="TP2xPP2+SP", marks=SLOW),
        pytest.param(TP2, 2, id="TP2", marks=SLOW),
        pytest.param({"context_parallel_size": 2}, 2, id="CP2", marks=SLOW),
        pytest.param({"overlap_grad_reduce": True, "overlap_param_gather": True}, 2, id="DP2"),
        pytest.param(PP2 | {"virtual_pipeline_model_parallel_size": 2}, 2, id="VPP2"),
    ],
)
def test_adapters_train_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, corpus: str, single_llama: Run, single_lora: Run, tmp_path: Path
) -> None:
    config = lora_config(corpus, tmp_path, single_llama)
    config |= {"parallelism": layout, "world_size": world_size}
    if world_size == 4:
        config["training"]["micro_batch_size"] = 1
    ended = run(config)
    assert set(ended.statuses) == {0}, ended.log
    numpy.testing.assert_allclose(ended.steps, single_lora.steps, rtol=0, atol=1e-5)


def test_a_resume_at_another_layout_continues_exactly(
    corpus: str, single_llama: Run, single_lora: Run, tmp_path: Path
) -> None:
    """The adapters and their moments come from the checkpoint, and the other weights from the base model."""
    checkpoints = tmp_path / "checkpoints"
    shutil.copytree(single_lora.checkpoints / "iter_0000003", checkpoints / "iter_0000003")
    config = lora_config(corpus, tmp_path, single_llama)
    config |= {"parallelism": TP2 | SP, "world_size": 2}
    config["training"] |= {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    resumed = finished(config)
    assert [step[0] for step in resumed.steps] == [4, 5, 6]
    numpy.testing.assert_allclose(resumed.steps, single_lora.steps[3:], rtol=0, atol=1e-5)
    (checkpoints / "iter_0000006").rename(tmp_path / "away")
    record = json.loads((checkpoints / "iter_0000003/COMPLETE").read_text())
    assert record["origins"]["base"]["path"] == str(single_llama.checkpoints / "iter_0000006")
    names = load_all(tmp_path / "away").keys()
    assert "decoder.layers.3.self_attention.linear_qkv.adapter.k.lora_B" in names
    assert not [name for name in names if "adapter" not in name]


def test_adapters_of_another_run_are_continued_or_started_from(
    corpus: str, single_llama: Run, single_lora: Run, tmp_path: Path
) -> None:
    config = lora_config(corpus, tmp_path / "continued", single_llama)
    config["checkpoint"] = {"load": str(single_lora.checkpoints / "iter_0000003")}
    assert finished(config).steps == single_lora.steps[3:]
    config["run_dir"] = str(tmp_path / "started")
    config["checkpoint"]["finetune"] = True
    started = finished(config)
    assert_predicted_size(started.directory, 6)
    assert started.steps[0][0] == 1
    assert started.steps[0][1] < single_lora.steps[0][1]


@pytest.mark.parametrize(
    "change",
    [
        "other base",
        "other base named",
        "complete run",
        "no adapters",
        pytest.param("no finetune", marks=SLOW),
        pytest.param("other rank", marks=SLOW),
        "other alpha",
    ],
)
def test_what_does_not_fit_is_refused(
    change: str, corpus: str, single_llama: Run, single_lora: Run, tmp_path: Path
) -> None:
    config = lora_config(corpus, tmp_path, single_llama)
    match change:
        case "other base":
            base = tmp_path / "moved"
            shutil.copytree(single_lora.checkpoints / "iter_0000003", tmp_path / "checkpoints/iter_0000003")
            rewrite_base(tmp_path / "checkpoints/iter_0000003", str(base / "iter_0000006"))
            config["checkpoint"] |= {"load": str(single_lora.checkpoints / "iter_0000003")}
            expected = f"trained on {base}/iter_0000006 (SHA-256"
        case "other base named":
            shutil.copytree(single_lora.checkpoints / "iter_0000003", tmp_path / "checkpoints/iter_0000003")
            other = shutil.copytree(
                single_llama.checkpoints / "iter_0000006", tmp_path / "other/iter_0000006"
            )
            rewrite_hash(other)
            config["checkpoint"]["load"] = str(other)
            expected = f"checkpoint.load names {other}, another model. Set it to {single_llama.checkpoints}"
        case "complete run":
            shutil.copytree(single_llama.checkpoints / "iter_0000006", tmp_path / "checkpoints/iter_0000006")
            expected = "lora.rank needs new adapters, but the run has trained all weights: "
        case "no adapters":
            del config["lora"]
            config["checkpoint"]["load"] = str(single_lora.checkpoints)
            expected = "lora.rank is null, but"
        case "no finetune":
            config["checkpoint"]["finetune"] = False
            expected = "checkpoint.finetune is false, but"
        case "other alpha":
            config["lora"]["alpha"] = 4.0
            config["checkpoint"]["load"] = str(single_lora.checkpoints)
            expected = "lora.alpha differs from 8, with which the adapters in"
        case _:
            config["lora"]["rank"] = 8
            config["checkpoint"]["load"] = str(single_lora.checkpoints)
            expected = "the checkpoint has other adapters: lora.rank"
    ended = run(config)
    assert ended.statuses == (2,), ended.log
    assert expected in ended.log
    assert "Traceback" not in ended.log


def rewrite_hash(checkpoint: Path) -> None:
    """Let the record describe other files."""
    record = read_record(checkpoint)
    next(iter(record["files"].values()))["sha256"] = "0" * 64
    (checkpoint / "COMPLETE").write_text(record_text(record))


def rewrite_base(checkpoint: Path, path: str) -> None:
    """Let the record name another path of the base model."""
    record = read_record(checkpoint)
    record["origins"]["base"]["path"] = path
    (checkpoint / "COMPLETE").write_text(record_text(record))


@pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults
def test_inference_reads_the_model_and_its_adapters(
    single_llama: Run, single_lora: Run, process_groups: Any
) -> None:
    tokens, models = list(range(1, 40)), []
    for run_of_model in (single_llama, single_lora):
        found = find_checkpoint(run_of_model.directory)
        config = inference_config(found, device="cpu", precision=None)
        models.append(load_part(found, config, process_groups))
    complete, adapted = (model.logits(tokens) for model in models)
    assert not torch.allclose(complete, adapted, atol=1e-3)
    base = {name: value for name, value in models[0].module.state_dict().items() if torch.is_tensor(value)}
    for name, value in models[1].module.state_dict().items():
        if torch.is_tensor(value) and not is_adapter(name):
            assert torch.equal(value, base[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ({"expert_model_parallel_size": 2}, 2),
        (TP2 | SP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}, 4),
        (PP2 | {"expert_model_parallel_size": 2}, 4),
    ],
    ids=["EP2", "TP2+SP+EP2", "PP2xEP2"],
)
def test_adapters_of_experts_train_alike_at_every_layout(
    layout: dict[str, Any], world_size: int, corpus: str, tmp_path: Path
) -> None:
    base = finished(gpt_config(corpus, tmp_path / "base", MOE))
    alone, together = (lora_config(corpus, tmp_path / name, base, MOE) for name in ("alone", "together"))
    together |= {"parallelism": layout, "world_size": world_size}
    for config in (alone, together):
        config["training"]["micro_batch_size"] = 1
    numpy.testing.assert_allclose(finished(together).steps, finished(alone).steps, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_a_stage_without_adapters_trains(corpus: str, single_llama: Run, tmp_path: Path) -> None:
    """Adapters of the last layer alone, with frozen stages before it."""
    alone, together = (
        lora_config(corpus, tmp_path / name, single_llama, target_modules=["decoder.layers.3.*"], dropout=0.0)
        for name in ("alone", "together")
    )
    together |= {"parallelism": PP2 | {"virtual_pipeline_model_parallel_size": 2}, "world_size": 2}
    together["checkpoint"]["save_interval"] = 3
    ended = finished(together)
    numpy.testing.assert_allclose(ended.steps, finished(alone).steps, rtol=0, atol=1e-5)
    together["checkpoint"] = {"load": str(ended.checkpoints / "iter_0000003")}
    together["run_dir"] = str(tmp_path / "resumed")
    numpy.testing.assert_allclose(finished(together).steps, ended.steps[3:], rtol=0, atol=1e-6)


def test_a_stage_without_adapters_resumes(corpus: str, single_llama: Run, tmp_path: Path) -> None:
    """The checkpoint has nothing for the last stage."""
    config = lora_config(corpus, tmp_path / "alone", single_llama, target_modules=["decoder.layers.[01].*"])
    config["checkpoint"]["save_interval"] = 3
    alone = finished(config)
    config |= {"parallelism": PP2, "world_size": 2, "run_dir": str(tmp_path / "resumed")}
    config["checkpoint"] = {"load": str(alone.checkpoints / "iter_0000003")}
    numpy.testing.assert_allclose(finished(config).steps, alone.steps[3:], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_resumes_exactly(precision: str, corpus: str, tmp_path: Path) -> None:
    full = gpt_config(corpus, tmp_path / "base", LLAMA)
    full["training"] |= {"precision": precision, "train_iters": 2}
    scale = {"initial_loss_scale": 1024.0} if precision == "fp16" else {}
    full["optimizer"] |= scale
    base = finished(full)
    config = lora_config(corpus, tmp_path / "lora", base, dropout=0.1)
    config["training"]["precision"] = precision
    config["optimizer"] |= scale
    config["checkpoint"]["save_interval"] = 3
    ended = finished(config)
    config["checkpoint"] = {"load": str(ended.checkpoints / "iter_0000003")}
    config["run_dir"] = str(tmp_path / "resumed")
    assert finished(config).steps == ended.steps[3:]
