from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest

from hpcgen.config.node_types import node_type_names
from tests.cli.command import hpcgen
from tests.topology.nodes import AZURE, azure_xml, shipped_node_type, write_sysfs


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def test_list(tmp_path):
    (tmp_path / "topologies").mkdir()
    (tmp_path / "topologies/broken.yaml").write_text("device: tpu\n")
    rows = json.loads(hpcgen("topology", "list", "--json").stdout)
    assert [row["name"] for row in rows] == node_type_names()
    [broken] = [row for row in rows if row["name"] == "broken"]
    assert broken["description"] == "invalid; run hpcgen topology show broken"
    assert broken["file"] == "topologies/broken.yaml"
    ended = hpcgen("topology", "list")
    assert (ended.status, ended.stderr) == (0, "")
    assert re.search("\nndv5 +Azure ND96isr_H100_v5, 8 x H100 80 GB, 8 x 400 Gb/s InfiniBand\n", ended.stdout)
    assert ended.stdout.count("not run by hpcgen's authors") > 10


@pytest.mark.parametrize("name", ["cpu", "ndv4", "ndv5", "ndv5-h200", "aws-p5en", "alps-gh200"])
def test_show_has_every_fact_with_its_source(name):
    ended = hpcgen("topology", "show", name)
    assert ended.status == 0
    assert "\x1b" not in ended.stdout
    node_type = shipped_node_type(name)
    assert all(source in ended.stdout for source in node_type.sources.values())
    for variable, fact in {**node_type.environment, **node_type.sharp}.items():
        assert f"\n{variable}={fact.value}" in ended.stdout
        assert re.search(
            rf"{re.escape(fact.why)} \[(fabrics/)?[\w-]+: {re.escape(fact.source)}\]", ended.stdout
        )
    for variable, exclusion in node_type.must_not_set.items():
        assert f"\n{variable}\n    {exclusion.why} [{exclusion.source}]\n" in ended.stdout


def test_show_says_conditions_and_thresholds():
    out = hpcgen("topology", "show", "ndv5").stdout
    assert "TORCH_NCCL_AVOID_RECORD_STREAMS=1  (train, run, torch <2.8)\n" in out
    assert (
        "2 or more nodes, 16 GiB, NVLS on, CollNet on: expected 450, warns below 400, fails below 300 GB/s"
        in out
    )
    assert "1 node, 16 GiB, NVLS on, CollNet off: expected 480, fails below 460 GB/s" in out


def test_show_as_json():
    facts = json.loads(hpcgen("topology", "show", "ndv5", "--json").stdout)
    assert facts["name"] == "ndv5"
    assert facts["nics"][0] == {
        "name": "mlx5_ib0",
        "bus_id": "0101:00:00.0",
        "numa": 0,
        "bridge": "ffff:ff:01.0",
        "rate_gbit_s": 400.0,
    }


def test_xml_verifies_as_itself(tmp_path):
    ended = hpcgen("topology", "xml", "ndv4")
    assert (ended.status, ended.stderr) == (0, "")
    (tmp_path / "t.xml").write_text(ended.stdout)
    ended = hpcgen("topology", "verify", "ndv4", "--xml", "t.xml")
    assert (ended.status, ended.stdout) == (0, "t.xml matches ndv4: 4 NUMA nodes, 8 GPUs, 8 NICs\n")


def test_the_file_of_azures_image_verifies():
    for name, file in (("ndv5", "ndv5"), ("ndv5-h200", "ndv5"), ("ndv4", "ndv4")):
        assert hpcgen("topology", "verify", name, "--xml", AZURE / f"{file}-topo.xml").status == 0


def test_verify_names_what_differs_with_status_1(tmp_path):
    (tmp_path / "t.xml").write_text(azure_xml("ndv5").replace('busid="0108:', 'busid="0109:'))
    ended = hpcgen("topology", "verify", "ndv5", "--xml", "t.xml")
    assert ended.status == 1
    assert ended.stdout == "NIC mlx5_ib7 (0108:00:00.0): missing\nNIC 0109:00:00.0: not expected\n"
    assert ended.stderr == "t.xml does not match ndv5: 2 differences\n"
    ended = hpcgen("topology", "verify", "ndv5", "--xml", "t.xml", "--json")
    assert ended.status == 1
    assert json.loads(ended.stdout)[0] == {
        "device": "NIC mlx5_ib7 (0108:00:00.0)",
        "attribute": "presence",
        "expected": "present",
        "found": "absent",
    }


def test_verify_says_what_the_type_does_not_state(tmp_path):
    sysfs = write_sysfs(tmp_path / "sys", shipped_node_type("ndv5"))
    ended = hpcgen("topology", "verify", "h100-sxm", "--sysfs", sysfs)
    assert (ended.status, ended.stdout) == (0, f"{sysfs} matches h100-sxm: 2 NUMA nodes, 8 GPUs, 8 NICs\n")
    what = "gpus, numa_nodes, pci_link, nics_per_node, nics"
    assert ended.stderr == f"not compared, because h100-sxm does not state it: {what}\n"
    ended = hpcgen("topology", "verify", "gb200-nvl72", "--sysfs", sysfs)
    assert (ended.status, ended.stdout) == (1, "GPUs: number: expected 4, found 8\n")


def test_verify_a_live_node(tmp_path):
    sysfs = write_sysfs(tmp_path / "sys", shipped_node_type("ndv5"))
    ended = hpcgen("topology", "verify", "ndv5", "--sysfs", sysfs)
    assert (ended.status, ended.stdout) == (0, f"{sysfs} matches ndv5: 2 NUMA nodes, 8 GPUs, 8 NICs\n")
    assert json.loads(hpcgen("topology", "verify", "ndv5", "--sysfs", sysfs, "--json").stdout) == []
    (sysfs / "bus/pci/devices/000b:00:00.0/numa_node").write_text("0\n")
    ended = hpcgen("topology", "verify", "ndv5", "--sysfs", sysfs)
    assert (ended.status, ended.stdout) == (1, "GPU 6 (000b:00:00.0): NUMA node: expected 1, found 0\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["verify", "ndv5", "--xml", "nothing.xml"], "nothing.xml: no such file"),
        (["verify", "ndv5", "--sysfs", "nothing"], "nothing/bus/pci/devices: no such directory"),
        (["verify", "ndv5", "--xml", "a", "--sysfs", "b"], "cannot be used together"),
        (
            ["verify", "cpu"],
            "node type cpu does not state gpus, nics, cpus_per_node, which a comparison needs",
        ),
        (
            ["xml", "cpu"],
            "node type cpu does not state gpus, numa_nodes, pci_link, processor, which the topology file",
        ),
        (["draw", "cpu"], "node type cpu does not state gpus, numa_nodes, pci_link, which the diagram needs"),
        (["show", "ndv6"], "ndv6 is not a known node type; use one of a100-sxm, "),
        (["draw", "ndv5", "-o", "/proc/x.svg"], "/proc/x.svg: cannot be written"),
        (["draw", "ndv5", "-o", "x.pdf"], "x.pdf: the file would be SVG; name it x.svg\n"),
        (["draw", "ndv5", "-o", "nope/x.svg"], "/nope does not exist; create it first\n"),
    ],
)
def test_mistakes_end_with_status_2(arguments, said):
    ended = hpcgen("topology", *arguments)
    assert (ended.status, ended.stdout) == (2, "")
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr


def test_bad_xml_ends_with_status_2(tmp_path):
    (tmp_path / "t.xml").write_text("<system")
    ended = hpcgen("topology", "verify", "ndv5", "--xml", "t.xml")
    assert (ended.status, ended.stdout) == (2, "")
    assert ended.stderr.startswith("t.xml:1: not XML")


def test_draw(tmp_path):
    plain = hpcgen("topology", "draw", "ndv5")
    assert (plain.status, plain.stderr) == (0, "")
    assert "│  └─ mlx5_ib0  0101:00:00.0  400 Gb/s" in plain.stdout
    picture = hpcgen("topology", "draw", "ndv5", "--svg")
    assert ElementTree.fromstring(picture.stdout).tag.endswith("svg")
    written = hpcgen("topology", "draw", "ndv5", "-o", "n.svg")
    assert (written.status, written.stdout, written.stderr) == (0, "", "wrote n.svg\n")
    assert (tmp_path / "n.svg").read_text() == picture.stdout
    assert hpcgen("topology", "draw", "ndv5", "-o", "-") == picture


@pytest.mark.process
def test_names_are_completed(tmp_path):
    environment = {
        **os.environ,
        "_HPCGEN_COMPLETE": "bash_complete",
        "COMP_WORDS": "hpcgen topology show ndv5",
        "COMP_CWORD": "3",
    }
    completed = subprocess.run(
        [sys.executable, "-m", "hpcgen"], env=environment, capture_output=True, text=True, check=True
    )
    assert completed.stdout.split() == ["plain,ndv5", "plain,ndv5-h200"]
