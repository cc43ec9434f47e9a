"""What all rules have in common: each mistake is one message, with values that work together."""

from __future__ import annotations

import pytest

from hpcgen.planning.repairs import check
from tests.planning.cases import BATCH, CP, GROUPS, PP, SP, TP, errors, valid_facts
from trainer.contract.rules.facts import Facts, World


def test_each_mistake_is_reported_once():
    found = errors(**{TP: 6, PP: 5, "optimizer__min_lr": 1.0, "training__recompute_num_layers": 3})
    assert [message.split()[0] for message in found] == [
        "parallelism.tensor_model_parallel_size",
        "parallelism.pipeline_model_parallel_size",
        "training.recompute_num_layers",
        "optimizer.min_lr",
    ]


def test_hints_are_consistent_with_each_other():
    """TP is taken to be 4, the nearest to 6, when PP is looked at: TP x PP must divide 16 ranks."""
    found = errors(**{TP: 6, PP: 5})
    assert [message.partition("; ")[2] for message in found] == [
        "use 1, 2, 4, 8 or 16",
        "use 1, 2 or 4, or divide the layers unevenly with pipeline_model_parallel_layout",
    ]


def test_one_wrong_size_does_not_cascade():
    """TP = 7 fits neither the heads, the groups, the MLP, the vocabulary, the world nor the batch."""
    [found] = errors(**{TP: 7, GROUPS: 4, SP: True})
    assert found.startswith("parallelism.tensor_model_parallel_size ")
    assert found.endswith("; use 2, 4, 8 or 16")


def test_without_gpus_a_node_can_run_more_ranks():
    facts = valid_facts(**{TP: 2, BATCH: 24})
    facts = Facts(
        model=facts.model,
        parallelism=facts.parallelism,
        training=facts.training,
        optimizer=facts.optimizer,
        data=facts.data,
        world=World(path="slurm.train.nodes", count=1, ranks_each=5),
        gpus_per_node=5,
        device="cpu",
    )
    [problem], _ = check(facts)
    assert problem.path == "slurm.train.nodes"
    assert "1 x 5 = 5 ranks" in problem.reason
    assert problem.hint == (
        "use 2 or 4, or set slurm.train.ntasks_per_node to 2, or choose parallel sizes whose product divides 5"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {TP: 2**53},
        {"model__hidden_size": 2**53 - 1},
        {"nodes": 2**53, TP: 3},
        {BATCH: 2**53 - 1},
        {CP: 2**53},
    ],
)
def test_absurd_numbers_end_in_a_message(changes):
    assert len(errors(**changes)) == 1
