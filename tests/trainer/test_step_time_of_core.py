"""The predicted step compared with Megatron-Core: the order of its passes, and the ranks of its groups."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules

from hpcgen.planning.step_time.collectives import Groups
from hpcgen.planning.step_time.pipeline import passes
from tests.planning.cases import CP, PP, TP, valid_facts
from tests.trainer.core_groups import core_groups
from trainer.contract.config import ParallelismConfig

EP, ETP = "parallelism__expert_model_parallel_size", "parallelism__expert_tensor_parallel_size"
INSTANCES = "parallelism__num_distributed_optimizer_instances"
EXPERTS = {"model__num_moe_experts": 8, "model__add_bias_linear": False}
RANKS_PER_NODE, NODES = 8, 8


@pytest.mark.parametrize(
    ("stages", "chunks", "num_microbatches"),
    [(1, 1, 3), (4, 1, 2), (4, 1, 9), (2, 2, 4), (4, 3, 4), (4, 3, 12), (8, 6, 16)],
)
def test_passes_are_in_cores_order(
    stages: int, chunks: int, num_microbatches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in range(stages):
        monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", stages)
        monkeypatch.setattr(parallel_state, "_MPU_PIPELINE_MODEL_PARALLEL_RANK", stage)
        virtual = chunks if chunks > 1 else None
        monkeypatch.setattr(parallel_state, "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", virtual)
        total, _, warmup, _ = schedules.get_pp_rank_microbatches(num_microbatches, chunks, stages)
        order = [
            (chunk, microbatch)
            for microbatch, chunk in schedules.get_schedule_table(num_microbatches, chunks, stages)
        ]
        found = passes(stages, stage, chunks, num_microbatches)
        assert [(each.chunk, each.microbatch) for each in found if each.is_forward] == order
        assert [(chunks - 1 - each.chunk, each.microbatch) for each in found if not each.is_forward] == order
        steady = [True, False] * (total - warmup)
        assert [each.is_forward for each in found] == [True] * warmup + steady + [False] * warmup


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {TP: 4, PP: 2},
        {TP: 2, CP: 4, PP: 2},
        {TP: 8, CP: 2},
        {TP: 2, INSTANCES: 4},
        {TP: 4, EP: 8, ETP: 1} | EXPERTS,
        {TP: 2, EP: 4, PP: 2, INSTANCES: 2} | EXPERTS,
    ],
)
def test_groups_have_cores_ranks(changes: dict[str, object]) -> None:
    """Counts the ranks of each group on each node."""
    facts = valid_facts(nodes=NODES, training__micro_batch_size=1, **changes)
    assert facts.layout is not None
    ranks = _ranks_of_core(facts.parallelism, has_experts="model__num_moe_experts" in changes)
    found = vars(Groups.of(facts.layout, RANKS_PER_NODE))
    for name, of_core in ranks.items():
        nodes = Counter(rank // RANKS_PER_NODE for rank in of_core)
        assert (found[name].size, found[name].per_domain) == (len(of_core), min(nodes.values())), name


def _ranks_of_core(axes: ParallelismConfig, *, has_experts: bool) -> dict[str, list[int]]:
    with core_groups(axes, RANKS_PER_NODE * NODES):
        groups = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "context": parallel_state.get_context_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "data": parallel_state.get_data_parallel_group(
                with_context_parallel=True, partial_data_parallel=True
            ),
        }
        if axes.num_distributed_optimizer_instances > 1:
            groups["instances"] = parallel_state.get_inter_distributed_optimizer_instance_group()
        if has_experts:
            groups |= {
                "expert": parallel_state.get_expert_model_parallel_group(),
                "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
                "expert_data": parallel_state.get_expert_data_parallel_group(
                    partial_expert_data_parallel=True
                ),
            }
        return {name: torch.distributed.get_process_group_ranks(group) for name, group in groups.items()}
