"""`hpcgen cluster upgrade`: today's form of older files, with the same facts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from hpcgen.config import document as documents
from hpcgen.config import upgrade
from hpcgen.config.node_type import NodeType
from hpcgen.config.node_types import load_node_type, read_node_type
from tests.cli.command import hpcgen, listing

PROFILE = """\
extends: azure-ndv5   # ours
slurm_version: "25.11"
slurm:
  partition: hpc
  extra_directives:
    - --segment=16     # of 18 nodes
    - --mail-type=FAIL
  train: {extra_directives: ["--segment=8"]}
"""
UPGRADED = """\
extends: azure-ndv5   # ours
slurm_version: "25.11"
slurm:
  partition: hpc
  extra_directives:
    - --mail-type=FAIL
  train: {segment: 8}
  segment: 16  # of 18 nodes
"""


def standalone() -> str:
    """A node type as for 0.2.0, which repeats what is true of every H100: one fact differs, one is missing, and one
    variable is its own."""
    facts = read_node_type("h100-sxm").values | {
        "description": "8 x H100 with less memory",
        "gpu_memory_gib": 60,
    }
    facts["environment"] |= {"MINE": {"value": "1", "why": "only here", "source": "us"}}
    facts["environment"]["NCCL_DEBUG"] |= {"why": "we like it"}
    facts["sources"]["gpu_memory_gib"] = "measured"
    del facts["extends"], facts["compute_capability"], facts["sources"]["compute_capability"]
    lines = [f"{key}: {json.dumps(value)}" for key, value in facts.items()]
    text = "# our nodes\n" + "\n".join(lines) + "\n"
    return text.replace("gpu_memory_gib: 60", "# from nvidia-smi\ngpu_memory_gib: 60    # cut down")


@pytest.fixture
def files(workplace: Path) -> Path:
    for name, text in (("clusters/orion.yaml", PROFILE), ("topologies/mine.yaml", standalone())):
        path = workplace / name
        path.parent.mkdir()
        path.write_text(text)
    return workplace


def test_directives_of_a_profile_become_keys_and_keep_their_comments(files):
    shown = hpcgen("cluster", "upgrade", "clusters/orion.yaml")
    assert shown.status == 0
    assert "\n-    - --segment=16     # of 18 nodes\n" in shown.stdout
    assert "\n+  segment: 16  # of 18 nodes\n" in shown.stdout
    assert (files / "clusters/orion.yaml").read_text() == PROFILE
    written = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert written.stdout == shown.stdout
    assert (files / "clusters/orion.yaml").read_text() == UPGRADED
    assert (files / "clusters/orion.yaml.orig").read_text() == PROFILE
    again = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert (again.status, again.stdout) == (0, "")
    assert again.stderr == "clusters/orion.yaml is in today's form\n"


def test_a_node_type_extends_a_base_type_and_keeps_what_differs(files):
    before = load_node_type("mine")
    found = hpcgen("cluster", "upgrade", "topologies/mine.yaml", "--write")
    assert found.status == 0
    text = (files / "topologies/mine.yaml").read_text()
    assert text.splitlines()[:2] == ["# our nodes", "extends: h100-sxm"]
    assert "# from nvidia-smi\ngpu_memory_gib: 60    # cut down\n" in text
    own = documents.read(files / "topologies/mine.yaml").values
    del own["description"], own["tried"]
    assert own == {
        "extends": "h100-sxm",
        "gpu_memory_gib": 60,
        "compute_capability": None,
        "environment": {"MINE": {"value": "1", "why": "only here", "source": "us"}},
        "sources": {"gpu_memory_gib": "measured"},
    }
    after = load_node_type("mine")
    for key in (field.name for field in dataclasses.fields(NodeType)):
        if key not in ("extends", "environment", "sources"):
            assert getattr(after, key) == getattr(before, key), key
    values = [{name: item.value for name, item in each.environment.items()} for each in (before, after)]
    assert values[0] == values[1]
    assert "compute_capability: null, because h100-sxm sets it and the file did not" in found.stderr


def test_a_node_type_that_shares_little_with_any_base_type_stays(files):
    (files / "topologies/mine.yaml").write_text("description: x\ndevice: cuda\ngpus_per_node: 3\n")
    assert hpcgen("cluster", "upgrade", "topologies/mine.yaml").stdout == ""


def test_modules_of_a_template_are_suggested(files):
    template = files / "templates/slurm/train.sbatch.j2"
    template.parent.mkdir(parents=True)
    template.write_text("site_prologue() {\n    module load cuda/12.8 nccl || die no\n}\n")
    found = hpcgen("cluster", "upgrade", "clusters/orion.yaml")
    assert (
        "train.sbatch.j2:2: modules: [cuda/12.8, nccl] in the profile loads it in every job" in found.stderr
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n", "neither a cluster profile nor a node type"),
        ("extends: local\nnod_type: 5\n", "nod_type = 5 is not a known key; did you mean node_type?"),
        ("extends: nothing\nslurm: {}\n", "nothing is not a known cluster profile"),
    ],
)
def test_a_file_with_mistakes_stays(files, text, message):
    (files / "clusters/orion.yaml").write_text(text)
    before = listing(files)
    found = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert found.status == 2
    assert message in found.stderr
    assert listing(files) == before


def test_an_older_copy_is_never_replaced(files):
    (files / "clusters/orion.yaml.orig").write_text("precious")
    found = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert found.status == 2
    assert "orion.yaml.orig: exists and may be the only copy of an older file; move it away" in found.stderr
    assert (files / "clusters/orion.yaml").read_text() == PROFILE


def test_a_write_protected_file_stays_and_is_not_copied(files):
    (files / "clusters/orion.yaml").chmod(0o444)
    before = listing(files)
    found = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert found.status == 2
    assert "clusters/orion.yaml: is write-protected" in found.stderr
    assert listing(files) == before


def test_a_form_with_other_facts_is_refused(files, monkeypatch):
    """A mistake in the upgrade itself, such as the wrong value for a key."""
    monkeypatch.setattr(upgrade, "_directives_with_key", lambda document: [(("slurm",), 0, "segment", 7)])
    found = hpcgen("cluster", "upgrade", "clusters/orion.yaml", "--write")
    assert found.status == 2
    assert "the new form would change" in found.stderr
    assert (files / "clusters/orion.yaml").read_text() == PROFILE
