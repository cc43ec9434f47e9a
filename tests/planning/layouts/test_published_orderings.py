"""The search prefers the layouts that published runs found faster.

The devices have enough memory for all layouts, since the published software kept gradients in bf16. The figures of the
sources are in benchmarks/planner/data/orderings.yaml.
"""

from __future__ import annotations

import pytest

from benchmarks.planner.published import configurations
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import search
from trainer.contract.rules.facts import Facts, World


def found(configuration: str, *vary: str) -> dict[str, RankedLayout]:
    """The layouts of a published run that differ in the axes `vary`, best first, by name without the sizes that follow
    from them."""
    planned = configurations()[configuration].planned
    trainer, ranks = planned.trainer, planned.machine.gpus_per_node
    facts = Facts(
        model=trainer.model,
        parallelism=trainer.parallelism,
        training=trainer.training,
        optimizer=trainer.optimizer,
        data=trainer.data,
        world=World(path="slurm.train.nodes", count=trainer.world_size // ranks, ranks_each=ranks),
        gpus_per_node=ranks,
        device_memory_gib=1000,
    )
    best = search(facts, planned.machine, top=100, vary=vary).best
    return {layout.name: layout for layout in best}


@pytest.mark.parametrize(
    ("configuration", "axis", "faster", "slower"),
    [
        # Megatron-Bridge, perf-memory-tuning: twice the TP costs 28%, twice the PP at half the DP 6%, and
        # recomputing the MLP 16%
        ("llama3-70b-sft-32gpu", "TP", "TP4 PP4 VPP5 DP2 MBS1", "TP8 PP4 VPP5 MBS1"),
        ("llama3-70b-sft-32gpu", "PP", "TP4 PP4 VPP5 DP2 MBS1", "TP4 PP8 VPP5 MBS1"),
        ("llama3-70b-sft-32gpu", "recompute", "TP4 PP4 VPP5 DP2 MBS1", "recompute"),
        # Azure, dgx_benchmarking
        ("llama3-70b-64gpu-cp2", "CP", "TP4 PP4 VPP5 DP4 MBS1", "TP4 PP4 VPP5 CP2 DP2 MBS1"),
        ("gpt3-175b-128gpu-vpp12", "VPP", "TP4 PP8 VPP2 DP4 MBS1", "TP4 PP8 VPP12 DP4 MBS1"),
        # torchtitan, 405B on 512 H100s: 100 tokens/s with 1F1B, 128 interleaved
        ("llama3-405b-512gpu-torchtitan", "VPP", "TP8 PP8 VPP2 DP8 MBS1", "TP8 PP8 DP8 MBS1"),
    ],
)
def test_faster_layouts_of_published_runs_come_first(
    configuration: str, axis: str, faster: str, slower: str
) -> None:
    layouts = [*found(configuration, axis)]
    first = next(index for index, name in enumerate(layouts) if name.startswith(faster))
    assert slower not in "".join(layouts[: first + 1])
    if axis != "recompute":  # a slower way to recompute is not offered
        assert any(name.startswith(slower) for name in layouts)


def test_more_chunks_of_a_pipeline_are_as_fast() -> None:
    """Megatron-Bridge PR 3107: VPP 10 takes less memory than VPP 5, at the same speed."""
    layouts = found("llama3-70b-sft-32gpu", "VPP")
    few, many = layouts["TP4 PP4 VPP5 DP2 MBS1"], layouts["TP4 PP4 VPP10 DP2 MBS1"]
    assert few.step.total == pytest.approx(many.step.total, rel=0.03)
    assert many.memory.total_gib < few.memory.total_gib
