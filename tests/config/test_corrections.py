"""A value of the wrong type is shown as it is written, with what to write in its place."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import pytest

from hpcgen.config.document import parse
from hpcgen.errors import Problem
from hpcgen.run_plan.plan import plan
from tests.runs import loaded, minimal_run, refused

CORRECTIONS = {
    ("optimizer.lr", '"3e-4"'): "write 3e-4 without quotes",
    ("optimizer.lr", "3,5e-4"): "write 3.5e-4",
    ("model.seq_length", '"128"'): "write 128 without quotes",
    ("model.seq_length", "4k"): "write 4000 or 4096",
    ("model.seq_length", "4,096"): "write 4096",
    ("model.seq_length", "4096.0"): "write 4096",
    ("model.seq_length", "4.5"): "",
    ("training.train_iters", "1e3"): "write 1000",
    ("model.ffn_hidden_size", "None"): "write null",
    ("model.seq_length", "None"): "",
    ("model.swiglu", "yes"): "write true",
    ("model.swiglu", "Off"): "write false",
    ("model.swiglu", '"true"'): "write true",
    ("name", "2024"): "",
    ("name", "[a]"): "",
    ("slurm.train.time", "24"): "",
    ("logging.profile_ranks", "0"): "write [0]",
    ("data.datasets", "{prefix: /a}"): 'write a "-" before the first of its keys',
    ("data.datasets", "[0.3 /a]"): "write {weight: 0.3, prefix: /a}",
    ("environment", "[{A: b}]"): 'remove the "-" before its keys',
    ("model.rope_scaling", "true"): "write {rope_type: ..., factor: ...}",
    ("lora.target_modules", "all-linear"): "remove it: by default, all linear layers have adapters",
    ("lora.target_modules", "o_proj"): "use Megatron-Core's names: [linear_proj]",
    ("lora.target_modules", "linear_qkv"): 'write ["linear_qkv"]',
    ("model.window_size", "[4095, 0]"): "write 4096, which includes the token itself",
    ("model.window_size", "[-1, -1]"): "",
    ("parallelism.moe_token_dispatcher_type", "flex"): "use alltoall, which computes the same",
    ("model.moe_router_load_balancing_type", "sinkhorn"): "",
    ("image", "/i.sqsh"): "use container.image",
    ("model.moe_layer_freq", "1"): "remove it, because all layers have experts by default",
    ("model.moe_layer_freq", "2"): "write [1, 0]",
    ("model.moe_layer_freq", "([0]+[1]*1)"): "write [0, 1]",
    ("model.moe_layer_freq", "0"): "write 1 for each layer with experts and 0 for each other layer",
}
"""Values of the wrong type, with the hint for each, which may be empty."""


def mistakes(directory: Path, key: str, yaml: str) -> list[Problem]:
    """The mistakes of a run with `yaml` at `key`, without their places."""
    values = copy.deepcopy(minimal_run())
    section = values
    for name in key.split(".")[:-1]:
        section = section.setdefault(name, {})
    section[key.rpartition(".")[2]] = parse(f"value: {yaml}", "any").values["value"]
    return [dataclasses.replace(mistake, where="") for mistake in refused(directory, values)]


@pytest.mark.parametrize(("key", "yaml"), CORRECTIONS)
def test_what_to_write_for_a_value_of_the_wrong_type(tmp_path, key, yaml):
    [mistake] = mistakes(tmp_path, key, yaml)
    assert mistake.path.removesuffix("[0]") == key
    assert mistake.hint == CORRECTIONS[key, yaml]


def test_the_list_for_a_number_gives_the_layers_of_megatron_core(tmp_path):
    values = minimal_run()
    model = {**values["model"], "num_layers": 5, "num_moe_experts": 2, "add_bias_linear": False}
    values["model"] = {**model, "moe_layer_freq": 2}
    [mistake] = refused(tmp_path, values)
    assert mistake.hint == "write [1, 0, 1, 0, 1]"
    values["model"]["moe_layer_freq"] = [1, 0, 1, 0, 1]
    assert plan(loaded(tmp_path, values)).trainer.model.moe_layer_freq == (1, 0, 1, 0, 1)
