"""Layers of uneven pipelines: hpcgen's division is Megatron-Core's."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from trainer.contract.config import ParallelismConfig
from trainer.contract.model.pipeline import chunk_layers, core_layout, layout_rows

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning")]
LAYOUTS = ("Ettt|(tt|)*2tL", "E|t*4L", "Et|t|t|tL", "E,(t|t)*3,L", "Et*2|t*2|t*3|L", "(Et|)*1tL", "Ett|tt")


def core_chunks(num_layers: int, parallelism: ParallelismConfig) -> tuple[int, ...] | None:
    """Layers of each chunk according to Megatron-Core; None if it refuses the configuration."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    keys = {name: value for name, value in vars(parallelism).items() if "pipeline" in name}
    stages, chunks = keys["pipeline_model_parallel_size"], keys["virtual_pipeline_model_parallel_size"]
    try:
        config = TransformerConfig(
            num_layers=num_layers, hidden_size=8, num_attention_heads=1, pipeline_dtype=torch.float32, **keys
        )
        places = itertools.product([None] if chunks is None else range(chunks), range(stages))
        if config.pipeline_model_parallel_layout is not None:
            rows = config.pipeline_model_parallel_layout.layout
            return tuple(
                sum(kind.name == "decoder" for kind in rows[stage][chunk or 0]) for chunk, stage in places
            )
        layers = [get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage) for chunk, stage in places]
        # Core accepts a last stage with more layers than are left, which leaves the middle a negative number.
        return tuple(layers) if min(layers) >= 0 else None
    except (AssertionError, ValueError):
        return None


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("chunks", [None, 2])
def test_layers_are_divided_as_megatron_core_divides_them(stages: int, chunks: int | None) -> None:
    sizes: dict[str, Any] = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
    }
    ends = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
    accounts = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
    cases = [dict(zip(ends, counts, strict=True)) for counts in itertools.product((None, 1, 2, 4), repeat=2)]
    cases += [dict(zip(accounts, flags, strict=True)) for flags in itertools.product((False, True), repeat=2)]
    valid = 0
    for num_layers, case in itertools.product((4, 6, 7, 8, 10), cases):
        parallelism = ParallelismConfig(**sizes, **case)
        found = chunk_layers(num_layers, parallelism)
        assert found == core_chunks(num_layers, parallelism), (num_layers, case)
        valid += found is not None
    assert valid > 5


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_layout_is_read_as_megatron_core_reads_it(layout: str, stages: int) -> None:
    rows = layout_rows(layout)
    chunks = len(rows) // stages
    parallelism = ParallelismConfig(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
    )
    num_layers = "".join(rows).count("t")
    assert chunk_layers(num_layers, parallelism) == core_chunks(num_layers, parallelism)


def test_the_layout_for_megatron_core_has_embedding_loss_and_mtp_layers() -> None:
    even = ParallelismConfig(pipeline_model_parallel_size=3)
    uneven = dataclasses.replace(
        even, num_layers_in_first_pipeline_stage=2, num_layers_in_last_pipeline_stage=1
    )
    first = ["embedding", "decoder", "decoder"]
    assert core_layout(3, even) is None
    assert core_layout(4, uneven, 2) == [first, ["decoder"], ["decoder", "mtp", "mtp", "loss"]]
    before_loss = dataclasses.replace(even, pipeline_model_parallel_layout="Ett|tm|L")
    assert core_layout(3, before_loss, 1) == [first, ["decoder", "mtp"], ["loss"]]
