"""One rank of a layout runs alone, with the work of the average rank."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from benchmarks import runs, train
from benchmarks.train_cases import Case
from tests.trainer.runs import LLAMA, MOE
from trainer.distributed import one_rank

RANKS = 4


@pytest.mark.slow  # test_memory_test.py trains ranks alone through the same module, without the benchmarks
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(
            MOE,
            {"expert_model_parallel_size": 4, "overlap_grad_reduce": True, "overlap_param_gather": True},
            id="ep4",
        ),
        pytest.param(
            MOE,
            {"expert_model_parallel_size": 2, "context_parallel_size": 2},
            id="ep2-cp2",
        ),
        pytest.param(
            LLAMA,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
            id="tp2-pp2",
        ),
    ],
)
def test_the_trainer_runs_as_rank_0_alone(
    model: dict[str, object], layout: dict[str, object], corpus: str, tmp_path: Path
) -> None:
    case = Case("alone", model, 2, 8, RANKS, layout)
    config = train.configuration(case, Path(corpus), tmp_path / "run") | {"device": "cpu"}
    arguments = argparse.Namespace(one_rank=True, environment={})
    record = train.run_until(config, lambda lines: train.is_measured(lines, case, 3), case, arguments)
    assert record[0]["world_size"] == RANKS
    steps = runs.steps(record)
    assert all(step["consumed_samples"] == 8 * step["iteration"] for step in steps)
    assert all(math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in steps)
    if model is MOE:  # the random choice of a step; MOE's own routers load an expert with 1.8 times the mean
        assert all(step["moe_max_load"] < 1.5 for step in steps)


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[ProcessGroupCollection]:
    """Process groups of RANKS ranks, in which this process is alone, as (rank, EP, ETP)."""
    rank, expert_ranks, tensor_ranks = request.param
    one_rank.connect(rank, RANKS)
    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=expert_ranks,
        expert_tensor_parallel_size=tensor_ranks,
        create_gloo_process_groups=False,
    )
    yield ProcessGroupCollection.use_mpu_process_groups()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("groups", [(0, 4, 1), (2, 4, 1), (3, 2, 2)], indirect=True)
def test_its_experts_get_the_average_number_of_tokens(groups: ProcessGroupCollection) -> None:
    """Tokens go to their experts and return to their places."""
    per_expert = torch.tensor([5, 0, 1, 7, 2, 2, 0, 3])
    counts = torch.empty(RANKS * 8, dtype=torch.int64)
    one_rank.gather(counts, per_expert, groups.tp_ep)
    expert_ranks, own = groups.ep.size(), groups.ep.rank()
    sent = per_expert.view(expert_ranks, -1).sum(1)
    by_rank = counts.view(expert_ranks, -1, expert_ranks, 8 // expert_ranks)
    received = by_rank[:, 0, own].sum(1)
    assert received.sum() == sent.sum() == 20
    assert (by_rank[:, :1] == by_rank).all()

    tokens, arrived, returned = torch.arange(20), torch.empty(20, dtype=torch.int64), torch.zeros(20)
    one_rank.exchange(arrived, tokens, received, sent, groups.ep)
    one_rank.exchange(returned, arrived, sent, received, groups.ep)
    assert returned.tolist() == tokens.tolist()
