"""Exports of trained checkpoints with latent attention and MTP layers, and DeepSeek's own layout of MTP layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from hpcgen.config.presets import PRESETS
from tests.trainer.huggingface.models import assert_same_weights, weights
from tests.trainer.runs import DEEPSEEK_V3, finished, gpt_config
from trainer.contract.config import ConfigError, ModelConfig, from_dict
from trainer.contract.config.resolve import resolve_model
from trainer.contract.errors import TrainerError
from trainer.contract.families.huggingface import config_of, family_for
from trainer.huggingface.exporting import Options, export
from trainer.huggingface.importing import import_model
from trainer.huggingface.source import read_source

pytestmark = pytest.mark.process


def ignore(line: str) -> None:
    """Discards a progress line."""


@pytest.fixture(scope="module")
def trained(corpus: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that 2 ranks trained at TP 2 and EP 2."""
    config = gpt_config(corpus, tmp_path_factory.mktemp("trained"), DEEPSEEK_V3)
    config["parallelism"] = {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    }
    config["world_size"] = 2
    config["training"]["train_iters"] = 3  # an odd number, after which no expert's bias is zero
    return finished(config).checkpoints / "iter_0000003"


@pytest.fixture(scope="module")
def exported(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its export, whose logits were compared with those of transformers."""
    directory = tmp_path_factory.mktemp("export") / "model"
    lines: list[str] = []
    export(trained, directory, Options(check=True), lines.append)
    assert any(line.startswith("checked: the logits of 4 prompts differ") for line in lines)
    return directory


def test_a_trained_model_is_exported_with_its_mtp_layers(exported: Path, tmp_path: Path) -> None:
    assert json.loads((exported / "config.json").read_bytes())["num_nextn_predict_layers"] == 2
    tensors = weights(exported)
    assert tensors["model.layers.3.eh_proj.weight"].shape == (64, 128)
    assert tensors["model.layers.3.mlp.experts.3.gate_proj.weight"].shape == (32, 64)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].abs().max() >= 0.05
    import_model(exported, tmp_path / "imported", ignore)
    checkpoint = tmp_path / "imported" / "iter_0000000"
    assert read_source(checkpoint).model.mtp_num_layers == 2
    export(checkpoint, tmp_path / "again", Options(), ignore)
    assert_same_weights(tmp_path / "again", exported)


@pytest.mark.slow  # importing, and ../test_deepseek.py fine-tunes
def test_training_starts_from_imported_mtp_layers(exported: Path, corpus: str, tmp_path: Path) -> None:
    import_model(exported, tmp_path / "imported", ignore)
    config = gpt_config(corpus, tmp_path / "run", DEEPSEEK_V3)
    config["training"]["train_iters"] = 1
    config["optimizer"]["lr_warmup_iters"] = 0
    fresh = finished(config)
    config |= {"run_dir": str(tmp_path / "tuned")}
    config["checkpoint"] = {"load": str(tmp_path / "imported"), "finetune": True}
    tuned = finished(config)
    for key in ("loss", "mtp_1_loss", "mtp_2_loss"):
        assert _first_step(tuned.directory)[key] < _first_step(fresh.directory)[key] - 0.05


def _first_step(directory: Path) -> dict[str, float]:
    events = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return next(event for event in events if event["event"] == "step")


@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
def test_deepseeks_copies_of_the_embedding_are_ignored_if_they_are_copies(
    is_same: bool, exported: Path, tmp_path: Path
) -> None:
    tensors = load_file(exported / "model.safetensors")
    copy = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.2.embed_tokens.weight"] = copy if is_same else copy + 1
    directory = tmp_path / "original"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_bytes((exported / "config.json").read_bytes())
    if is_same:
        import_model(directory, tmp_path / "imported", ignore)
        return
    with pytest.raises(TrainerError, match=r"layers\.2\.embed_tokens\.weight differs from model"):
        import_model(directory, tmp_path / "imported", ignore)


def test_another_epsilon_is_refused(exported: Path, tmp_path: Path) -> None:
    """transformers has a fixed epsilon in the norms of the latents."""
    config = json.loads((exported / "config.json").read_bytes()) | {"rms_norm_eps": 1e-5}
    tensors = {name: torch.clone(tensor) for name, tensor in weights(exported).items()}
    directory = tmp_path / "original"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(TrainerError, match=r"rms_norm_eps = 1e-05 \(it needs 1e-06\)"):
        import_model(directory, tmp_path / "imported", ignore)


def test_a_single_expert_per_token_is_refused() -> None:
    """Its weight would always be 1 in transformers."""
    model = resolve_model(from_dict(ModelConfig, DEEPSEEK_V3 | {"moe_router_topk": 1}, "test"))
    with pytest.raises(ConfigError, match="moe_router_topk = 1 "):
        family_for(model, "deepseek_v3")


def test_the_preset_has_the_published_shape() -> None:
    """The defaults of transformers are those of the published config.json."""
    sections = PRESETS["deepseek-v3"].sections
    model = resolve_model(from_dict(ModelConfig, sections["model"], "the preset"))
    ours = config_of(family_for(model), model, "bfloat16")
    published = transformers.DeepseekV3Config().to_dict()
    names = ours.keys() & published.keys() - {"architectures", "dtype", "initializer_range"}
    assert len(names) > 25
    assert {name: ours[name] for name in names} == {name: published[name] for name in names}
