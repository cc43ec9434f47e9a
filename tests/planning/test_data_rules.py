"""Rules for the source of samples from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import broken, errors
from trainer.contract.config import Dataset
from trainer.contract.rules import data

CORPUS, WEIGHED = Dataset(prefix="corpus"), Dataset(prefix="weighed", weight=0.5)

REFUSED = {
    "data two ways": (
        {"data__datasets": (CORPUS,)},
        "data.mock",
        data.data_has_one_source,
    ),
    "no data": (
        {"data__mock": False},
        "data",
        data.data_has_one_source,
    ),
    "validation without training data": (
        {"data__mock": False, "data__valid": (CORPUS,)},
        "data.valid",
        data.held_out_blends_need_train,
    ),
    "some weights": (
        {"data__mock": False, "data__datasets": (WEIGHED, CORPUS)},
        "data.datasets[1].weight",
        data.weights_are_given_for_all_or_none,
    ),
    "split below zero": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "99,-1,2"},
        "data.split",
        data.split_is_valid,
    ),
    "evaluation without documents": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "100,0,0"},
        "training.eval_iters",
        data.evaluation_has_samples,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
    "datasets": {"data__mock": False, "data__datasets": (CORPUS, CORPUS)},
    "weighed datasets": {"data__mock": False, "data__datasets": (WEIGHED, WEIGHED)},
    "a blend per split": {"data__mock": False, "data__train": (CORPUS,), "data__valid": (WEIGHED,)},
    "training data alone": {"data__mock": False, "data__train": (CORPUS,)},
    "a split with spaces and fractions": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "0.9, .05, 0.05",
    },
    "no evaluation": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "100,0,0",
        "training__eval_iters": 0,
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


@pytest.mark.parametrize(
    "split", ["", "99", "90,10", "1,2,3,4", "0,1,1", "a,b,c", "1;2;3", "9" * 400 + ",1,1"]
)
def test_a_split_is_three_weights(split):
    found = broken(data__mock=False, data__datasets=(CORPUS,), data__split=split)
    assert found == [("data.split", data.split_is_valid)]
