"""Ranks that compute more slowly than others with the same work are reported."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import Run, finished
from trainer.faults.stragglers import (
    CHECK_INTERVAL,
    MAX_REPORTED,
    RankLocation,
    connected_groups,
    find_stragglers,
)

SLOW_LAYERS = """
import dataclasses, os, time
from megatron.core.transformer.transformer_layer import TransformerLayer

class SlowLayer(TransformerLayer):
    def forward(self, *args, **kwargs):
        if os.environ["RANK"] == os.environ["SLOW_RANK"]:
            time.sleep(0.1)  # many times a step, however busy the cores are
        return super().forward(*args, **kwargs)

def layers(core, vp_stage, usual):
    return dataclasses.replace(
        usual, layer_specs=[dataclasses.replace(layer, module=SlowLayer) for layer in usual.layer_specs]
    )
"""


def places(*stages: int) -> list[RankLocation]:
    return [RankLocation(f"node-{rank // 2}", rank % 2, stage, (rank,)) for rank, stage in enumerate(stages)]


def places_of_groups(num_groups: int, size: int, waiting: str) -> list[RankLocation]:
    """Groups of ranks that wait for each other, on nodes of eight ranks."""
    groups = [tuple(range(first, first + size)) for first in range(0, num_groups * size, size)]
    return [
        RankLocation(f"node-{rank // 8}", rank % 8, 0, ranks, waiting) for ranks in groups for rank in ranks
    ]


def test_a_rank_is_compared_with_those_of_its_pipeline_stage() -> None:
    [slow] = find_stragglers([1.0, 1.05, 1.3, 2.0, 2.1, 2.0], places(0, 0, 0, 1, 1, 1))
    assert slow.ranks == (2,)
    assert slow.slowdown == pytest.approx(1.3 / 1.05)
    assert str(slow) == (
        "rank 2 (node-1, local rank 0) computes for 1.300 s per step, "
        "1.24 times the median of pipeline stage 0 (1.050 s)"
    )


def test_the_slower_of_two_ranks_is_named_and_long_lists_are_cut() -> None:
    assert [s.ranks for s in find_stragglers([1.0, 3.0, 1.0, 2.0], places(0, 0, 1, 1))] == [(1,), (3,)]
    crowd = find_stragglers([1.0] * 40 + [1.2] * 30, places(*[0] * 70))
    assert len(crowd) == MAX_REPORTED


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [0.0, 0.0], [1.0, 1.09]])
def test_equal_ranks_are_not_stragglers(seconds: list[float]) -> None:
    assert find_stragglers(seconds, places(0, 0)) == []


def test_a_slow_gpu_makes_one_line_of_all_that_wait_for_it_and_hides_no_other_node() -> None:
    seconds = [1.0] * 64
    seconds[16:24] = [1.3, 1.31, 1.3, 1.3, 1.3, 1.3, 1.3, 1.3]
    seconds[40:48] = [1.25] * 8
    first, second = find_stragglers(seconds, places_of_groups(8, 8, "tensor parallelism"))
    assert (first.ranks, second.ranks) == (tuple(range(16, 24)), tuple(range(40, 48)))
    assert str(first).startswith(
        "ranks 16-23 (node-2), which wait for each other in tensor parallelism, compute for 1.310 s"
    )
    assert str(second) == (
        "ranks 40-47 (node-5), which wait for each other in tensor parallelism, compute for 1.250 s per step, "
        "1.25 times the median of pipeline stage 0 (1.000 s)"
    )


def test_a_group_is_named_with_all_of_its_nodes() -> None:
    [slow] = find_stragglers(
        [2.0] * 16 + [1.0] * 32, places_of_groups(3, 16, "tensor and context parallelism")
    )
    assert "ranks 0-15 (node-0, node-1), which wait for each other in tensor and context" in str(slow)


def test_ranks_that_share_experts_or_layers_wait_for_each_other() -> None:
    """Two ranks share a layer and four ranks its experts, or the opposite."""
    pairs, fours = [(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert sorted(connected_groups([*fours, *pairs])) == fours
    assert sorted(connected_groups([*pairs, *fours])) == fours
    assert sorted(connected_groups(pairs)) == pairs


def slow_run(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world_size: int, slow_rank: int
) -> Run:
    layers = tmp_path / "slow_layers.py"
    layers.write_text(SLOW_LAYERS)
    monkeypatch.setenv("SLOW_RANK", str(slow_rank))
    config["world_size"] = world_size
    config["model"] |= {"num_layers": 1, "hidden_size": 16, "layer_spec": f"{layers}:layers"}
    config["training"] |= {"micro_batch_size": 1, "global_batch_size": 2}
    config["training"]["train_iters"] = CHECK_INTERVAL
    config["logging"]["log_interval"] = CHECK_INTERVAL
    return finished(config)


@pytest.mark.process
def test_the_slow_rank_of_a_run_is_named_in_its_log_and_its_record(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = slow_run(config, tmp_path, monkeypatch, world_size=2, slow_rank=1)
    [straggler] = [event for event in result.events if event["event"] == "straggler"]
    assert (straggler["rank"], straggler["local_rank"], straggler["iteration"]) == (1, 1, CHECK_INTERVAL)
    assert (straggler["ranks"], straggler["host"]) == ([1], socket.gethostname())
    assert straggler["slowdown"] > 1.1
    assert f"iteration {CHECK_INTERVAL}: SLOW: rank 1 (" in result.log


@pytest.mark.process
@pytest.mark.slow
def test_ranks_that_wait_for_a_slow_one_in_tensor_parallelism_are_one_line_and_one_event(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config["parallelism"] = {"tensor_model_parallel_size": 2}
    result = slow_run(config, tmp_path, monkeypatch, world_size=4, slow_rank=3)
    [straggler] = [event for event in result.events if event["event"] == "straggler"]
    assert (straggler["rank"], straggler["ranks"], straggler["local_rank"]) == (2, [2, 3], 2)
    [line] = [line for line in result.log.splitlines() if "SLOW: " in line]
    assert (
        f"ranks 2-3 ({socket.gethostname()}), which wait for each other in tensor parallelism, compute"
        in line
    )
