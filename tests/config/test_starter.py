"""The run file of `hpcgen init`: it loads, it can be planned, and each commented-out key can be used as written."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hpcgen.config.document import parse
from hpcgen.config.loader import load_run
from hpcgen.config.presets import PRESETS
from hpcgen.config.profiles import load_cluster
from hpcgen.config.run import RunConfig
from hpcgen.config.slurm import StageSettings
from hpcgen.config.starter import run_file, starter
from hpcgen.config.validation import build
from hpcgen.planning.starting_layout import Start, starting_layout
from hpcgen.run_plan.plan import plan

COMMENTED_KEY = re.compile(r"(?m)^ *# [a-z_0-9]+: .*$")


def starter_text(
    preset: str | None, cluster: str = "azure-ndv5", gpus_per_node: int = 0, nodes: int = 1
) -> str:
    return starter(
        "mini",
        cluster,
        "runs/mini",
        PRESETS.get(preset or ""),
        "./mini.schema.json",
        gpus_per_node=gpus_per_node,
        nodes=nodes,
    )


def uncommented(text: str) -> str:
    """The text with all keys and sections uncommented."""
    return re.sub(r"(?m)^( *)# ([a-z_0-9]+:(?: .*)?)$", r"\1\2", text)


@pytest.mark.parametrize("cluster", ["azure-ndv5", "local"])
@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_it_loads_as_it_is(tmp_path: Path, preset: str | None, cluster: str):
    path = tmp_path / "mini.yaml"
    path.write_text(starter_text(preset, cluster))
    run = load_run(path)
    assert run.config.preset == preset
    assert run.config.cluster == cluster


@pytest.mark.parametrize("preset", [None, *PRESETS])
def test_it_plans_at_once_on_the_fewest_nodes_that_hold_the_preset(tmp_path: Path, preset: str | None):
    path = tmp_path / "mini.yaml"
    cluster, node_type = load_cluster("azure-ndv5", tmp_path)
    start = starting_layout(PRESETS.get(preset or ""), node_type, StageSettings(), cluster)
    assert not start.changes
    nodes = start.num_nodes
    path.write_text(starter_text(preset, gpus_per_node=8, nodes=nodes))
    run = load_run(path)
    found = plan(run, ["prepare", "train"], exists=lambda path: True)
    assert list(found.stages) == ["prepare", "train"]
    assert found.layout is not None
    assert not any("GiB" in warning for warning in found.warnings)
    assert nodes == {"30b": 2, "175b": 12, "llama3-70b": 16, "llama3-405b": 56, "mixtral-8x7b": 4}.get(
        preset or "", 80 if preset == "deepseek-v3" else 1
    )


@pytest.mark.parametrize(("settings", "nodes"), [({}, 12), ({"nodes": 20}, 20), ({"ntasks_per_node": 4}, 24)])
def test_a_new_run_has_at_least_the_nodes_of_the_profile(tmp_path: Path, settings: dict, nodes: int):
    cluster, node_type = load_cluster("azure-ndv5", tmp_path)
    assert starting_layout(PRESETS["175b"], node_type, StageSettings(**settings), cluster) == Start(nodes)


@pytest.mark.parametrize(
    "unknown", [{"gpu_memory_gib": None}, {"gpu_memory_gib": 20.0, "gpu_memory_gb_s": None}]
)
def test_a_new_run_has_the_nodes_of_its_layout_if_no_other_can_be_found(tmp_path: Path, unknown: dict):
    cluster, node_type = load_cluster("azure-ndv5", tmp_path)
    start = starting_layout(
        PRESETS["175b"], dataclasses.replace(node_type, **unknown), StageSettings(), cluster
    )
    assert start == Start(4)


@pytest.mark.parametrize("preset", [None, "125m"])
def test_every_key_can_be_uncommented_and_means_its_default(preset: str | None):
    text = starter_text(preset)
    sections = PRESETS[preset].sections if preset else {}
    usual = build(RunConfig, _with_preset(text, sections))
    assert usual[1] == ()
    assert len(COMMENTED_KEY.findall(text)) > 80
    assert COMMENTED_KEY.findall(uncommented(text)) == []
    assert build(RunConfig, _with_preset(uncommented(text), sections)) == usual


def _with_preset(text: str, sections: dict):
    from hpcgen.config.document import constant, merge

    return merge(constant(sections, "preset"), parse(text, "mini.yaml"))


def test_it_is_readable():
    text = starter_text("175b")
    assert text.startswith("# yaml-language-server: $schema=./mini.schema.json\n")
    assert max(len(line) for line in text.splitlines()) <= 130
    assert all(line == line.rstrip() for line in text.splitlines())
    assert "# num_layers: 96   # from the preset" in text
    assert "Megatron-LM" in text


def test_it_lists_the_next_commands():
    text = starter_text(None)
    assert (
        "#   hpcgen data plan -c run.yaml\n#   hpcgen submit prepare index-cache train -c run.yaml\n" in text
    )
    assert "#   hpcgen validate -c run.yaml\n#   hpcgen render train -c run.yaml -o train.sh\n" in text


def test_a_run_file_without_a_corpus_does_not_mention_planning():
    text = run_file({"name": "a", "data": {"mock": True}}, "s.json")
    assert "hpcgen data plan" not in text


def test_every_field_is_explained():
    lines = starter_text(None).splitlines()
    for index, line in enumerate(lines):
        if COMMENTED_KEY.fullmatch(line) or re.match(r" *[a-z_]+:", line):
            assert re.match(r" *# .*[.;:)\w]$", lines[index - 1]), line


def test_awkward_names_survive_the_round_trip():
    for name in ("no", "true", "1e5", "007", "1-2", "null"):
        text = starter(name, "local", "runs/x y", None, "s.json")
        values = parse(text, "f").values
        assert (values["name"], values["paths"]["run_dir"]) == (name, "runs/x y")
