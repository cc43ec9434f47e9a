"""Warnings about slow layouts name a layout that is faster, fits and obeys the rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.run_plan.plan import Plan
from tests.runs import big_run, planned

WARNED_KEYS = (
    "parallelism.tensor_model_parallel_size",
    "parallelism.pipeline_model_parallel_size",
    "parallelism.expert_model_parallel_size",
    "training.micro_batch_size",
    "training.recompute_granularity",
)


def plan_of(tmp_path: Path, nodes: int, *overrides: str, preset: str = "175b") -> Plan:
    settings = {"train": {"nodes": nodes, "time": "1-00:00:00"}}
    return planned(tmp_path, big_run(preset=preset, slurm=settings, data={"mock": True}), overrides=overrides)


def speed_warnings(plan: Plan) -> list[str]:
    """The warnings about the speed of the layout, without the places of their values."""
    texts = [text.partition(": ")[2] for text in plan.warnings]
    return [text for text in texts if text.startswith(WARNED_KEYS)]


SLOW = {
    "a bubble": (
        ("parallelism.virtual_pipeline_model_parallel_size=1", "training.global_batch_size=128"),
        "parallelism.pipeline_model_parallel_size = 8 results in a pipeline bubble of 22%",
        "TP4 PP8 VPP",
    ),
    "tensor parallelism between nodes": (
        ("parallelism.tensor_model_parallel_size=16",),
        "parallelism.tensor_model_parallel_size = 16 is more than the 8 GPUs of a node",
        "use 8. TP4 PP8 VPP6 DP4 MBS1 is predicted",
    ),
    "needless recomputation": (
        (
            "training.recompute_granularity=full",
            "training.recompute_method=uniform",
            "training.recompute_num_layers=1",
        ),
        "training.recompute_granularity = full is not needed: without recomputation, the tensors take about 68.5 GiB",
        "set recompute_granularity, recompute_method, recompute_num_layers to null. TP4 PP8 VPP6 DP4 MBS1 is predicted",
    ),
    "small microbatches": (
        (
            "parallelism.tensor_model_parallel_size=8",
            "model.seq_length=512",
            "training.global_batch_size=256",
        ),
        "training.micro_batch_size = 1 is too small to fill the GPUs",
        "use 8. TP8 PP8 VPP6 DP2 MBS8 is predicted",
    ),
}


@pytest.mark.parametrize(("overrides", "reason", "layout"), SLOW.values(), ids=SLOW)
def test_a_slow_layout_is_told_with_a_faster_one(tmp_path, overrides, reason, layout):
    found = speed_warnings(plan_of(tmp_path, 16, *overrides))
    [warning] = [text for text in found if text.startswith(reason)]
    assert layout in warning
    assert warning.endswith(". hpcgen layouts lists the fastest")


FULL = (
    "training.recompute_granularity=full",
    "training.recompute_method=uniform",
    "training.recompute_num_layers=1",
)
SEVERAL = {
    "recomputation and a small microbatch": (
        "13b",
        64,
        ("parallelism.tensor_model_parallel_size=2", *FULL),
        2,
    ),
    "three warnings": ("13b", 64, ("parallelism.tensor_model_parallel_size=8", *FULL), 3),
    "tensor parallelism between nodes, and short samples": (
        "175b",
        16,
        (
            "parallelism.tensor_model_parallel_size=16",
            "model.seq_length=512",
            "training.global_batch_size=256",
        ),
        2,
    ),
    "the fastest layout recomputes less": (
        "llama3-70b",
        16,
        ("parallelism.tensor_model_parallel_size=8", *FULL),
        1,
    ),
}


@pytest.mark.parametrize(("preset", "nodes", "overrides", "count"), SEVERAL.values(), ids=SEVERAL)
def test_all_warnings_of_a_run_name_the_same_layout(tmp_path, preset, nodes, overrides, count):
    """Each named the fastest layout of its own axes: TP8 DP64 MBS16, TP8 DP64 MBS1 and PP2 VPP7 DP256 MBS2."""
    found = speed_warnings(plan_of(tmp_path, nodes, "training.micro_batch_size=1", *overrides, preset=preset))
    layouts = [re.search(r"((?:TP|PP|DP)\d+ [^.;]*) is predicted ([^.]*)", text) for text in found]
    assert len([layout for layout in layouts if layout]) == count
    assert len({layout[0] for layout in layouts if layout}) == 1


@pytest.mark.parametrize(("size", "is_told"), [(8, True), (2, False)])
def test_tensor_parallelism_that_dominates_is_told(tmp_path, size, is_told):
    sizes = f"parallelism.tensor_model_parallel_size={size}", "training.micro_batch_size=2"
    plan = plan_of(tmp_path, 64, *sizes, "training.cuda_graph_impl=transformer_engine", preset="13b")
    found = [text for text in speed_warnings(plan) if "more than needed: tensor-parallel transfers" in text]
    assert len(found) == is_told
    assert all("PP2 VPP7 DP256 MBS2" in text for text in found)


@pytest.mark.parametrize(
    ("targets", "grouped", "size", "is_told"),
    [(None, False, 1, True), (None, False, 8, False), (["linear_qkv"], None, 1, False)],
    ids=["adapters of experts", "large microbatches", "adapters of the attention"],
)
def test_adapters_of_experts_that_are_slower_than_all_weights_are_told(
    tmp_path, targets, grouped, size, is_told
):
    """The remedy that the warning names has no such warning."""
    base = tmp_path / "base/iter_0000001"
    base.mkdir(parents=True)
    (base / "COMPLETE").touch()
    run = big_run(
        preset="mixtral-8x7b",
        slurm={"train": {"nodes": 2, "time": "1-00:00:00"}},
        data={"mock": True},
        checkpoint={"load": str(base.parent), "finetune": True, "keep_last": 5},
        lora={"rank": 16, "target_modules": targets},
        parallelism={
            **{"pipeline_model_parallel_size": 1, "virtual_pipeline_model_parallel_size": 1},
            **{"expert_model_parallel_size": 4, "moe_grouped_gemm": grouped},
        },
        training={"global_batch_size": 256, "micro_batch_size": size},
        memory_check="warning",
    )
    found = [text for text in planned(tmp_path, run).warnings if "lora.target_modules" in text]
    assert len(found) == is_told
    for text in found:
        own, of_all, remedy = (int(number.replace(",", "")) for number in re.findall(r"([\d,]+) ms", text))
        assert remedy < of_all < own
        assert "with [linear_qkv, linear_proj]" in text


NOT_TOLD = {
    "without a speed in fp32, a bubble keeps its plain hint": (
        "13b",
        (
            "training.precision=fp32",
            "memory_check=warning",
            "parallelism.pipeline_model_parallel_size=8",
            "training.global_batch_size=256",
        ),
        ["; use more virtual stages"],
    ),
    "recomputation that costs little": (
        "mixtral-8x7b",
        ("training.recompute_granularity=selective", "training.recompute_modules=[moe_act]"),
        [],
    ),
}


@pytest.mark.parametrize(("preset", "overrides", "endings"), NOT_TOLD.values(), ids=NOT_TOLD)
def test_what_no_prediction_justifies_is_not_told(tmp_path, preset, overrides, endings):
    warnings = speed_warnings(plan_of(tmp_path, 16, *overrides, preset=preset))
    assert len(warnings) == len(endings)
    assert all(map(str.endswith, warnings, endings))


@pytest.mark.parametrize(
    ("preset", "nodes"),
    [
        ("1.3b", 8),
        ("13b", 64),
        ("30b", 2),
        ("30b", 64),
        ("175b", 128),
        ("llama3-8b", 16),
        ("llama3-70b", 64),
        ("llama3-405b", 112),
        ("mixtral-8x7b", 16),
        ("deepseek-v3", 128),
    ],
)
def test_a_preset_is_not_slow_on_its_usual_nodes(tmp_path, preset, nodes):
    assert speed_warnings(plan_of(tmp_path, nodes, preset=preset)) == []
