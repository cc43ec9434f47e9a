"""The page of layouts: its figures are those of the estimates, and it is safe to open."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import search
from hpcgen.planning.memory import GIB, OTHER_GIB, estimate_stage
from hpcgen.planning.predicted_step import machine_of
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import schedule, transfers
from hpcgen.report.layouts.devices import devices_picture
from hpcgen.report.layouts.memory import memory_picture
from hpcgen.report.layouts.page import render_layouts
from hpcgen.report.layouts.schedule import schedule_picture
from hpcgen.run_plan.layouts.result import NodesLayouts, RunLayouts
from hpcgen.run_plan.prediction import predict
from hpcgen.run_plan.training import training_facts
from hpcgen.text import size_text
from tests.cli.reports import Page
from tests.runs import big_run, planned

HOSTILE = "</script><script>alert(1)</script>\"'&<b>"


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> NodesLayouts:
    """GPT-3 175B on 16 nodes, with a few virtual stages."""
    plan = planned(tmp_path_factory.mktemp("gpt"), big_run())
    assert plan.training is not None
    facts, unknown = training_facts(plan.run, plan.config, plan.training.allocation)
    assert not unknown
    counts = plan.training.allocation.ntasks_per_node, plan.training.allocation.nvlink_nodes
    machine = machine_of(plan.config.training, plan.run.cluster.node_type, plan.run.node_type, *counts)
    found = search(facts, machine, top=3, vary=("VPP",))
    return NodesLayouts(run=plan.run, machine=machine, search=found, prediction=predict(plan))


def run_layouts(*on: NodesLayouts) -> RunLayouts:
    return RunLayouts(run=on[0].run, on=on, goal=None, chosen=on[0] if len(on) == 1 else None)


def page(*on: NodesLayouts) -> Page:
    found = Page(render_layouts(run_layouts(*on), on, now=1.76e9))
    assert found.unclosed == []
    return found


def test_the_page_shows_every_layout_with_the_memory_of_its_stages(gpt: NodesLayouts) -> None:
    found = page(gpt)
    assert len(gpt.search.best) > 2
    for layout in gpt.search.best:
        assert layout.name in found.text
        setup = Setup.of_facts(layout.facts, layout.layout)
        for stage in range(layout.layout.pipeline_model_parallel_size):
            estimate = estimate_stage(setup, stage)
            state = f"{estimate.gradient_bytes / GIB:.2f} {estimate.optimizer_bytes / GIB:.2f}"
            assert f"stage {stage} {_weights(estimate) / GIB:.2f} {state}" in found.text


def _weights(estimate) -> int:
    return estimate.parameter_bytes - estimate.gradient_bytes - estimate.optimizer_bytes


def test_bars_add_up_to_the_memory_in_use(gpt: NodesLayouts) -> None:
    layout = gpt.search.best[0]
    picture = memory_picture(layout)
    contents = [stage.contents for stage in picture.stages]
    assert (contents[0], contents[1], contents[-1]) == (
        "12 layers, embedding",
        "12 layers",
        "12 layers, embedding, logits",
    )
    fullest = max(stage.used for stage in picture.stages)
    assert fullest == pytest.approx(layout.memory.total_gib + OTHER_GIB)
    assert min(stage.free for stage in picture.stages) == pytest.approx(layout.free_gib)
    assert picture.summary.endswith(f"so {layout.free_gib:.1f} GiB are free")
    assert all(stage.parts[-1] == layout.nccl_gib for stage in picture.stages)


@pytest.mark.parametrize("batch", [32, 3072])
def test_the_schedule_has_the_passes_of_the_timeline(gpt: NodesLayouts, batch: int) -> None:
    """All of them if there are few microbatches, else the first and last ones with a gap."""
    first = gpt.search.best[0]
    layout = replace(first, facts=first.facts.with_value("training.global_batch_size", batch))
    picture = schedule_picture(layout, gpt.machine)
    expected = schedule(Setup.of_facts(layout.facts, layout.layout), gpt.machine)
    lines = re.findall(r"M(\d+) (\d+)h(\d+)", "".join(strip.d for strip in picture.strips))
    assert {int(y) // 10 for _, y, _ in lines} == set(range(picture.stages))
    is_complete = picture.cut is None
    passes = 2 * layout.layout.num_microbatches * picture.chunks * picture.stages
    assert (len(lines) == passes) == is_complete == (batch == 32)
    shown = expected.total if is_complete else expected.total - _hidden_s(picture, expected)
    longest = max(each.end - each.start for each in expected.passes.intervals)
    length = shown if is_complete else shown / 0.95
    assert max(int(width) for _, _, width in lines) == pytest.approx(10_000 * longest / length, abs=6)


def _hidden_s(picture, expected) -> float:
    """Time that the gap stands for, from the position of the update at the end."""
    (update,) = [mark for mark in picture.blocks if mark.kind == "optimizer"]
    return expected.total - 0.95 * max(expected.optimizer) / (update.width / 100)


def test_ranks_are_placed_as_megatron_core_does(gpt: NodesLayouts) -> None:
    """Tensor-parallel ranks are neighbors, and stages are far apart."""
    layout: RankedLayout = gpt.search.best[0]
    picture = devices_picture(layout, gpt.machine, has_nvlink=True)
    axes, stage_ranks = layout.layout, layout.layout.world_size // layout.layout.pipeline_model_parallel_size
    for node in picture.nodes:
        ranks = [gpu for part in node.parts for gpu in part]
        assert [gpu.stage for gpu in ranks] == [
            rank // stage_ranks for rank in range(8 * node.number, 8 * node.number + 8)
        ]
    first = [gpu for node in picture.nodes for part in node.parts for gpu in part if gpu.is_first]
    assert len(first) == axes.model_parallel_size
    found = transfers(Setup.of_facts(layout.facts, axes), gpt.machine)
    assert [each.sent for each in picture.traffic] == [size_text(each.sent) for each in found]
    assert picture.traffic[0].where == "over NVLink"


def test_curves_over_the_number_of_nodes(gpt: NodesLayouts) -> None:
    """With the same prediction on twice the nodes, and none on many more."""
    more = replace(gpt, search=replace(gpt.search, num_nodes=32))
    none = replace(gpt, search=replace(gpt.search, num_nodes=4096, best=(), num_valid=0), prediction=None)
    found = page(gpt, more, none)
    assert found.charts[-3:] == ["scaling", "days", "cost"]
    assert gpt.prediction is not None
    assert found.series("scaling")["x"] == [128, 256]
    days = found.series("days")
    assert days["middle"][0] == pytest.approx(gpt.prediction.likely.total_s / 86400, rel=1e-4)
    assert days["low"][0] < days["middle"][0] < days["high"][0]
    assert "no layout is valid on 4,096 nodes, with a batch of 1,536 samples" in found.text


def test_names_are_escaped_and_nothing_is_loaded(gpt: NodesLayouts) -> None:
    hostile = replace(gpt.run, config=replace(gpt.run.config, name=HOSTILE))
    found = page(replace(gpt, run=hostile, search=replace(gpt.search, best=gpt.search.best[:1])))
    assert HOSTILE in found.text
    assert [tag for tag, _ in found.tags].count("script") == 2
    assert not [
        value
        for _, attributes in found.tags
        for name, value in attributes.items()
        if name in ("src", "href") and value != "data:,"
    ]
    assert "http" not in re.sub(r"http-equiv", "", found.source)
