"""The JSON Schema: editors accept with it what the loader accepts, and mark what the loader refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest

from hpcgen.config import document
from hpcgen.config.cluster import ClusterConfig
from hpcgen.config.node_type import NodeType
from hpcgen.config.presets import PRESETS
from hpcgen.config.run import RunConfig
from hpcgen.config.schema import json_schema
from hpcgen.config.starter import starter
from hpcgen.resources import shipped
from tests.runs import big_run, minimal_run

CORPUS = {"directory": "/c", "source": {"directory": "/text"}}
PACKAGE = Path(document.__file__).parents[1]


@pytest.fixture(scope="module")
def run_schema() -> jsonschema.Draft7Validator:
    schema = json_schema(RunConfig)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.fixture(scope="module")
def cluster_schema() -> jsonschema.Draft7Validator:
    schema = json_schema(ClusterConfig)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.fixture(scope="module")
def node_type_schema() -> jsonschema.Draft7Validator:
    schema = json_schema(NodeType)
    jsonschema.Draft7Validator.check_schema(schema)
    return jsonschema.Draft7Validator(schema)


@pytest.mark.parametrize(
    "values",
    [
        minimal_run(),
        big_run(),
        minimal_run(slurm={"train": {"nodes": None}, "prepare": {"num_tasks": 32, "array_parallelism": 4}}),
        minimal_run(data={"corpus": CORPUS}),
        minimal_run(data={"corpus": {"directory": "/c", "source": {"huggingface": {"repo_id": "a/b"}}}}),
        minimal_run(data={"corpus": {**CORPUS, "include": ["*.zst"], "splits": {"train": ["train/*"]}}}),
    ],
)
def test_valid_runs_are_valid(run_schema, values):
    assert list(run_schema.iter_errors(values)) == []


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_starters_are_valid(run_schema, preset):
    text = starter("mini", "azure-ndv5", "runs/mini", PRESETS.get(preset or ""), "s.json")
    assert list(run_schema.iter_errors(document.parse(text, "f").values)) == []


@pytest.mark.parametrize("name", ["cpu", "ndv4", "ndv5-h200", "aws-p5en", "alps-gh200"])
def test_shipped_node_types_are_valid(node_type_schema, name):
    values = document.read(shipped("topologies") / f"{name}.yaml").values
    assert list(node_type_schema.iter_errors(values)) == []


@pytest.mark.parametrize(
    ("values", "is_valid"),
    [
        ({"extends": "ndv5", "environment": {"NCCL_TOPO_FILE": None}, "health": {"nvme_disks": 4}}, True),
        ({"extends": "ndv5", "processor": {"arch": "aarch64"}, "nvlink": {"domain_nodes": 18}}, True),
        ({"nics": [{"name": "rdmap79s0", "rate_gbit_s": 100}]}, True),
        ({"nics": [{"name": "rdmap79s0"}]}, False),
        ({"nvlink": {"domain_nodes": 0}}, False),
        ({"gpus_per_nod": 8}, False),
    ],
)
def test_the_schema_of_a_node_type(node_type_schema, values, is_valid):
    assert node_type_schema.is_valid(values) == is_valid


def test_null_removes_entries_of_a_profile(cluster_schema):
    values = {"extends": "x", "environment": {"A": None}, "partitions": {"hpc": None, "gpu": {}}}
    assert list(cluster_schema.iter_errors(values)) == []


@pytest.mark.parametrize("path", [*PACKAGE.glob("clusters/*.yaml")], ids=lambda path: path.name)
def test_shipped_profiles_are_valid(cluster_schema, path):
    assert list(cluster_schema.iter_errors(document.read(path).values)) == []


def test_an_extending_profile_needs_no_required_keys(cluster_schema):
    assert list(cluster_schema.iter_errors({"extends": "azure-ndv5", "scratch": "/mnt"})) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("modle", {}),
        ("model.layers", 2),
        ("slurm.train.node", 2),
        ("data.tokenizer.king", "gpt2"),
        ("slurm.train.nodes", 0),
        ("slurm.train.nodes", "2"),
        ("slurm.train.time", "soon"),
        ("name", "a b"),
        ("training.precision", "fp8"),
        ("optimizer.parameter_groups", [{"lr_mult": 0.5}]),
        ("optimizer.parameter_groups", [{"match": "*", "lr": 0.5}]),
        ("checkpoint.changed", "optimizer.lr"),
        ("optimizer.lr", 0),
        ("model.hidden_dropout", 1.0),
        ("secrets", "HF_TOKEN"),
        ("share", "everybody"),
        ("paths", None),
        ("data.corpus", {"source": {}}),
        ("data.corpus.num_output_files", 0),
        ("data.corpus.bad_documents", "ignore"),
        ("data.corpus.source.hugginface", {}),
        ("data.corpus.source.huggingface", {"repo_id": "https://huggingface.co/a/b"}),
        ("data.corpus.source.url", {"template": "https://example.org/{number}"}),
        ("data.corpus.source.token_variable", "not a name"),
        ("data.corpus.include", "*.zst"),
        ("data.corpus.sample_fraction", 1.5),
        ("data.tokenize", {}),
        ("slurm.prepare.num_tasks", 0),
        ("slurm.train.num_tasks", 2),
    ],
)
def test_values_that_the_loader_refuses_are_marked(run_schema, path, value):
    values = minimal_run(data={"mock": True, "corpus": CORPUS})
    *sections, key = path.split(".")
    section = values
    for name in sections:
        section[name] = dict(section.get(name, {}))
        section = section[name]
    section[key] = value
    assert list(run_schema.iter_errors(values))


@pytest.mark.parametrize("key", ["name", "paths"])
def test_required_keys_are_reported_as_missing(run_schema, key):
    values = minimal_run()
    del values[key]
    assert list(run_schema.iter_errors(values))


@pytest.mark.parametrize("cls", [RunConfig, ClusterConfig])
def test_every_key_is_described(cls):
    schema = json_schema(cls)
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        assert section["description"]
        for name, field in section["properties"].items():
            assert field["description"], name
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(cls)}
    json.dumps(schema)
