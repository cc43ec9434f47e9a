"""Weight decay and learning rates of parameters, independent of their pipeline stage."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.transformer.moe.moe_layer import MoELayer

from tests.trainer.runs import GPT, LLAMA, MOE, gpt_config, run
from trainer.contract.config import ConfigError, ModelConfig, ParameterGroup
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.model_size import parameter_names
from trainer.model.parameter_names import global_names
from trainer.optimizer.parameter_groups import as_configured, copy_rates, overrides


class Layer(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.linear_fc1 = torch.nn.Linear(2, 2)
        self.norm = torch.nn.LayerNorm(2)


class Chunk(torch.nn.Module):
    """A stage with two layers, as Core builds it, within the wrapper for data parallelism."""

    def __init__(self, first_layer: int, *, embeds: bool, has_copy: bool = False) -> None:
        super().__init__()
        self.module = torch.nn.Module()
        if embeds:
            self.module.embedding = torch.nn.Module()
            self.module.embedding.word_embeddings = torch.nn.Embedding(4, 2)
        self.module.decoder = torch.nn.Module()
        self.module.decoder.layers = torch.nn.ModuleList([Layer(first_layer), Layer(first_layer + 1)])
        if has_copy:
            self.module.output_layer = torch.nn.Linear(2, 4, bias=False)
            self.module.output_layer.weight.shared = True


FIRST, LAST = Chunk(1, embeds=True), Chunk(3, embeds=False, has_copy=True)


def multipliers(*groups: dict[str, Any], chunk: Chunk = LAST) -> dict[str, dict[str, float]]:
    """The multipliers of each parameter that has some."""
    found = overrides([ParameterGroup(**group) for group in groups], [FIRST, LAST])
    return {
        name: override
        for name, parameter in global_names(chunk)
        for key, override in found.items()
        if key.matches(parameter, name)
    }


def test_names_are_those_of_the_complete_model() -> None:
    names = [name for name, _ in global_names(LAST)]
    assert names[0] == "decoder.layers.2.linear_fc1.weight"
    assert names[-2:] == ["decoder.layers.3.norm.bias", "embedding.word_embeddings.weight"]
    assert next(global_names(FIRST))[0] == "embedding.word_embeddings.weight"


def test_experts_are_numbered_over_all_ranks() -> None:
    """Core has one module for each expert, or Transformer Engine's for all of a rank."""

    def names(experts: torch.nn.Module) -> list[str]:
        layer = MoELayer.__new__(MoELayer)
        torch.nn.Module.__init__(layer)
        layer.local_expert_indices, layer.experts = [4, 5], experts
        return [name for name, _ in global_names(torch.nn.ModuleDict({"mlp": layer}))]

    separate, grouped = torch.nn.Module(), torch.nn.Module()
    separate.local_experts = torch.nn.ModuleList([torch.nn.Linear(2, 2, bias=False) for _ in range(2)])
    grouped.linear_fc1 = torch.nn.Module()
    for number in range(2):
        setattr(grouped.linear_fc1, f"weight{number}", torch.nn.Parameter(torch.zeros(2, 2)))
    assert names(separate) == [f"mlp.experts.local_experts.{number}.weight" for number in (4, 5)]
    assert names(grouped) == [f"mlp.experts.linear_fc1.weight{number}" for number in (4, 5)]


def test_only_biases_and_norms_do_not_decay() -> None:
    found = multipliers()
    assert set(found) == {name for name, p in global_names(LAST) if p.dim() == 1}
    assert {tuple(override.items()) for override in found.values()} == {(("wd_mult", 0.0),)}


@pytest.mark.usefixtures("process_groups")
def test_the_first_group_that_matches_counts() -> None:
    found = multipliers(
        {"match": "decoder.layers.3.*", "lr_mult": 0.1}, {"match": "*.linear_fc1.*", "wd_mult": 0.5}
    )
    assert found["decoder.layers.2.linear_fc1.weight"] == {"wd_mult": 0.5}
    assert found["decoder.layers.3.linear_fc1.weight"] == {"wd_mult": 1.0, "lr_mult": 0.1}
    assert found["decoder.layers.2.linear_fc1.bias"] == {"wd_mult": 0.0}
    assert found["decoder.layers.3.linear_fc1.bias"] == {"wd_mult": 0.0, "lr_mult": 0.1}


@pytest.mark.usefixtures("process_groups")
def test_both_copies_of_tied_embeddings_are_trained_alike() -> None:
    group = {"match": "embedding.*", "lr_mult": 0.5}
    name = "embedding.word_embeddings.weight"
    assert multipliers(group, chunk=FIRST)[name] == multipliers(group, chunk=LAST)[name]


@pytest.mark.usefixtures("process_groups")
def test_a_group_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"'\*\.linear_fc3\.\*' matches no parameter.*decoder\.layers\.0\.linear_fc1"
    ):
        multipliers({"match": "*.linear_fc1.*"}, {"match": "*.linear_fc3.*"})


def test_a_checkpoints_groups_take_the_configured_rates_of_their_multipliers() -> None:
    """megatron-core 0.19 would not find a group whose rate has changed."""
    usual = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False}
    slow = usual | {"lr_mult": 0.1}
    saved = [
        slow | {"max_lr": 1e-2, "min_lr": 1e-3, "step": 7},
        usual | {"max_lr": 1e-2, "min_lr": 1e-3, "step": 7},
    ]
    copy_rates(saved, [usual | {"max_lr": 5e-3, "min_lr": 0.0}, slow | {"max_lr": 5e-3, "min_lr": 0.0}])
    assert [(g["lr_mult"], g["max_lr"], g["min_lr"], g["step"]) for g in saved] == [
        (0.1, 5e-3, 0.0, 7),
        (1.0, 5e-3, 0.0, 7),
    ]
    unknown = [usual | {"wd_mult": 0.5, "max_lr": 1e-2}]
    copy_rates(unknown, [usual | {"max_lr": 5e-3}])
    assert unknown[0]["max_lr"] == 1e-2


def test_groups_of_experts_follow_a_change_of_expert_parallelism() -> None:
    """With EP > 1, experts have groups of their own."""
    usual = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "max_lr": 5e-3}
    norms, experts = usual | {"wd_mult": 0.0}, usual | {"is_expert_parallel": True}
    saved = [{**group, "max_lr": 1e-2, "step": 7} for group in (norms, usual)]
    expected = [{**group, "step": 7} for group in (usual, norms, experts)]
    assert as_configured(saved, [usual, norms, experts]) == expected
    assert as_configured(expected, [norms, usual]) == [{**group, "step": 7} for group in (norms, usual)]
    with pytest.raises(KeyError):
        as_configured(saved, [usual | {"lr_mult": 0.1}])


@pytest.mark.process
@pytest.mark.parametrize("shape", [GPT, LLAMA, MOE], ids=["gpt", "llama", "moe"])
def test_hpcgen_knows_the_names_of_the_parameters(shape: dict[str, Any], corpus: str, tmp_path: Path) -> None:
    config = gpt_config(corpus, tmp_path / "run", shape)
    config["optimizer"]["parameter_groups"] = [{"match": "nothing"}]
    ended = run(config)
    assert ended.statuses == (2,)
    [listed] = re.findall("The model has (.*)", ended.log)
    assert listed.split(", ") == sorted(parameter_names(resolve_model(ModelConfig(**shape))))
