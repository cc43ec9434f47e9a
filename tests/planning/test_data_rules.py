"""Rules for the source of samples from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import errors
from trainer.contract.config import Dataset

CORPUS, WEIGHED = Dataset(prefix="corpus"), Dataset(prefix="weighed", weight=0.5)

REFUSED = {
    "data two ways": (
        {"data__datasets": (CORPUS,)},
        "data.mock conflicts with data.datasets. Samples come from only one of them; keep one of datasets, "
        "mock",
    ),
    "no data": (
        {"data__mock": False},
        "data has no source of samples; set data.corpus, data.datasets, data.train (with valid and test), or "
        "data.mock: true",
    ),
    "validation without training data": (
        {"data__mock": False, "data__valid": (CORPUS,)},
        "data.valid requires data.train, which is empty; set data.train, or remove data.valid and divide "
        "data.datasets with data.split",
    ),
    "some weights": (
        {"data__mock": False, "data__datasets": (WEIGHED, CORPUS)},
        "data.datasets[1].weight is missing, but other datasets of data.datasets have a weight; give all "
        "datasets a weight, or none to weight them by tokens",
    ),
    "split below zero": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "99,-1,2"},
        "data.split must be three weights, for train, valid and test, with train's above 0; use 99990,8,2",
    ),
    "evaluation without documents": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "100,0,0"},
        "training.eval_iters requires validation documents, but data.split = 100,0,0 leaves none; use 0, "
        "or set a data.split with a weight for valid, such as 99990,8,2",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


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
    found = errors(data__mock=False, data__datasets=(CORPUS,), data__split=split)
    assert found == [
        "data.split must be three weights, for train, valid and test, with train's above 0; use 99990,8,2"
    ]
