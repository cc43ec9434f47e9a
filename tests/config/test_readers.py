"""The two readers of a document agree: trainer.contract.config.from_dict accepts right ones, and pydantic names what is
wrong in others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.document import constant
from hpcgen.config.node_type import NodeType
from hpcgen.config.pydantic_reader import read, schema_problems
from hpcgen.config.run import RunConfig
from hpcgen.config.validation import build
from tests.runs import minimal_run
from trainer.contract.config import ConfigError, from_dict

RIGHT: dict[type, dict[str, Any]] = {
    RunConfig: minimal_run(
        container={"mounts": [{"source": "/a", "read_only": True}]},
        environment={"A": "1"},
        data={
            "datasets": [{"prefix": "/a", "weight": 2}],
            "tokenizer": {"kind": "bytes"},
            "corpus": {
                "directory": "/c",
                "source": {"url": {"template": "https://h/{index}", "count": 2}},
                "include": ["*.zst"],
                "splits": {"train": ["train/*"]},
                "sample_fraction": 0.5,
            },
        },
        slurm={
            "train": {"nodes": 2, "extra_directives": ["--mail-type=FAIL"]},
            "prepare": {"num_tasks": 3, "mem": "64G"},
        },
    ),
    ClusterConfig: {"node_type": "cpu", "partitions": {"a": {"max_nodes": 2}}, "environment": {"A": "b"}},
    NodeType: {
        "description": "x",
        "device": "cpu",
        "gpus_per_node": 0,
        "peak_tflops": {"bf16": 1},
        "environment": {"A": {"value": "1", "why": "w", "source": "s"}},
    },
}

ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "x", "cpu", "bf16", "rope", "1"]),
    st.lists(st.integers(0, 2), max_size=2),
    st.dictionaries(st.sampled_from(["a", "prefix", "nodes"]), st.integers(0, 2), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


def accepted(cls: type, values: Any) -> Any:
    try:
        return from_dict(cls, values, where="")
    except ConfigError:
        return None


@pytest.mark.parametrize("cls", RIGHT)
def test_both_readers_agree_on_a_valid_document(cls: type) -> None:
    assert accepted(cls, RIGHT[cls]) == read(cls, RIGHT[cls])
    assert build(cls, constant(RIGHT[cls], "x")) == (read(cls, RIGHT[cls]), ())


@pytest.mark.parametrize("cls", RIGHT)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_both_readers_accept_and_refuse_the_same_documents(cls: type, data: st.DataObject) -> None:
    values = copy.deepcopy(RIGHT[cls])
    *way, key = data.draw(st.sampled_from([place for place in places(values) if place]))
    section: Any = values
    for step in way:
        section = section[step]
    section[key] = data.draw(ANYTHING)
    if isinstance(section, dict) and data.draw(st.booleans()):
        section["extra"] = data.draw(ANYTHING)
    found = accepted(cls, values)
    if found is not None:
        assert not list(schema_problems(cls, values))
        assert found == read(cls, values)
    elif build(cls, constant(values, "x"))[0] is not None:
        pytest.fail(f"only pydantic takes {values}")
