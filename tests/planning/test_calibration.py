"""What a calibration measures for some trainings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.calibration import calibration_config
from hpcgen.planning.step_time.measurements import Measurements, row_mistakes
from tests.runs import big_run, planned
from trainer.contract.calibration import CalibrationConfig, moved_bytes
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.rules.engine import require

FLAT = (
    "parallelism.pipeline_model_parallel_size=1",
    "parallelism.virtual_pipeline_model_parallel_size=null",
    "memory_check=warning",
)


def calibration(
    tmp_path: Path, *overrides: str, node_type: str = "ndv5", measured: Measurements | None = None
) -> CalibrationConfig | None:
    """The calibration for a 13B on 16 nodes."""
    plan = planned(tmp_path, big_run(), overrides=overrides)
    assert plan.trainer is not None
    return calibration_config([plan.trainer], load_node_type(node_type), 8, 1, measured)


def rows(config: CalibrationConfig | None, section: str) -> Sequence[dict[str, Any]]:
    assert config is not None
    return [job.row for job in config.jobs if job.section == section]


def test_only_what_no_table_has_is_measured(tmp_path: Path) -> None:
    config = calibration(tmp_path)
    assert config is not None
    assert {job.section for job in config.jobs} <= {"host", "collectives", "products", "attention", "memory"}
    assert all(row.get("domains", 1) > 1 for row in rows(config, "collectives"))
    assert {row["collective"] for row in rows(config, "collectives")} >= {"all_gather", "reduce_scatter"}
    results = {
        section: tuple(measured(section, row) for row in rows(config, section))
        for section in ("host", "collectives", "products", "attention", "memory")
    }
    table = Measurements("H100 SXM 80 GB", **results)
    assert calibration(tmp_path, measured=table) is None


def measured(section: str, row: dict[str, Any]) -> dict[str, Any]:
    """A row with results."""
    if section != "memory":
        return {**row, "us": 1000.0}
    per_value = moved_bytes(row)[row["pass"] == "backward"]
    return {**row, "us": 1000.0, "bytes": per_value * row["tokens"] * row["width"]}


def test_gpus_without_a_table_need_all_sections(tmp_path: Path) -> None:
    config = calibration(tmp_path, node_type="a100-sxm")
    results = {"us": 1.0, "watts": 1.0, "sm_mhz": 1.0, "alone_us": 1.0, "beside_us": 1.0}
    results |= {"product_alone_us": 1.0, "product_beside_us": 1.0}
    for section in ("host", "collectives", "products", "attention", "memory", "beside", "power"):
        assert rows(config, section)
        for row in rows(config, section):
            wrong = list(row_mistakes(section, {**results, "bytes": 1, **row}))
            assert all(text.removesuffix(" is not a column") in results | {"bytes": 1} for text in wrong)


def test_layers_with_experts_and_cuda_graphs_have_rows_of_their_own(tmp_path: Path) -> None:
    launches = rows(calibration(tmp_path, "training.cuda_graph_impl=transformer_engine"), "host")
    assert [(row["tensor_parallel"], row["graphs"]) for row in launches] == [(True, True)]
    mixture = (
        "model.num_moe_experts=8",
        "model.moe_layer_freq=[0,1,1,1]",
        "model.num_layers=4",
        "model.add_bias_linear=false",
        *FLAT,
    )
    dense, experts = rows(calibration(tmp_path, *mixture, "parallelism.expert_model_parallel_size=2"), "host")
    assert (dense["layer"], experts["layer"]) == ("dense", "experts")
    assert experts["layers"] == f"{dense['layers']}, 4 experts"


@pytest.mark.parametrize("preset", ["1.3b", "llama3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_trainings_with_the_layers_of_a_run_obey_the_rules(tmp_path: Path, preset: str) -> None:
    plan = planned(tmp_path, big_run(preset=preset, data={"mock": True}, memory_check="warning"))
    assert plan.trainer is not None
    config = calibration_config([plan.trainer], load_node_type("ndv5"), 8, 1)
    assert config is not None
    launched = [job for job in config.jobs if job.section == "host"]
    assert launched
    for job in launched:
        fewer, more = job.trainings
        require(fewer)
        require(more)
        assert {each.normalization for each in (fewer.model, more.model)} == {
            plan.trainer.model.normalization
        }
        assert moe_layer_pattern(fewer.model) == (job.row["layer"] == "experts",) * 4


def test_cpus_measure_small_transfers_and_products_only(tmp_path: Path) -> None:
    config = calibration(tmp_path, node_type="cpu")
    assert config is not None
    assert config.device == "cpu"
    assert {job.section for job in config.jobs} == {"collectives", "products", "attention"}
