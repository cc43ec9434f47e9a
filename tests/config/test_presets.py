"""Presets: they fit the configuration's classes and obey the rules, and they are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import hpcgen
from hpcgen.config import document
from hpcgen.config.presets import PRESETS, Preset, PresetConfig
from hpcgen.config.validation import build
from hpcgen.errors import HpcgenError
from hpcgen.planning.repairs import check
from hpcgen.resources import shipped
from tests.cli import command
from tests.runs import loaded, minimal_run, refused, write_yaml
from trainer.contract.config import (
    BlendConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
    from_dict,
)
from trainer.contract.model.layout import fewest_ranks
from trainer.contract.model.model_size import parameter_count
from trainer.contract.rules.facts import Facts, World


def facts(preset: Preset, world_size: int | None = None, device_memory_gib: float | None = None) -> Facts:
    """The preset with GPT-2's vocabulary where it has none, on `world_size` ranks, or on as few as it can."""
    model = {"vocab_size": 50257, **preset.sections["model"]}
    parallelism = from_dict(ParallelismConfig, preset.sections["parallelism"], preset.name)
    return Facts(
        model=from_dict(ModelConfig, model, preset.name),
        parallelism=parallelism,
        training=from_dict(TrainingConfig, preset.sections["training"], preset.name),
        optimizer=from_dict(OptimizerConfig, preset.sections["optimizer"], preset.name),
        data=BlendConfig(mock=True),
        world=World(path="ranks", count=world_size or fewest_ranks(parallelism), ranks_each=1),
        gpus_per_node=8,
        device_memory_gib=device_memory_gib,
    )


CONTEXT_OVER_THE_NETWORK = {"llama3-405b": ["parallelism.context_parallel_size"]}
"""Warnings of presets that no plan with a prediction has."""


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_a_preset_obeys_the_rules_on_its_fewest_ranks(preset):
    errors, warnings = check(facts(preset))
    assert errors == []
    assert [warning.path for warning in warnings] == CONTEXT_OVER_THE_NETWORK.get(preset.name, [])


@pytest.mark.parametrize(
    ("name", "world_size"),
    [
        ("125m", 8),
        ("345m", 8),
        ("1.3b", 8),
        ("13b", 8),
        ("30b", 16),
        ("175b", 128),
        ("llama3-8b", 8),
        ("llama3-70b", 128),
        ("llama3-405b", 896),
        ("deepseek-v3", 640),
        ("mixtral-8x7b", 64),
    ],
)
def test_a_preset_fits_gpus_of_80_gb_without_a_warning(name, world_size):
    errors, warnings = check(facts(PRESETS[name], world_size, device_memory_gib=79.6))
    assert errors == []
    assert [warning.path for warning in warnings] == CONTEXT_OVER_THE_NETWORK.get(name, [])


def test_deepseek_v3_leaves_little_on_64_nodes_of_h100s():
    """Its groups of experts exchange tokens with seven peers in each node."""
    errors, [warning] = check(facts(PRESETS["deepseek-v3"], 512, device_memory_gib=79.6))
    assert errors == []
    assert "leaves 5.4 GiB (6.8%) on a device" in str(warning)


def test_deepseek_v3_fits_16_nodes_of_h200s():
    assert check(facts(PRESETS["deepseek-v3"], 128, device_memory_gib=140.4)) == ([], [])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("tiny", 0.00725),
        ("tiny-moe", 0.00882),
        ("125m", 0.124),
        ("345m", 0.356),
        ("375m", 0.064),
        ("857m", 0.356),
        ("1.3b", 1.316),
        ("13b", 12.9),
        ("30b", 30.0),
        ("175b", 174.6),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.55),
        ("llama3-405b", 405.9),
        ("mixtral-8x7b", 46.702792704),
        ("deepseek-v3", 671.0 + 11.6),  # with its MTP layer
    ],
)
def test_presets_have_their_real_sizes(name, billions):
    assert parameter_count(facts(PRESETS[name]).resolved_model) / 1e9 == pytest.approx(billions, rel=5e-3)


@pytest.mark.parametrize(
    ("name", "lr", "min_lr", "batch"),
    [
        ("125m", 6e-4, 6e-5, 256),
        ("345m", 3e-4, 3e-5, 256),
        ("857m", 3e-4, 3e-5, 256),
        ("1.3b", 2e-4, 2e-5, 512),
        ("13b", 1e-4, 1e-5, 1024),
        ("175b", 6e-5, 6e-6, 1536),
        ("llama3-405b", 8e-5, 8e-7, 2048),
        ("mixtral-8x7b", 1e-4, 1e-5, 256),
        ("deepseek-v3", 2.2e-4, 2.2e-5, 15360),
    ],
)
def test_published_optimisation_defaults(name, lr, min_lr, batch):
    found = facts(PRESETS[name])
    assert (found.optimizer.lr, found.resolved_optimizer.min_lr) == (lr, min_lr)
    assert found.training.global_batch_size == batch


@pytest.mark.parametrize(
    ("names", "tokens"),
    [
        ("125m 375m 345m 857m 1.3b 13b 30b 175b", 300 * 10**9),
        ("llama3-8b llama3-70b llama3-405b", 15 * 10**12),
        ("deepseek-v3", 14_800 * 10**9),
    ],
)
def test_presets_train_on_the_published_number_of_tokens(names, tokens):
    for name in names.split():
        training, model = (PRESETS[name].sections[section] for section in ("training", "model"))
        assert training["train_iters"] == tokens // (training["global_batch_size"] * model["seq_length"])


def test_gpt3_presets_warm_up_for_375_million_tokens():
    found = facts(PRESETS["175b"])
    tokens_per_iter = 1536 * 2048
    assert found.resolved_optimizer.lr_warmup_iters * tokens_per_iter == pytest.approx(375e6, rel=1e-2)


def test_deepseek_v3_decays_between_10_and_14_3_of_14_8_trillion_tokens():
    found = facts(PRESETS["deepseek-v3"])
    optimizer, tokens_per_iter = found.resolved_optimizer, 15360 * 4096
    end = optimizer.lr_decay_iters
    begin = end - optimizer.lr_wsd_decay_iters
    tokens = [iters * tokens_per_iter / 1e12 for iters in (begin, end, found.training.train_iters)]
    assert tokens == pytest.approx([10, 14.3, 14.8], rel=1e-4)


def test_names_and_descriptions():
    assert list(PRESETS)[:3] == ["125m", "345m", "375m"]
    assert list(PRESETS)[-6:] == [
        "llama3-8b",
        "llama3-70b",
        "llama3-405b",
        "mixtral-8x7b",
        "tiny",
        "tiny-moe",
    ]
    assert list(PRESETS) == [preset.name for preset in PRESETS.values()]
    assert all(preset.description and "\n" not in preset.description for preset in PRESETS.values())


@pytest.mark.parametrize("path", sorted(shipped("presets").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_presets_have_the_keys_of_the_files_that_sites_write(path: Path) -> None:
    assert build(PresetConfig, document.read(path))[1] == ()


MINE = {
    "description": "our model",
    "tokenizer": {"repository": "our/tokenizer", "eod_token": "</s>"},
    "model": {"num_layers": 6, "hidden_size": 96, "num_attention_heads": 3, "seq_length": 128},
    "training": {"micro_batch_size": 2, "global_batch_size": 8, "train_iters": 10, "precision": "fp32"},
    "optimizer": {"lr": 0.002},
    "checkpoint": {"save_interval": 7},
}


@pytest.fixture
def site_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A preset of the site."""
    monkeypatch.setenv("HPCGEN_SITE", str(tmp_path / "site"))
    return write_yaml(tmp_path / "site/presets/ours-7b.yaml", MINE)


def on_preset(**sections: object) -> dict[str, object]:
    run = {
        key: value for key, value in minimal_run().items() if key not in ("model", "training", "optimizer")
    }
    return {**run, "preset": "ours-7b", **sections}


def test_a_preset_of_the_site_is_one_among_the_others(site_preset: Path, tmp_path: Path) -> None:
    run = loaded(tmp_path, on_preset(training={"train_iters": 20}))
    assert (run.config.model.num_layers, run.config.training.train_iters) == (6, 20)
    assert run.config.checkpoint.save_interval == 7
    assert f"\n# preset: {site_preset} sha256 " in hpcgen.render(hpcgen.plan(run), "train")
    rows = {row["name"]: row for row in json.loads(command.hpcgen("presets", "--json").stdout)}
    assert (rows["ours-7b"]["file"], rows["ours-7b"]["lr"]) == (str(site_preset), 0.002)
    assert rows["tiny"]["file"] == "shipped"
    assert command.hpcgen("init", "new.yaml", "--preset", "ours-7b", "--cluster", "local").status == 0
    text = (tmp_path / "new.yaml").read_text()
    assert "# num_layers: 6   # from the preset\n" in text
    assert "hf download our/tokenizer tokenizer.json" in text
    assert command.hpcgen("explain", "-c", "run.yaml").status == 0


def test_the_users_preset_comes_before_the_sites_and_the_shipped_one(
    site_preset: Path, tmp_path: Path
) -> None:
    for name in ("ours-7b", "tiny"):
        write_yaml(tmp_path / f"xdg/hpcgen/presets/{name}.yaml", {**MINE, "description": "mine"})
        assert PRESETS[name].description == "mine"
    assert list(PRESETS).count("tiny") == 1


def test_a_rule_that_a_value_of_the_preset_breaks_names_its_file(site_preset: Path, tmp_path: Path) -> None:
    run = loaded(tmp_path, on_preset(training={"micro_batch_size": 3}))
    named = rf"run.yaml:\d+: training.global_batch_size = 8 \(preset ours-7b \({site_preset}\)\) is not a multiple"
    with pytest.raises(HpcgenError, match=named):
        hpcgen.plan(run)


def test_mistakes_in_a_preset_name_its_lines(site_preset: Path, tmp_path: Path) -> None:
    model = {**MINE["model"], "num_layrs": 6}
    write_yaml(site_preset, {**MINE, "model": model, "environment": {"A": "1"}, "optimizer": {}})
    found = [str(problem) for problem in refused(tmp_path, on_preset())]
    assert f"{site_preset}:12: model.num_layrs = 6 is not a known key; did you mean num_layers?" in found
    assert any("environment" in text and "is not a known key" in text for text in found)
    assert any("optimizer.lr is missing" in text for text in found)
    listed = command.hpcgen("presets")
    assert listed.status == 2
    assert "llama3-8b" in listed.stdout
    assert "num_layrs" in listed.stderr


def test_a_preset_that_others_can_write_to_is_refused(site_preset: Path, tmp_path: Path) -> None:
    site_preset.chmod(0o666)
    [problem] = refused(tmp_path, on_preset())
    assert f"chmod o-w {site_preset}" in str(problem)
