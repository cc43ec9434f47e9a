"""The plan of a mixture of experts: its layout and summary."""

from __future__ import annotations

import pytest

from hpcgen.run_plan.summary import _nodes_per_group, for_people, summarize
from tests.runs import big_run, planned
from trainer.contract.config import ModelConfig, ParallelismConfig, TrainingConfig
from trainer.contract.model.layout import Layout

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
        "2 of 8 per token in 32 MoE layers, 1 on each rank; 2 groups of 8 ranks within a node per pipeline stage"
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
        "4 groups of 16 ranks over 2 nodes per pipeline stage"
        in (dict(for_people(summarize(plan)))["experts"])
    )
    assert any("sends 2 copies of each token over the network" in warning for warning in plan.warnings)


def test_the_summary_says_that_a_rank_has_all_experts(tmp_path):
    overrides = ["parallelism.expert_model_parallel_size=1", "memory_check=warning"]
    plan = planned(tmp_path, big_run(**MIXTRAL), overrides=overrides)
    assert (
        dict(for_people(summarize(plan)))["experts"] == "2 of 8 per token in 32 MoE layers, all on every rank"
    )


def test_the_summary_counts_mtp_layers(tmp_path):
    rope = {"position_embedding_type": "rope", "untie_embeddings_and_output_weights": True}
    found = summarize(planned(tmp_path, big_run(model={**rope, "mtp_num_layers": 1})))
    without = summarize(planned(tmp_path, big_run(model=rope)))["parameters"]
    assert found["parameters"] > without
    assert dict(for_people(found))["parameters"] == f"{found['parameters']:,} including 1 MTP layer"


@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (4, 1), (6, 2), (8, 1), (12, 2), (16, 2), (20, 3)])
def test_a_group_may_begin_in_the_middle_of_a_node(ranks, nodes):
    assert _nodes_per_group(ranks, ranks_per_node=8) == nodes


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
