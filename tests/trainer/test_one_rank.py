"""benchmarks.one_rank: rank 0 of a layout runs alone, with the work of the average rank."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import one_rank, runs, train
from benchmarks.train_cases import Case
from tests.trainer.runs import LLAMA, MOE

RANKS = 4


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (MOE, {"expert_model_parallel_size": 4, "overlap_grad_reduce": True, "overlap_param_gather": True}),
        (MOE, {"expert_model_parallel_size": 2, "context_parallel_size": 2}),
        (
            LLAMA,
            {"tensor_model_parallel_size": 2, "sequence_parallel": True, "pipeline_model_parallel_size": 2},
        ),
    ],
    ids=["ep4", "ep2-cp2", "tp2-pp2"],
)
def test_the_trainer_runs_as_rank_0_alone(
    model: dict[str, object], layout: dict[str, object], corpus: str, tmp_path: Path
) -> None:
    case = Case("alone", model, 2, 8, RANKS, layout)
    config = train.configuration(case, Path(corpus), tmp_path / "run") | {"device": "cpu"}
    arguments = argparse.Namespace(one_rank=True)
    record = train.run_until(config, lambda lines: train.is_measured(lines, case, 3), case, arguments)
    assert record[0]["world_size"] == RANKS
    steps = runs.steps(record)
    assert all(step["consumed_samples"] == 8 * step["iteration"] for step in steps)
    assert all(math.isfinite(step["grad_norm"]) and step["grad_norm"] > 0 for step in steps)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_its_experts_get_the_average_number_of_tokens() -> None:
    """Two experts per rank. Tokens go to their experts and return to their places."""
    per_expert = torch.tensor([5, 0, 1, 7, 2, 2, 0, 3])
    counts = torch.empty(RANKS * 8, dtype=torch.int64)
    one_rank.gather(counts, per_expert)
    sent = per_expert.view(RANKS, 2).sum(1)
    received = counts.view(RANKS, 8)[:, :2].sum(1)
    assert received.sum() == sent.sum() == 20

    tokens, arrived, returned = torch.arange(20), torch.empty(20, dtype=torch.int64), torch.zeros(20)
    one_rank.exchange(arrived, tokens, received, sent)
    one_rank.exchange(returned, arrived, sent, received)
    assert returned.tolist() == tokens.tolist()
