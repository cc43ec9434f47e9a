"""The plan of a mixture of experts: its layout and summary, and the Megatron-Core that will train it."""

from __future__ import annotations

import json

import pytest

from hpcgen.errors import ConfigErrors
from hpcgen.planning.layout import Layout
from hpcgen.planning.summary import for_people, summarize
from tests.runs import big_run, minimal_run, planned, write_yaml
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig

SEQUENCES = ("model.moe_router_load_balancing_type=seq_aux_loss", "model.moe_aux_loss_coeff=0.01")
MIXTRAL = {
    "preset": "mixtral-8x7b",
    "data": {"mock": True},
    "slurm": {"train": {"nodes": 8, "time": "1-00:00:00"}},
}


def test_the_summary_of_mixtral(tmp_path):
    found = summarize(planned(tmp_path, big_run(**MIXTRAL)))
    assert found["parameters"] == 46_702_792_704
    assert found["active_parameters"] == 12_879_925_248
    assert found["experts"]["expert_data_parallel_size"] == 2
    lines = dict(for_people(found))
    assert lines["layout"] == "TP1 PP4 VPP8 CP1 DP16 EP8 ETP1, 16 microbatches on 64 ranks"
    assert lines["parameters"] == "46,702,792,704, of which 12,879,925,248 process each token"
    assert lines["experts"] == (
        "2 of 8 per token in 32 layers, 1 per rank; groups of 8 ranks in one node, 2 of them per pipeline stage"
    )


def test_a_dense_model_has_no_line_about_experts(tmp_path):
    found = summarize(planned(tmp_path, big_run()))
    assert found["experts"] is None
    assert "experts" not in dict(for_people(found))
    assert "EP" not in found["layout"]


def test_groups_that_span_nodes(tmp_path):
    overrides = ["parallelism.expert_tensor_parallel_size=2", "parallelism.pipeline_model_parallel_size=1"]
    overrides += ["parallelism.virtual_pipeline_model_parallel_size=null"]
    plan = planned(tmp_path, big_run(**MIXTRAL), overrides=overrides)
    assert (
        "groups of 16 ranks over 2 nodes, 4 of them per pipeline stage"
        in (dict(for_people(summarize(plan)))["experts"])
    )
    assert any("each token crosses the network 2 times" in warning for warning in plan.warnings)


def test_layers_of_a_stage_follow_the_chunks():
    model = ModelConfig(num_layers=8, hidden_size=64, num_attention_heads=4, seq_length=64)
    axes = ParallelismConfig(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    training = TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=1)
    layout = Layout.make(model, axes, training, world_size=2)
    assert layout is not None
    assert [layout.layers_of_stage(stage) for stage in (0, 1)] == [
        [range(2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]


def code_dir(tmp_path, version: str) -> str:
    """A directory as `hpcgen install-code` writes it, and a cluster that uses it."""
    directory = tmp_path / "code"
    directory.mkdir()
    (directory / "manifest.json").write_text(json.dumps({"versions": {"megatron-core": version}}))
    write_yaml(tmp_path / "site.yaml", {"extends": "local", "code_dir": str(directory)})
    return "./site.yaml"


def moe_run(cluster: str) -> dict[str, object]:
    return minimal_run(cluster=cluster, preset="tiny-moe", model={}, training={}, optimizer={})


def test_a_code_directory_with_an_old_core_is_refused(tmp_path):
    with pytest.raises(
        ConfigErrors, match=r"seq_aux_loss has a gradient .* in the Megatron-Core 0\.16 of the job"
    ):
        planned(tmp_path, moe_run(code_dir(tmp_path, "0.16.1")), overrides=SEQUENCES)


def test_a_code_directory_with_a_new_core_is_accepted(tmp_path):
    plan = planned(tmp_path, moe_run(code_dir(tmp_path, "0.19.2")), overrides=SEQUENCES)
    assert not [warning for warning in plan.warnings if "Megatron-Core" in warning]


def test_an_unknown_core_is_a_warning(tmp_path):
    plan = planned(tmp_path, moe_run("local"), overrides=SEQUENCES)
    [warning] = [warning for warning in plan.warnings if "Megatron-Core" in warning]
    assert "before 0.19, so the trainer refuses it there" in warning
