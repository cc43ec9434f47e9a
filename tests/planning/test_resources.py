"""Layouts that are allowed but slow, or may not fit: warnings."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext

import pytest

from hpcgen import plan
from hpcgen.errors import ConfigErrors
from hpcgen.planning import resources
from hpcgen.planning.memory import nccl_gib
from hpcgen.planning.repairs import check
from tests.planning.cases import errors, valid_facts, warned, warnings
from tests.runs import big_run, loaded, write_yaml
from trainer.contract.rules import context_parallel, experts, precision
from trainer.contract.rules.facts import World

TP = "parallelism__tensor_model_parallel_size"
PP = "parallelism__pipeline_model_parallel_size"
VPP = "parallelism__virtual_pipeline_model_parallel_size"
CP = "parallelism__context_parallel_size"
HEADS = "model__num_attention_heads"
BATCH = "training__global_batch_size"
MICRO = "training__micro_batch_size"
EP = "parallelism__expert_model_parallel_size"
PATH = "parallelism.tensor_model_parallel_size"
RULES = (context_parallel.tensor_and_context_parallel_stay_in_node, experts.experts_stay_in_node)
SP = "parallelism__sequence_parallel"


WARNED = {
    "TP over nodes": (
        {TP: 16},
        "parallelism.tensor_model_parallel_size",
        context_parallel.tensor_and_context_parallel_stay_in_node,
    ),
    "TP x CP over nodes": (
        {TP: 4, CP: 4},
        "parallelism.context_parallel_size",
        context_parallel.tensor_and_context_parallel_stay_in_node,
    ),
    "TP x CP over nodes with separate documents": (
        {TP: 4, CP: 4, "data__reset_attention_mask": True},
        "parallelism.context_parallel_size",
        context_parallel.tensor_and_context_parallel_stay_in_node,
    ),
    "a pipeline that waits": (
        {PP: 4, BATCH: 16},
        "parallelism.pipeline_model_parallel_size",
        resources.pipeline_is_mostly_busy,
    ),
    "fp16": (
        {"training__precision": "fp16"},
        "training.precision",
        precision.bf16_is_as_fast,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), WARNED.values(), ids=WARNED)
def test_slow_layouts_are_warnings(changes, path, rule):
    assert warned(**changes) == [(path, rule)]


@pytest.mark.parametrize(
    "changes", [{}, {TP: 8}, {TP: 4, CP: 2}, {PP: 4, BATCH: 240}, {PP: 4, VPP: 3, BATCH: 96}]
)
def test_fast_layouts_get_no_warning(changes):
    assert warnings(**changes) == []


@pytest.mark.parametrize(("batch", "is_offered"), [(128, True), (112, False)])
def test_a_bubble_offers_a_batch_of_at_most_twice_the_size(batch, is_offered):
    [warning] = warnings(**{PP: 4, BATCH: batch})
    assert ("set training.global_batch_size to 240 or more" in warning) == is_offered
    assert warning.endswith("use more virtual stages")


TOO_LARGE = {"model__num_layers": 40, "model__hidden_size": 5120, HEADS: 40}


def test_a_model_that_does_not_fit_is_an_error():
    [message] = errors(**TOO_LARGE)
    assert message.startswith("parallelism.tensor_model_parallel_size results in about ")
    assert " GiB on a device with 80 GiB, of which CUDA, libraries and fragments need 3 GiB: " in message
    ways, override = message.split("; ")[-1].split(". ")
    assert ways == "use 2, 4 or 8, or use pipeline_model_parallel_size: 2"
    assert override == "If memory-test shows that it fits, use --set memory_check=warning"
    [warning] = warnings(**TOO_LARGE)
    assert warning == message.removesuffix(f". {override}")
    assert errors(**TOO_LARGE, **{TP: 2}) == warnings(**TOO_LARGE, **{TP: 2}) == []
    assert warnings(device_memory_gib=300, **TOO_LARGE) == []


def test_fewer_instances_of_the_optimizer_are_a_way_to_fit():
    """More tensor parallelism would leave fewer ranks than instances, so it is not offered."""
    fits_alone = {**TOO_LARGE, "model__num_layers": 16}
    assert errors(**fits_alone) == []
    [message] = errors(**fits_alone, parallelism__num_distributed_optimizer_instances=16)
    ways = message.split("; ")[-1].split(". ")[0]
    assert ways == "use slurm.train.nodes: 4 or num_distributed_optimizer_instances: 8"


def test_what_does_not_fit_is_reported_with_other_mistakes():
    """Unless the estimate would be that of a mistake."""
    other, misfit = errors(**TOO_LARGE, logging__record_memory_history=True)
    assert "record_memory_history" in other
    assert "GiB on a device" in misfit
    assert "GiB" not in "".join(errors(**{**TOO_LARGE, "model__num_layers": 41, PP: 2}))


def test_nccl_has_buffers_for_each_group_and_each_peer_of_an_all_to_all():
    layouts = ({}, {TP: 4}, {TP: 4, PP: 4}, {"model__num_moe_experts": 64, EP: 8})
    sizes = [nccl_gib(valid_facts(**changes).layout, 8) for changes in layouts]
    assert sizes == pytest.approx([1.2, 1.8, 1.8, 1.8 + 7 * 0.44])
    assert nccl_gib(valid_facts(nodes=1, **{TP: 8}).layout, 8) == pytest.approx(1.2)


@pytest.mark.parametrize(("gib", "share"), [(19.4, None), (19.2, "5.8%"), (18.1, "0.1%"), (18, None)])
def test_little_headroom_is_a_warning(gib, share):
    """The model needs 15.09 GiB, 3 GiB are kept, and NCCL may take 1.2 GiB for data parallelism and all ranks."""
    shape = {"model__num_layers": 24, "model__hidden_size": 2048}
    found = [message for message in warnings(gib, **shape) if "NCCL's buffers may take 1.2 GiB" in message]
    assert [f"({share})" in message for message in found] == ([] if share is None else [True])


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        ({}, "use recompute_granularity: full"),
        ({MICRO: 1}, "use context_parallel_size: 4 or recompute_granularity: full"),
        ({MICRO: 1, SP: True}, "use 4 or 8, or use context_parallel_size: 2 or recompute_granularity: full"),
        (
            {MICRO: 1, SP: True, "model__add_bias_linear": False},
            "use 4 or 8, or use context_parallel_size: 2, recompute_modules: [mlp] or recompute_granularity: full",
        ),
    ],
)
def test_a_model_that_does_not_fit_is_told_which_changes_of_one_key_are_enough(changes, ways):
    [message] = warnings(
        **{TP: 2, "model__seq_length": 131072, "model__hidden_size": 4096, HEADS: 32} | changes
    )
    assert message.endswith(f"; {ways}")


def test_nodes_are_advised_as_many_as_make_the_model_fit():
    shape = {
        "model__num_layers": 40,
        "model__hidden_size": 5120,
        HEADS: 40,
        MICRO: 1,
        TP: 2,
        BATCH: 1024,
        SP: True,
    }
    [message] = warnings(53, **shape)
    assert "or use slurm.train.nodes: 4, pipeline" in message
    assert warnings(54, **shape, nodes=4) == []
    [message] = warnings(40, **shape)
    assert "nodes" not in message


def test_nodes_are_advised_only_with_enough_microbatches_for_interleaved_stages():
    """4 microbatches. 4 times as many nodes would leave one, but interleaved stages need a multiple of PP."""
    shape = {"model__num_layers": 40, "model__hidden_size": 5120, HEADS: 40, MICRO: 1, TP: 2, SP: True}
    shape |= {PP: 2, VPP: 2, BATCH: 16}
    _, message = warnings(38, **shape)
    assert "slurm.train.nodes: 4" in message
    _, message = warnings(34, **shape)
    assert "nodes" not in message


def test_a_warning_offers_nothing_that_would_be_an_error():
    shape = {"model__num_layers": 96, "model__hidden_size": 12288, HEADS: 96, TP: 8}
    [message] = warnings(**shape)
    assert "; no change of one key is enough" in message


@pytest.mark.parametrize(
    ("key", "end", "advice"),
    [
        ("slurm.train.nodes", " of buffers for kernels (TP x PP x CP = 2 x 2 x 1)", "use 8, or use tensor"),
        (VPP.replace("__", "."), " of buffers for kernels", "use null, 10 or 20, or use "),
        ("model.num_layers", " of buffers for kernels", "use 4 or 8, or use "),
    ],
)
def test_a_misfit_is_reported_at_the_key_of_the_layout_that_the_user_set(key, end, advice):
    shape = {"model__num_layers": 40, "model__hidden_size": 5120, HEADS: 40, MICRO: 4, TP: 2, PP: 2, VPP: 2}
    [problem], _ = check(dataclasses.replace(valid_facts(67, **shape), set_by_user=("optimizer.lr", key)))
    assert problem.path == (PATH if key == "model.num_layers" else key)
    assert problem.reason.endswith(end)
    assert problem.hint.startswith(advice)


@pytest.mark.parametrize(("gib", "fits"), [(63.4, True), (39.5, False)])
def test_a_site_states_the_memory_of_its_gpus(tmp_path, monkeypatch, gib, fits):
    """A100 exists with 40, 64 and 80 GB. Nothing follows from the name of the GPU."""
    monkeypatch.chdir(tmp_path)
    facts = {"extends": "a100-sxm", "gpus_per_node": 4, "gpu_memory_gib": gib}
    write_yaml(tmp_path / "topologies" / "booster.yaml", facts)
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "node_type": "booster"})
    values = big_run(cluster="./site.yaml", slurm={"train": {"nodes": 4, "time": "1:00:00"}}, preset="1.3b")
    run = loaded(tmp_path, values | {"container": {}, "training": {"micro_batch_size": 16}})
    with nullcontext() if fits else pytest.raises(ConfigErrors, match=r"on a device with 39\.5 GiB"):
        plan(run, ["train"], exists=lambda _: True)


@pytest.mark.parametrize(("tasks", "crosses"), [(8, False), (4, True)])
def test_the_ranks_of_a_node_count_and_not_its_gpus(tmp_path, tasks, crosses):
    train = {"nodes": 4, "ntasks_per_node": tasks, "time": "1:00:00"}
    values = big_run(slurm={"train": train}, preset="1.3b", parallelism={"tensor_model_parallel_size": 8})
    warnings = plan(loaded(tmp_path, values), ["train"], exists=lambda _: True).warnings
    assert any("waits for the network" in str(warning) for warning in warnings) == crosses


@pytest.mark.parametrize(
    ("tensor", "train", "is_warned"),
    [
        (16, {}, True),
        (8, {}, False),
        (16, {"segment": 16}, False),
        (16, {"extra_directives": ["--segment=16"]}, False),
    ],
)
def test_groups_that_need_nvlink_between_nodes_need_a_segment(
    tmp_path, monkeypatch, tensor, train, is_warned
):
    monkeypatch.chdir(tmp_path)
    write_yaml(tmp_path / "topologies" / "rack.yaml", {"extends": "ndv5", "nvlink": {"domain_nodes": 18}})
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "rack"})
    values = big_run(
        cluster="./site.yaml",
        slurm={"train": {"nodes": 32, "time": "1:00:00", **train}},
        parallelism={"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": 8},
    )
    found = plan(loaded(tmp_path, values), ["train"], exists=lambda _: True).warnings
    said = "slurm.train.segment is not set. Groups of 16 ranks communicate over NVLink, but Slurm may place their nodes"
    assert any(said in str(warning) for warning in found) == is_warned


def nvl72(nodes: int = 36, nvlink_nodes: int = 18, **changes: object) -> list[str]:
    """The warnings of a layout on nodes of four GPUs, `nvlink_nodes` of which NVLink connects."""
    facts = dataclasses.replace(
        valid_facts(**{BATCH: 576, HEADS: 24, "model__hidden_size": 1536, **changes}),
        world=World(path="slurm.train.nodes", count=nodes, ranks_each=4),
        gpus_per_node=4,
        nvlink_nodes=nvlink_nodes,
    )
    return [str(problem) for rule in RULES for problem in rule(facts)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({TP: 8}, ""),
        ({TP: 8, CP: 9}, ""),
        ({TP: 8, "nvlink_nodes": 1}, f"{PATH} is more than the 4 GPUs of a node, so every layer waits"),
        ({TP: 3, "nvlink_nodes": 1}, f"{PATH} does not divide the 4 GPUs of a node, so every layer waits"),
        ({TP: 3, "nvlink_nodes": 1, "nodes": 1}, ""),
        ({TP: 8, CP: 2, "nvlink_nodes": 16}, ""),
        ({TP: 12, "nvlink_nodes": 16}, f"{PATH} does not divide the 64 GPUs of 16 nodes with NVLink"),
        ({TP: 12, "nvlink_nodes": 16, "nodes": 12}, ""),
        ({TP: 8, CP: 16}, "= 8 x 16 = 128, more than the 72 GPUs of 18 nodes with NVLink"),
        ({"model__num_moe_experts": 64, EP: 64, "nvlink_nodes": 16}, ""),
        (
            {"model__num_moe_experts": 64, EP: 64},
            "64, which does not divide the 72 GPUs of 18 nodes with NVLink",
        ),
        ({"model__num_moe_experts": 64, EP: 64, "nvlink_nodes": 1}, "64, more than the 4 GPUs of a node"),
    ],
)
def test_groups_may_be_as_large_as_what_nvlink_connects(changes, said):
    found = [line for line in nvl72(**changes) if "network" in line]
    assert len(found) == bool(said)
    assert said in "".join(found)


def test_only_training_has_to_fit(tmp_path):
    run = loaded(tmp_path, big_run(slurm={"train": {"nodes": 4, "time": "1-00:00:00"}}, data={"mock": True}))
    said = "results in about 115.5 GiB on a device with 79.6 GiB"
    with pytest.raises(ConfigErrors, match=said):
        plan(run, ["memory-test", "train"])
    accepted = dataclasses.replace(run, config=dataclasses.replace(run.config, memory_check="warning"))
    for planned in (plan(run, ["memory-test"]), plan(accepted, ["train"])):
        assert any(said in warning for warning in planned.warnings)
