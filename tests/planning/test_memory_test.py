"""The stage memory-test."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcgen.errors import ConfigErrors
from tests.runs import SHAPE, minimal_run, planned


def test_ranks_that_learn_sizes_from_each_other_cannot_be_measured_alone(tmp_path: Path) -> None:
    run = minimal_run(
        model=SHAPE | {"position_embedding_type": "rope", "mtp_num_layers": 1},
        slurm={"train": {"ntasks_per_node": 3, "time": "1:00:00"}},
    )

    def plan(stage: str, layout: str) -> None:
        parallelism = {"pipeline_model_parallel_size": 3, "pipeline_model_parallel_layout": layout}
        planned(tmp_path, run | {"parallelism": parallelism}, [stage])

    plan("memory-test", "Et|t|mL")
    plan("train", "Et|tm|L")
    with pytest.raises(ConfigErrors, match=r'"Et\|tm\|L" has MTP layers before the last part'):
        plan("memory-test", "Et|tm|L")
