"""Ranks that compute more slowly than their like are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.runs import finished
from trainer.stragglers import CHECK_INTERVAL, SHOWN, Place, find_stragglers

SLOW_LAYERS = """
import dataclasses, os, time
from megatron.core.transformer.transformer_layer import TransformerLayer

class SlowLayer(TransformerLayer):
    def forward(self, *args, **kwargs):
        if os.environ["RANK"] == "1":
            time.sleep(0.2)  # many times a step, however busy the cores are
        return super().forward(*args, **kwargs)

def layers(core, vp_stage, usual):
    return dataclasses.replace(
        usual, layer_specs=[dataclasses.replace(layer, module=SlowLayer) for layer in usual.layer_specs]
    )
"""


def places(*stages: int) -> list[Place]:
    return [Place(f"node-{rank // 2}", rank % 2, stage) for rank, stage in enumerate(stages)]


def test_a_rank_is_compared_with_those_of_its_pipeline_stage() -> None:
    [slow] = find_stragglers([1.0, 1.05, 1.3, 2.0, 2.1, 2.0], places(0, 0, 0, 1, 1, 1))
    assert (slow.rank, slow.place.host, slow.place.local_rank) == (2, "node-1", 0)
    assert slow.slowdown == pytest.approx(1.3 / 1.05)
    assert "rank 2 (node-1, local rank 0)" in str(slow)


def test_of_two_the_slower_one_is_named_slowest_first_and_not_all_of_a_crowd() -> None:
    assert [s.rank for s in find_stragglers([1.0, 3.0, 1.0, 2.0], places(0, 0, 1, 1))] == [1, 3]
    crowd = find_stragglers([1.0] * 40 + [1.2] * 30, places(*[0] * 70))
    assert len(crowd) == SHOWN


@pytest.mark.parametrize("seconds", [[1.0, 1.0], [0.0, 0.0], [1.0, 1.09]])
def test_ranks_alike_are_no_stragglers(seconds: list[float]) -> None:
    assert find_stragglers(seconds, places(0, 0)) == []


def test_the_slow_rank_of_a_run_is_named_in_its_log_and_its_record(
    config: dict[str, Any], tmp_path: Path
) -> None:
    layers = tmp_path / "slow_layers.py"
    layers.write_text(SLOW_LAYERS)
    config["world_size"] = 2
    config["model"] |= {"num_layers": 1, "hidden_size": 16, "layer_spec": f"{layers}:layers"}
    config["training"] |= {"global_batch_size": 2, "train_iters": CHECK_INTERVAL}
    config["logging"]["log_interval"] = CHECK_INTERVAL
    result = finished(config)
    [straggler] = [event for event in result.events if event["event"] == "straggler"]
    assert (straggler["rank"], straggler["local_rank"], straggler["iteration"]) == (1, 1, CHECK_INTERVAL)
    assert straggler["slowdown"] > 1.1
    assert f"iteration {CHECK_INTERVAL}: SLOW: rank 1 (" in result.log
