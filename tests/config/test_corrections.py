"""A value of the wrong type is shown as it is written, with what to write in its place."""

from __future__ import annotations

import copy

import pytest

from hpcgen.config.document import parse
from hpcgen.run_plan.plan import plan
from tests.runs import loaded, minimal_run, refused

CORRECTIONS = {
    ("optimizer.lr", '"3e-4"'): '= "3e-4" must be a number; write 3e-4 without quotes',
    ("optimizer.lr", "3,5e-4"): "= 3,5e-4 must be a number; write 3.5e-4",
    ("model.seq_length", '"128"'): '= "128" must be a whole number; write 128 without quotes',
    ("model.seq_length", "4k"): "= 4k must be a whole number; write 4000 or 4096",
    ("model.seq_length", "4,096"): "= 4,096 must be a whole number; write 4096",
    ("model.seq_length", "4096.0"): "= 4096.0 must be a whole number; write 4096",
    ("model.seq_length", "4.5"): "= 4.5 must be a whole number",
    ("training.train_iters", "1e3"): "= 1000.0 must be a whole number; write 1000",
    ("model.ffn_hidden_size", "None"): "= None must be a whole number; write null",
    ("model.seq_length", "None"): "= None must be a whole number",
    ("model.swiglu", "yes"): "= yes must be true or false; write true",
    ("model.swiglu", "Off"): "= Off must be true or false; write false",
    ("model.swiglu", '"true"'): '= "true" must be true or false; write true',
    ("name", "2024"): "= 2024 must be text (quote it)",
    ("name", "[a]"): '= ["a"] must be text',
    (
        "slurm.train.time",
        "24",
    ): "= 24 must be a Slurm time such as 30:00 (minutes:seconds), 12:00:00 or 2-00:00:00",
    ("logging.profile_ranks", "0"): "= 0 must be a list; write [0]",
    ("data.datasets", "{prefix: /a}"): ' must be a list; write a "-" before the first of its keys',
    (
        "data.datasets",
        "[0.3 /a]",
    ): '[0] = "0.3 /a" must be a mapping of keys to values; write {weight: 0.3, prefix: /a}',
    ("environment", "[{A: b}]"): ' must be a mapping of keys to values; remove the "-" before its keys',
    ("model.rope_scaling", "true"): (
        "= true must be a mapping of keys to values; write {rope_type: ..., factor: ...}"
    ),
    ("model.window_size", "[4095, 0]"): (
        "= [4095, 0] must be a whole number; write 4096, which includes the token itself"
    ),
    ("model.window_size", "[-1, -1]"): "= [-1, -1] must be a whole number",
    ("parallelism.moe_token_dispatcher_type", "flex"): (
        "= flex must be alltoall or allgather; use alltoall, which computes the same"
    ),
    ("model.moe_router_load_balancing_type", "sinkhorn"): "= sinkhorn must be aux_loss, seq_aux_loss or none",
    ("image", "/i.sqsh"): "= /i.sqsh must be a mapping of keys to values; use container.image",
    (
        "model.moe_layer_freq",
        "1",
    ): "= 1 must be a list; remove it, because all layers have experts by default",
    ("model.moe_layer_freq", "2"): "= 2 must be a list; write [1, 0]",
    ("model.moe_layer_freq", "([0]+[1]*1)"): '= "([0]+[1]*1)" must be a list; write [0, 1]',
    (
        "model.moe_layer_freq",
        "0",
    ): "= 0 must be a list; write 1 for each layer with experts and 0 for each other layer",
}


@pytest.mark.parametrize(("key", "yaml"), CORRECTIONS)
def test_what_to_write_for_a_value_of_the_wrong_type(tmp_path, key, yaml):
    values = copy.deepcopy(minimal_run())
    section = values
    for name in key.split(".")[:-1]:
        section = section.setdefault(name, {})
    section[key.rpartition(".")[2]] = parse(f"value: {yaml}", "any").values["value"]
    [mistake] = refused(tmp_path, values)
    expected = CORRECTIONS[key, yaml]
    assert str(mistake).endswith(f": {key}{'' if expected[0] in '[ ' else ' '}{expected}")


def test_the_list_for_a_number_gives_the_layers_of_megatron_core(tmp_path):
    values = minimal_run()
    model = {**values["model"], "num_layers": 5, "num_moe_experts": 2, "add_bias_linear": False}
    values["model"] = {**model, "moe_layer_freq": 2}
    [mistake] = refused(tmp_path, values)
    assert mistake.hint == "write [1, 0, 1, 0, 1]"
    values["model"]["moe_layer_freq"] = [1, 0, 1, 0, 1]
    assert plan(loaded(tmp_path, values)).trainer.model.moe_layer_freq == (1, 0, 1, 0, 1)
