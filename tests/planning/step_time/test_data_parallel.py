"""What data parallelism adds to a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.memory.parameters import stage_parameter_counts
from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.collectives import ADDED_SHARE, Group, Links
from hpcgen.planning.step_time.data_parallel import DataParallel, data_parallel_time
from hpcgen.planning.step_time.machine import Machine
from hpcgen.planning.step_time.pipeline import replay
from tests.planning.cases import PP, VPP, valid_facts
from trainer.contract.optimizers import optimizer_of

LINKS = Links(Machine.of(load_node_type("ndv5-h200"), nvlink_devices=8))
"""A machine whose GPU model has no measured rows."""
GROUP = Group(16, 8)
"""The 16 ranks of two nodes."""
OVERLAP = {"parallelism__overlap_grad_reduce": True, "parallelism__overlap_param_gather": True}
SECONDS = 0.03
"""A forward pass of all layers."""


def setup(**changes: Any) -> Setup:
    facts = valid_facts(**{"model__untie_embeddings_and_output_weights": True, **changes})
    assert facts.layout is not None
    optimizer = optimizer_of(facts.resolved_optimizer)
    return Setup(facts.resolved_model, facts.parallelism, facts.training, facts.layout, optimizer)


def exposed(given: Setup) -> DataParallel:
    stages = given.layout.pipeline_model_parallel_size
    chunks = given.layout.virtual_pipeline_model_parallel_size
    forward = [[SECONDS / stages / chunks] * chunks] * stages
    backward = [[2 * seconds for seconds in stage] for stage in forward]
    timeline = replay(forward, backward, given.layout.num_microbatches)
    return data_parallel_time(given, forward, backward, timeline, LINKS)


def parameters(given: Setup) -> float:
    counts = stage_parameter_counts(given, 0)
    return counts.tables + counts.layers


def test_without_overlap_all_transfers_are_waited_for() -> None:
    """Gradients are reduced in fp32, weights gathered in bf16."""
    given = setup()
    found = exposed(given)
    assert found.reduction == pytest.approx(LINKS.reduce_scatter(4 * parameters(given), GROUP))
    assert found.gather == pytest.approx(LINKS.all_gather(2 * parameters(given), GROUP))


def test_gradients_of_another_program_may_be_smaller() -> None:
    fp32, bf16 = setup(), dataclasses.replace(setup(), gradient_bytes=2)
    assert exposed(bf16).reduction == pytest.approx(exposed(fp32).reduction / 2, rel=0.05)


def test_with_overlap_one_bucket_is_waited_for() -> None:
    """The rest slows the passes that it runs next to."""
    given = setup(**OVERLAP)
    buckets = round(parameters(given) / 40e6)
    assert buckets > 1
    bucket = parameters(given) / buckets
    found = exposed(given)
    for seconds, of_bucket in (
        (found.reduction, LINKS.reduce_scatter(4 * bucket, GROUP)),
        (found.gather, LINKS.all_gather(2 * bucket, GROUP)),
    ):
        assert seconds == pytest.approx(of_bucket * (1 + ADDED_SHARE.value * (buckets - 1)))


def test_slow_network_is_not_hidden() -> None:
    """With more to transfer than the passes take, the rest is waited for."""
    slow = dataclasses.replace(LINKS.machine.network_bandwidth, value=1e8)
    machine = Machine(**{**vars(LINKS.machine), "network_bandwidth": slow})
    given = setup(**OVERLAP)
    forward, backward = [[SECONDS]], [[2 * SECONDS]]
    timeline = replay(forward, backward, given.layout.num_microbatches)
    found = data_parallel_time(given, forward, backward, timeline, Links(machine))
    alone = Links(machine).reduce_scatter(4 * parameters(given), GROUP)
    assert alone - 2 * SECONDS < found.reduction < alone


def test_stages_that_end_early_hide_their_reduction() -> None:
    """All stages but the first reduce everything at once, while the stages before them finish."""
    with_stages = exposed(setup(**OVERLAP, **{PP: 4}))
    interleaved = exposed(setup(**OVERLAP, **{PP: 4, VPP: 3}))
    alone = exposed(setup(**{PP: 4}))
    assert interleaved.reduction <= with_stages.reduction < alone.reduction


def test_tied_embedding_is_reduced_once_more() -> None:
    tied = setup(**{PP: 2}, model__untie_embeddings_and_output_weights=False)
    untied = setup(**{PP: 2})
    table = 50304 * 1024
    assert exposed(tied).reduction - exposed(untied).reduction == pytest.approx(
        LINKS.all_reduce(4 * table, Group(2, 1)), rel=0.01
    )
