"""The search for layouts: everything that it offers is valid and fits, and nothing that it leaves out is faster."""

from __future__ import annotations

import dataclasses

import pytest

from hpcgen.config.node_types import load_node_type
from hpcgen.planning.layouts.search import search
from hpcgen.planning.predicted_step import NoPrediction
from hpcgen.planning.repairs import check
from hpcgen.planning.step_time import Machine
from tests.planning.cases import valid_facts

H100 = Machine.of(load_node_type("h100-sxm"), nvlink_devices=8)
RUN = valid_facts(nodes=1, training__global_batch_size=16)


def test_offered_layouts_are_valid_and_fit_and_changes_lead_to_them() -> None:
    found = search(RUN, H100)
    assert found.best
    for layout in found.best:
        changed = RUN
        for path, value in layout.changes.items():
            changed = changed.with_value(path, value)
        assert changed == layout.facts
        assert check(changed)[0] == []
    assert len({layout.name for layout in found.best}) == len(found.best)


def test_own_layout_is_evaluated_unless_it_is_invalid() -> None:
    own = search(RUN, H100, top=1, vary=("TP",)).own
    assert own is not None
    assert not own.changes
    invalid = RUN.with_value("parallelism.tensor_model_parallel_size", 3)
    found = search(invalid, H100, top=1)
    assert found.own is None
    assert found.best


def test_only_the_given_axes_change() -> None:
    for layout in search(RUN, H100, vary=("TP", "MBS")).best:
        assert set(layout.changes) <= {
            "parallelism.tensor_model_parallel_size",
            "parallelism.sequence_parallel",
            "training.micro_batch_size",
        }


def test_nothing_fits_small_devices() -> None:
    found = search(dataclasses.replace(RUN, device_memory_gib=3.1), H100)
    assert found.best == ()
    assert found.own is None
    assert found.num_valid > 0 == found.num_fitting


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model__layer_spec": "layers:spec"}, "layer_spec"),
        ({"device_memory_gib": None}, "memory"),
        ({"model__vocab_size": None}, "vocabulary"),
    ],
)
def test_what_is_unknown_is_no_prediction(change: dict[str, object], reason: str) -> None:
    with pytest.raises(NoPrediction, match=reason):
        search(valid_facts(**change), H100)


def test_axes_that_need_more_ranks_than_there_are_offer_nothing() -> None:
    found = search(RUN.with_value("parallelism.tensor_model_parallel_size", 16), H100, vary=("PP", "MBS"))
    assert found.best == ()
