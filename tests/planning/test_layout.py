"""The arithmetic of parallel layouts."""

from __future__ import annotations

import pytest

from tests.planning.test_model_size import gpt3
from trainer.contract.config import ParallelismConfig, TrainingConfig
from trainer.contract.model.layout import Layout

GPT175B = gpt3(96, 12288, 96)


def layout(
    world_size: int, batch: int = 1536, tp: int = 4, pp: int = 8, vpp: int | None = 6, cp: int = 1
) -> Layout | None:
    parallelism = ParallelismConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=vpp,
        context_parallel_size=cp,
    )
    training = TrainingConfig(micro_batch_size=1, global_batch_size=batch, train_iters=1)
    return Layout.make(GPT175B, parallelism, training, world_size)


def test_gpt3_175b_on_128_gpus():
    found = layout(128)
    assert found is not None
    assert found.model_parallel_size == 32
    assert found.data_parallel_size == 4
    assert found.num_microbatches == 384
    assert found.chunk_layers == (2,) * 48
    assert found.stage_layers(0) == 12
    assert found.bubble_fraction == pytest.approx(7 / (6 * 384))
    assert str(found) == "TP4 PP8 VPP6 CP1 DP4, 384 microbatches on 128 ranks"


def test_the_layers_of_an_uneven_pipeline():
    parallelism = ParallelismConfig(
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=2,
        account_for_embedding_in_pipeline_split=True,
        account_for_loss_in_pipeline_split=True,
    )
    training = TrainingConfig(micro_batch_size=1, global_batch_size=4, train_iters=1)
    found = Layout.make(gpt3(126, 16384, 128), parallelism, training, 4)
    assert found is not None
    assert found.chunk_layers == (15, 16, 16, 16, 16, 16, 16, 15)
    assert str(found) == "TP1 PP4 VPP2 CP1 DP1 with 31 + 32 + 32 + 31 layers, 4 microbatches on 4 ranks"


def test_context_parallel_ranks_share_a_batch():
    found = layout(128, cp=2)
    assert found is not None
    assert (found.data_parallel_size, found.num_microbatches) == (2, 768)


def test_without_pipeline_there_is_no_bubble():
    found = layout(8, tp=8, pp=1, vpp=None)
    assert found is not None
    assert found.bubble_fraction == 0


@pytest.mark.parametrize(
    "impossible",
    [
        {"world_size": 100},
        {"world_size": 16},
        {"world_size": 128, "batch": 1535},
        {"world_size": 128, "vpp": 5},
    ],
)
def test_sizes_that_do_not_divide_have_no_layout(impossible):
    assert layout(**impossible) is None
