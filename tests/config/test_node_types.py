from __future__ import annotations

import dataclasses
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args

import pytest

from hpcgen.config import cpus
from hpcgen.config import node_type as facts
from hpcgen.config.fabric import Fabric, load_fabric
from hpcgen.config.node_type import FabricName, GpuStage, NodeType
from hpcgen.config.node_types import (
    find_node_type,
    load_node_type,
    load_with_files,
    node_type_names,
    read_node_type,
    set_by,
)
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from hpcgen.resources import shipped

BASES = ("a100-sxm", "b200-sxm", "gb200-nvl72", "gh200", "h100-sxm", "h200-sxm", "nvidia")
SITES = ("alps-gh200", "aws-p5", "aws-p5en", "azure-ndv6-gb200", "gcp-a3-mega", "gcp-a3-ultra", "oci-h100")
AZURE = ("ndv4", "ndv5", "ndv5-h200")
SHIPPED = tuple(sorted((*BASES, *SITES, *AZURE, "cpu")))
FABRICS = get_args(FabricName)


def write(path: Path | str, text: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(text)


def mistakes(text: str) -> list[str]:
    """The mistakes of a node type with this text."""
    write("topologies/mine.yaml", text)
    with pytest.raises(ConfigErrors) as raised:
        load_node_type("mine")
    return [message.removeprefix("topologies/") for message in raised.value.messages]


def test_the_shipped_ones_are_found():
    assert tuple(node_type_names()) == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_each_fact_has_a_source(name):
    facts = read_node_type(name).values
    own = {"extends", "description", "site", "same_devices", "tried"}
    own |= {"environment", "must_not_set", "sharp", "sources"}
    assert facts.keys() - own == facts["sources"].keys()
    node_type = load_node_type(name)
    for variable in (*node_type.environment.values(), *node_type.sharp.values()):
        assert variable.why
        assert variable.source
    assert all(threshold.source for threshold in node_type.health.all_reduce) if node_type.health else True


@pytest.mark.parametrize("name", SHIPPED)
def test_the_shipped_files_name_no_private_source(name):
    text = (shipped("topologies") / f"{name}.yaml").read_text()
    assert not re.search(r"\.\./|TODO", text)


@pytest.mark.parametrize("name", AZURE)
def test_ranks_share_no_cpu_and_stay_near_their_gpu(name):
    node_type = load_node_type(name)
    masks = [int(mask, 16) for mask in node_type.cpu_masks]
    assert [mask.bit_count() for mask in masks] == [12] * 8
    assert sum(masks) == (1 << 96) - 1, "disjoint, and every CPU is used"
    for mask, gpu in zip(masks, node_type.gpus, strict=True):
        assert mask & ~cpus.listed(node_type.numa_nodes[gpu.numa].cpus) == 0


@pytest.mark.parametrize("name", AZURE)
def test_each_gpu_has_its_nic_on_its_bridge(name):
    node_type = load_node_type(name)
    for gpu, nic in zip(node_type.gpus, node_type.nics, strict=True):
        assert (gpu.bridge, gpu.numa) == (nic.bridge, nic.numa)


def test_variables_are_for_what_needs_them():
    """NVIDIA's settings for training must not slow the tests down."""
    environment = load_node_type("ndv5").environment
    for_training = {name for name, fact in environment.items() if fact.stages == ("train", "run")}
    assert for_training == {
        "NCCL_NVLS_ENABLE",
        "NCCL_GRAPH_REGISTER",
        "NVTE_FWD_LAYERNORM_SM_MARGIN",
        "NVTE_BWD_LAYERNORM_SM_MARGIN",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "PYTORCH_CUDA_ALLOC_CONF",
    }
    assert not any(fact.runtimes for fact in environment.values())
    assert {name: fact.torch for name, fact in environment.items() if fact.torch} == {
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "<2.8"
    }


def test_reasons_hold_on_the_machine_that_prints_them():
    alps = load_node_type("alps-gh200").environment
    assert "NCCL_NVLS_ENABLE" not in alps, "NVLink SHARP is in NVSwitches"
    assert "none" not in alps["PMIX_MCA_psec"].runtimes, "its reason is containers"
    assert "mask" not in load_node_type("nvidia").environment["CUDA_DEVICE_ORDER"].why


def test_alps_has_what_the_newest_of_its_pages_says():
    environment = load_node_type("alps-gh200").environment
    newer = {name: fact.value for name, fact in environment.items() if "2026-06-17" in fact.source}
    assert newer["NCCL_CROSS_NIC"] == "0"
    assert newer["FI_CXI_RDZV_PROTO"] == "alt_read"
    assert len(newer) == 13


def test_variables_that_must_not_be_there():
    for name in AZURE:
        node_type = load_node_type(name)
        given = node_type.environment.keys() | node_type.sharp.keys()
        assert not given & {"NCCL_COLLNET_ENABLE", "NCCL_IB_HCA", "NCCL_MIN_CHANNELS"}


def test_a_variable_can_be_for_stages_that_use_gpus_alone():
    names = set(get_args(GpuStage))
    assert names >= {"train", "nccl-test", "node-health"}
    assert not names & {"image", "prepare", "index-cache", "tensorboard"}


def test_h200_is_ndv5_with_other_gpus():
    h100, h200 = load_node_type("ndv5"), load_node_type("ndv5-h200")
    same = ("gpus", "nics", "numa_nodes", "cpu_masks", "environment", "sharp", "topology_file", "nvlink")
    assert all(getattr(h100, fact) == getattr(h200, fact) for fact in same)
    assert (h200.gpu_memory_gib, h200.health.nvme_disks) == (140.4, 8)
    assert [threshold.fail_below_gb_s for threshold in h200.health.all_reduce] == [431]


def test_a_site_changes_a_shipped_type_for_itself():
    text = "extends: ndv5\nenvironment: {NCCL_DEBUG: {value: INFO, why: a test, source: us}}\n"
    write("topologies/ndv5.yaml", text)
    node_type = load_node_type("ndv5")
    assert node_type.environment["NCCL_DEBUG"].value == "INFO"
    assert node_type.environment["NCCL_PXN_DISABLE"].value == "1"
    assert find_node_type("ndv5") == Path("topologies/ndv5.yaml")


def test_null_removes_an_inherited_variable():
    write("topologies/mine.yaml", "extends: ndv5\nenvironment: {NCCL_TOPO_FILE: null}\ntopology_file: null\n")
    node_type = load_node_type("mine")
    assert "NCCL_TOPO_FILE" in load_node_type("ndv5").environment
    assert "NCCL_TOPO_FILE" not in node_type.environment
    assert node_type.topology_file is None
    [mistake] = mistakes("extends: ndv5\nenvironment:\n  NCCL_TOPO_FIEL: null\n")
    assert mistake.startswith(
        "mine.yaml:3: environment.NCCL_TOPO_FIEL removes nothing, because no extended file sets it; "
        "did you mean NCCL_TOPO_FILE"
    )


def test_a_changed_fact_does_not_keep_the_source_of_the_old_one():
    text = (
        "extends: ndv5\nvm_sizes: [p5.48xlarge]\nhealth: {nvme_disks: 9}\ngpu_memory_gib: 80\n"
        "environment: {NCCL_PXN_DISABLE: {value: '0'}}\nsources: {gpu_memory_gib: nvidia-smi}\n"
    )
    write("topologies/mine.yaml", text)
    mine, ndv5 = load_node_type("mine"), load_node_type("ndv5")
    assert mine.sources["vm_sizes"] == "topologies/mine.yaml:2"
    assert mine.sources["health"] == f"topologies/mine.yaml:3; the rest: {ndv5.sources['health']}"
    assert mine.sources["gpu_memory_gib"] == "nvidia-smi"
    assert mine.sources["gpus"] == ndv5.sources["gpus"]
    assert mine.environment["NCCL_PXN_DISABLE"].source == "topologies/mine.yaml:5"


def test_types_of_the_users_configuration():
    write("xdg/hpcgen/topologies/mine.yaml", "extends: cpu\ndescription: mine\n")
    assert node_type_names() == sorted([*SHIPPED, "mine"])
    write("topologies/mine.yaml", "extends: mine\ncpus_per_node: 4\n")
    node_type = load_node_type("mine")
    assert (node_type.description, node_type.cpus_per_node) == ("mine", 4)


@pytest.mark.parametrize("name", ["nope", "../topologies/cpu", "", "cpu.yaml", "x" * 300, "$(id)", "a\nb"])
def test_an_unknown_name(name):
    with pytest.raises(
        HpcgenError,
        match=r"is not a known node type; (use one of a100-sxm, .*, ndv5, ndv5-h200, nvidia, .*|did you mean cpu\?)$",
    ) as raised:
        load_node_type(name)
    assert str(raised.value).isprintable()


def test_an_unknown_parent_is_reported_at_its_line():
    [mistake] = mistakes("description: x\nextends: ndv9\n")
    assert mistake.startswith("mine.yaml:2: extends = ndv9 is not a known node type; use one of a100-sxm, ")
    [mistake] = mistakes("description: x\nextends:\n  - ndv5\n  - ndv9\n")
    assert mistake.startswith(
        "mine.yaml:4: extends[1] = ndv9 is not a known node type; use one of a100-sxm, "
    )


def test_earlier_types_win_and_each_file_counts_once():
    own = "extends: [left, right]\ndescription: mine\n"
    write("topologies/base.yaml", "extends: cpu\ngpu_model: base\ncpus_per_node: 1\nexclusive: true\n")
    write("topologies/left.yaml", "extends: base\ndescription: left\ngpu_model: left\n")
    write("topologies/right.yaml", "extends: base\ndescription: right\ngpu_model: right\ncpus_per_node: 2\n")
    write("topologies/mine.yaml", own)
    mine = load_with_files("mine")
    names = [Path(file.removeprefix("shipped:")).stem for file in mine.files]
    assert names == ["mine", "left", "right", "base", "cpu"]
    assert (mine.config.gpu_model, mine.config.cpus_per_node, mine.config.exclusive) == ("left", 2, True)
    write("topologies/mine.yaml", own.replace("[left, right]", "[right, left]"))
    assert load_node_type("mine").gpu_model == "right"


@pytest.mark.parametrize("name", FABRICS)
def test_each_fact_of_a_fabric_has_a_source(name):
    fabric = load_fabric(name)
    facts = {field.name for field in dataclasses.fields(Fabric)}
    unset = {fact for fact in facts if getattr(fabric, fact) in ((), {}, None)}
    assert fabric.sources.keys() == facts - unset - {"title", "environment", "must_not_set", "sources"}
    for entry in (*fabric.environment.values(), *fabric.must_not_set.values()):
        assert entry.why
        assert entry.source


def test_a_fabric_is_the_lowest_layer():
    text = (
        "extends: h100-sxm\nfabric: efa\nenvironment:\n  NCCL_NET: {value: Socket}\n  FI_EFA_USE_HUGE_PAGE: null\n"
        "must_not_set: {NCCL_PROTO: null}\nlibrary_path: [/opt/mine]\n"
    )
    write("topologies/mine.yaml", text)
    loaded, efa = load_with_files("mine"), load_fabric("efa")
    mine = loaded.config
    assert mine.environment["NCCL_NET"].value == "Socket"
    assert mine.environment["NCCL_NET"].source == "topologies/mine.yaml:4"
    assert mine.environment["NCCL_NET_PLUGIN"] == efa.environment["NCCL_NET_PLUGIN"]
    assert set_by(loaded.document, "environment.NCCL_NET_PLUGIN.value") == "fabrics/efa"
    assert set_by(loaded.document, "environment.NCCL_NET.value") == "mine"
    assert "FI_EFA_USE_HUGE_PAGE" not in mine.environment
    assert efa.must_not_set.keys() - mine.must_not_set.keys() == {"NCCL_PROTO"}
    assert (mine.library_path, mine.mounts) == (("/opt/mine",), efa.mounts)
    assert mine.sources["mounts"] == efa.sources["mounts"]


def test_another_fabric_brings_nothing_of_the_inherited_one():
    write("topologies/mine.yaml", "extends: aws-p5\nfabric: slingshot\n")
    mine = load_node_type("mine")
    assert "FI_CXI_DISABLE_HOST_REGISTER" in mine.environment
    assert not mine.environment.keys() & {"FI_EFA_USE_HUGE_PAGE", "NCCL_NET_PLUGIN"}
    assert not mine.mounts


@pytest.mark.parametrize("name", [*SITES, *AZURE])
def test_a_shipped_type_sets_nothing_that_its_fabric_excludes(name):
    node_type = load_node_type(name)
    for variable in node_type.environment:
        assert not any(fnmatchcase(variable, pattern) for pattern in node_type.must_not_set), variable


def test_types_of_other_sites_have_nothing_of_azure():
    for name in (*BASES, *SITES):
        if not name.startswith("azure"):
            text = str(dataclasses.asdict(load_node_type(name)))
            assert not re.search("/opt/microsoft|mlx5_ib|Standard_ND", text), name


def test_facts_that_nobody_has_run_are_marked():
    for name in (*BASES, *SITES, *AZURE):
        assert name == "nvidia" or re.search(r"not run|no run", load_node_type(name).tried), name


def test_node_types_that_extend_each_other_in_a_cycle():
    write("topologies/a.yaml", "extends: b\n")
    write("topologies/b.yaml", "extends: a\n")
    write("topologies/c.yaml", "extends: a\n")
    for name in ("a", "c"):
        with pytest.raises(ConfigErrors) as raised:
            load_node_type(name)
        [message] = raised.value.messages
        assert message.endswith("extends = b forms a cycle: b extends a extends b; remove one of them") or (
            message
            == "topologies/b.yaml:1: extends = a forms a cycle: a extends b extends a; remove one of them"
        )


def test_a_contradiction_names_the_line_of_the_sites_file_too():
    found = mistakes("description: half of one\nextends: ndv4\ngpus_per_node: 4\n")
    assert len(found) == 2
    for key, message in zip(("gpus", "cpu_masks"), found, strict=True):
        assert f"{key} " in message.replace(" = ", " ", 1)
        assert "has 8 entries, but gpus_per_node is 4 (gpus_per_node: topologies/mine.yaml:3)" in message


def test_gpu_does_not_suggest_cpu():
    [message] = mistakes("description: x\ndevice: gpu\ngpus_per_node: 4\n")
    assert message == "mine.yaml:2: device = gpu must be cuda or cpu; use cuda"


def test_every_mistake_is_reported_at_once():
    text = "extends: cpu\ngpus_per_nod: 8\nprocessor: {arch: x86}\nnics: [{bus_id: 1}]\n"
    found = mistakes(text)
    assert any(message.startswith("mine.yaml:2: gpus_per_nod = 8 is not a known key") for message in found)
    assert len(found) >= 5


NODE = """\
description: a node
device: cuda
gpus_per_node: 2
cpus_per_node: 8
processor: {arch: x86_64, vendor: GenuineIntel, family: 6, model: 143}
numa_nodes: [{cpus: 0-3}, {cpus: 4-7}]
pci_link: {speed_gt_s: 32, width: 16}
fabric: infiniband
gpus: [{bus_id: "0001:00:00.0", numa: 0, bridge: "ffff:ff:01.0"}, {bus_id: "0002:00:00.0", numa: 1}]
nics: [{name: ib0, bus_id: "0101:00:00.0", numa: 0, bridge: "ffff:ff:01.0", rate_gbit_s: 400}]
cpu_masks: ["0xf", "0xf0"]
"""


def test_a_small_node_is_valid():
    write("topologies/mine.yaml", NODE)
    assert dataclasses.is_dataclass(load_node_type("mine"))


CONTRADICTIONS = {
    "gpus_per_node of another number": (
        {"right": "gpus_per_node: 2", "wrong": "gpus_per_node: 4"},
        ["gpus", "cpu_masks"],
    ),
    "GPUs of another vendor": (
        {"right": "fabric: infiniband\n", "wrong": "fabric: infiniband\ngpu_model: AMD Instinct MI250X\n"},
        ["gpu_model"],
    ),
    "no fabric with NICs": ({"right": "fabric: infiniband\n", "wrong": ""}, ["fabric"]),
    "CPUs in two NUMA nodes": ({"right": "cpus: 4-7", "wrong": "cpus: 2-7"}, ["numa_nodes[1].cpus"]),
    "a NUMA node without CPUs": (
        {"right": "cpus: 4-7", "wrong": "cpus: 7-4"},
        ["numa_nodes[1].cpus", "cpus_per_node", "cpu_masks[1]"],
    ),
    "two GPUs of one address": ({"right": '"0002:00:00.0"', "wrong": '"0001:00:00.0"'}, ["gpus[1].bus_id"]),
    "GPUs out of order": ({"right": '"0002:00:00.0"', "wrong": '"0000:00:00.0"'}, ["gpus"]),
    "a bridge on two NUMA nodes": (
        {"right": '"0101:00:00.0", numa: 0', "wrong": '"0101:00:00.0", numa: 1'},
        ["nics[0].bridge"],
    ),
    "a NUMA node that is not there": (
        {"right": '"0002:00:00.0", numa: 1', "wrong": '"0002:00:00.0", numa: 2'},
        ["gpus[1].numa"],
    ),
    "masks that share CPUs": ({"right": '"0xf0"', "wrong": '"0xf8"'}, ["cpu_masks[1]", "cpu_masks[1]"]),
    "a mask outside of its NUMA node": ({"right": '"0xf0"', "wrong": '"0xf00"'}, ["cpu_masks[1]"]),
    "more CPUs than those of NUMA nodes": (
        {"right": "cpus_per_node: 8", "wrong": "cpus_per_node: 16"},
        ["cpus_per_node", "cpu_masks[0]"],
    ),
    "a mask of fewer CPUs": ({"right": '"0xf0"', "wrong": '"0x30"'}, ["cpu_masks[1]"]),
    "an empty mask": ({"right": '"0xf0"', "wrong": '"0x0"'}, ["cpu_masks[1]"]),
}
"""Parts of NODE with what takes their place, and the paths of the mistakes."""


def contradictions(directory: Path, right: str, wrong: str) -> list[Problem]:
    """The mistakes of NODE with another part, in the directory `topologies` of the working directory."""
    assert right in NODE
    write("topologies/mine.yaml", NODE.replace(right, wrong))
    with pytest.raises(ConfigErrors) as raised:
        load_node_type("mine")
    return list(raised.value.mistakes)


@pytest.mark.parametrize(("change", "paths"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictory_facts_are_reported(tmp_path, change, paths):
    assert [problem.path for problem in contradictions(tmp_path, **change)] == paths


def documented(text: str, heading: str) -> set[str]:
    """The fields in the first table after `heading`."""
    table = re.split(r"\n\n(?=[^|\n])", text.split(heading, 1)[1].split("| --- |", 1)[1], maxsplit=1)[0]
    return {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }


NESTED = {
    "processor": facts.Processor,
    "numa_nodes[]": facts.NumaNode,
    "pci_link": facts.PciLink,
    "nvlink": facts.NvLink,
    "gpus[]": facts.Gpu,
    "nics[]": facts.Nic,
}
"""Keys with fields of their own."""


def test_the_readme_documents_every_field():
    def fields(cls: type) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)}

    text = (shipped("topologies") / "README.md").read_text()
    assert documented(text, "## Fields") == fields(NodeType)
    assert documented(text, "### Variables") == fields(facts.Variable)
    assert documented(text, "### `health`") == fields(facts.Health)
    assert documented(text, "An entry of `all_reduce`") == fields(facts.AllReduceThreshold)
    nested = {f"{key}.{field}" for key, cls in NESTED.items() for field in fields(cls)}
    table = text.split("### Nested fields", 1)[1].split("### Variables", 1)[0]
    assert set(re.findall(r"`([a-z_]+(?:\[\])?\.[a-z_]+)`", table)) == nested


def test_the_readme_lists_the_shipped_types():
    text = (shipped("topologies") / "README.md").read_text()
    assert all(f"| `{name}` |" in text for name in SHIPPED)
