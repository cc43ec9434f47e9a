from __future__ import annotations

import json

import pytest

from tests.cli.command import hpcgen, listing
from tests.runs import big_run, minimal_run, write_yaml


@pytest.fixture
def run_file(workplace):
    return write_yaml(workplace / "run.yaml", big_run())


def test_it_tells_what_the_run_would_do(workplace, run_file):
    before = listing(workplace)
    found = hpcgen("validate", "-c", run_file)
    assert found.status == 0
    lines = dict(line.split("  ", 1) for line in found.stdout.splitlines())
    assert lines["layout"].strip() == "TP4 PP8 VPP6 CP1 DP4, 384 microbatches on 128 ranks"
    assert lines["parameters"].strip() == "174,604,836,864"
    assert "cannot be seen from this machine" in found.stderr
    assert listing(workplace) == before


def test_json_is_one_document(run_file):
    found = json.loads(hpcgen("validate", "-c", run_file, "--json").stdout)
    assert found["name"] == "big"
    assert found["layout"].startswith("TP4 PP8")


def test_other_stages(workplace):
    values = minimal_run(data={"tokenize": {"input": ["a.jsonl"], "output_prefix": "tokens/c"}})
    run_file = write_yaml(workplace / "run.yaml", values)
    found = hpcgen("validate", "tokenize", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "a.jsonl: no such file, and stage tokenize needs it" in found.stderr
    (workplace / "a.jsonl").touch()
    summary = json.loads(hpcgen("validate", "tokenize", "-c", run_file, "--json").stdout)
    assert summary["stages"]["tokenize"]["time_s"] == 86400
    assert "layout" not in summary


def test_all_mistakes_one_line_each_and_their_number(run_file):
    sets = ("name=a b", "model.num_layers=x", "trainign.seed=1", "slurm.train.time=5:00")
    found = hpcgen("validate", "-c", run_file, *(word for each in sets for word in ("--set", each)))
    assert (found.status, found.stdout) == (2, "")
    *mistakes, summary = found.stderr.splitlines()
    assert [line.split(": ")[1].split(" ")[0] for line in mistakes] == [
        "model.num_layers",
        "trainign",
        "name",
    ]
    assert all(line.startswith("--set ") for line in mistakes)
    assert summary == f"{len(mistakes)} mistakes; nothing was written or submitted"
    assert "\x1b" not in found.stderr
