"""The search finds what an evaluation of every layout of its space finds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Iterator

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.layouts.result import RankedLayout
from hpcgen.planning.layouts.search import ranked, search, seconds
from hpcgen.planning.layouts.space import AXES, Space
from hpcgen.planning.resources import device_memory
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time import Machine, estimate_step_time
from hpcgen.planning.step_time.estimate import Estimator
from tests.planning.cases import valid_facts
from trainer.contract.rules.engine import ERRORS
from trainer.contract.rules.facts import Facts

DENSE = {
    "model__num_layers": 6,
    "model__num_query_groups": 4,
    "model__swiglu": True,
    "model__add_bias_linear": False,
    "training__global_batch_size": 8,
    "training__micro_batch_size": 1,
}
EXPERTS = DENSE | {
    "model__num_layers": 4,
    "model__num_moe_experts": 4,
    "model__moe_router_topk": 2,
    "training__global_batch_size": 4,
}
LATENT = EXPERTS | {
    "model__position_embedding_type": "rope",
    "model__multi_latent_attention": True,
    "model__num_query_groups": None,
    "model__mtp_num_layers": 1,
    "model__moe_layer_freq": (0, 1, 1, 1),
}
DOCUMENTS = {"data__reset_attention_mask": True, "training__global_batch_size": 8, "model__num_layers": 4}
CASES = {
    "dense, one node": ("h100-sxm", 1, 1, 80, DENSE),
    "dense, little memory": ("a100-sxm", 1, 1, 5.5, DENSE | {"model__hidden_size": 2048}),
    "documents, two nodes": ("h200-sxm", 2, 1, 141, DOCUMENTS),
    "experts": ("h100-sxm", 1, 1, 4.5, EXPERTS),
    "latent attention with MTP, little memory": ("h100-sxm", 1, 1, 4.6, LATENT),
    "NVL72": ("gb200-nvl72", 3, 18, 6, DENSE | {"model__num_layers": 7}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_search_finds_the_best_of_all_layouts(
    case: tuple[str, int, int, float, dict[str, object]],
) -> None:
    name, nodes, nvlink_nodes, memory_gib, changes = case
    node_type = load_node_type(name)
    ranks = node_type.gpus_per_node
    facts = dataclasses.replace(
        valid_facts(memory_gib, nodes=nodes, **changes), gpus_per_node=ranks, nvlink_nodes=nvlink_nodes
    )
    facts = dataclasses.replace(facts, world=dataclasses.replace(facts.world, ranks_each=ranks))
    machine = Machine.of(node_type, facts.nvlink_devices, ranks)

    every = [*evaluated(facts, machine)]
    best: dict[Hashable, RankedLayout] = {}
    # where the GPU waits for the host, recomputation takes no time, and less of it comes first
    for layout in sorted(every, key=lambda layout: round(seconds(layout), 9)):
        best.setdefault(sizes(layout), layout)
    expected = [*ranked([*best.values()], 5)]

    assert len(expected) == 5
    found = search(facts, machine, top=5)
    assert [layout.name for layout in found.best] == [layout.name for layout in expected]
    for layout in found.best:
        assert layout.step == estimate_step_time(Setup.of_facts(layout.facts, layout.layout), machine)


def evaluated(facts: Facts, machine: Machine) -> Iterator[RankedLayout]:
    """Yields every layout of the space that is valid and fits."""
    space, estimator = Space(facts, AXES), Estimator(machine)
    for layers in space.layers():
        for pipeline in space.pipelines(layers):
            for run in [space.without_recomputation(pipeline), *itertools.chain(*space.recomputed(pipeline))]:
                memory = device_memory(run)
                is_valid = not any(True for rule in ERRORS for _ in rule(run))
                if memory is not None and memory.free_gib >= 0 and is_valid:
                    assert run.layout is not None
                    yield RankedLayout(
                        facts=run,
                        changes={},
                        memory=memory.estimate,
                        free_share=memory.free_gib / memory.available_gib,
                        is_risky=memory.is_tight,
                        step=estimator.step_time(Setup.of_facts(run, run.layout)),
                    )


def sizes(layout: RankedLayout) -> Hashable:
    """The part of the name that says the sizes."""
    return layout.name.partition(",")[0]
