"""The environment of a stage: precedence of layers, and variables of each stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import get_args

import pytest

from hpcgen.config.loader import Run
from hpcgen.config.node_type import Variable as Fact
from hpcgen.planning.environment import (
    Layer,
    Variable,
    stage_environment,
)
from hpcgen.planning.paths import absolute_paths
from hpcgen.stages import STAGES
from tests.runs import big_run, loaded, minimal_run, write_yaml

GPU_STAGES = {name for name, stage in STAGES.items() if stage.uses_gpus}
SHARP = "parallelism.use_sharp=true"


def variables(run: Run, stage: str = "train") -> dict[str, Variable]:
    config = absolute_paths(run.config, run.directory)
    return {variable.name: variable for variable in stage_environment(STAGES[stage], run, config)}


def without_container(tmp_path: Path) -> Run:
    return loaded(tmp_path, big_run(container={"runtime": "none"}))


def test_what_ndv5_needs(tmp_path):
    """The values of Azure's own examples and NVIDIA's recipes for H100."""
    found = {name: variable.value for name, variable in variables(loaded(tmp_path, big_run())).items()}
    assert found == {
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "GLOO_SOCKET_IFNAME": "eth0",
        "HF_HUB_OFFLINE": "1",
        "MELLANOX_VISIBLE_DEVICES": "all",
        "NCCL_DEBUG": "WARN",
        "NCCL_GRAPH_REGISTER": "0",
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
        "NCCL_MIN_NCHANNELS": "32",
        "NCCL_NET_PLUGIN": "libnccl-net.so",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_P2P_NET_CHUNKSIZE": "2097152",
        "NCCL_PXN_DISABLE": "1",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVTE_BWD_LAYERNORM_SM_MARGIN": "20",
        "NVTE_FWD_LAYERNORM_SM_MARGIN": "20",
        "OMPI_MCA_coll_hcoll_enable": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/shared/runs/big/stacks/flight-record-",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TRANSFORMERS_OFFLINE": "1",
        "UCX_NET_DEVICES": "mlx5_ib0:1",
        "UCX_TLS": "rc",
    }


@pytest.mark.parametrize("stage", ["nccl-test", "node-health"])
def test_measurements_keep_what_training_turns_off(tmp_path, stage):
    """NVLS gives nccl-test a third of its bandwidth; recipes for the memory of training are not for it either."""
    run = loaded(tmp_path, big_run())
    found, training = variables(run, stage), variables(run)
    assert sorted(set(training) - set(found)) == [
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "HF_HUB_OFFLINE",
        "NCCL_GRAPH_REGISTER",
        "NCCL_NVLS_ENABLE",
        "NVTE_BWD_LAYERNORM_SM_MARGIN",
        "NVTE_FWD_LAYERNORM_SM_MARGIN",
        "OMP_NUM_THREADS",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "TORCH_NCCL_TRACE_BUFFER_SIZE",
        "TRANSFORMERS_OFFLINE",
    ]
    assert set(found) <= set(training)


def test_every_variable_says_why_and_from_where(tmp_path):
    found = variables(loaded(tmp_path, big_run(environment={"NCCL_DEBUG": "INFO"})))
    assert all(variable.why and variable.origin for variable in found.values())
    assert {variable.layer for variable in found.values()} == {"built-in", "node type", "stage", "run file"}
    assert list(found) == sorted(found)


def test_origins_are_files_options_and_public_sources(tmp_path):
    site = write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "environment": {"UCX_TLS": "ud"}})
    values = big_run(cluster="./site.yaml", environment={"NCCL_DEBUG": "INFO"})
    found = variables(loaded(tmp_path, values, ["environment.FOO=bar"]))
    line = 1 + (tmp_path / "run.yaml").read_text().splitlines().index('  "NCCL_DEBUG": "INFO"')
    assert found["NCCL_DEBUG"].origin == f"{tmp_path}/run.yaml:{line}"
    assert found["UCX_TLS"].origin == f"{site}:4"
    assert found["FOO"].origin == "--set environment.FOO"
    assert found["NCCL_PXN_DISABLE"].origin == "ndv5: ai-infrastructure-on-azure, hopper.conf"
    assert found["CUDA_DEVICE_MAX_CONNECTIONS"].origin == "Megatron-LM, arguments.py"
    assert found["PYTHONUNBUFFERED"].origin == "hpcgen"


def test_higher_layers_override_and_keep_the_overridden_values(tmp_path):
    environment = {"NCCL_DEBUG": "INFO", "UCX_TLS": "ud", "OMP_NUM_THREADS": "2"}
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "environment": environment})
    values = big_run(cluster="./site.yaml", environment={"NCCL_DEBUG": "TRACE", "PYTHONUNBUFFERED": "0"})
    found = variables(loaded(tmp_path, values, ["environment.UCX_TLS=tcp"]))
    seen = {
        name: [(variable.layer, variable.value) for variable in (*found[name].hides, found[name])]
        for name in ("NCCL_DEBUG", "UCX_TLS", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "NCCL_PXN_DISABLE")
    }
    assert seen == {
        "NCCL_DEBUG": [("node type", "WARN"), ("cluster", "INFO"), ("run file", "TRACE")],
        "UCX_TLS": [("node type", "rc"), ("cluster", "ud"), ("override", "tcp")],
        "OMP_NUM_THREADS": [("stage", "1"), ("cluster", "2")],
        "PYTHONUNBUFFERED": [("built-in", "1"), ("run file", "0")],
        "NCCL_PXN_DISABLE": [("node type", "1")],
    }
    assert all(below.why and not below.hides for variable in found.values() for below in variable.hides)
    for layers in seen.values():
        ranks = [get_args(Layer).index(layer) for layer, _ in layers]
        assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("override", "needed"),
    [
        ("parallelism.pipeline_model_parallel_size=2", False),
        ("parallelism.tensor_model_parallel_size=2", True),
        ("parallelism.context_parallel_size=2", True),
    ],
)
def test_max_connections_only_where_communication_must_keep_ahead(tmp_path, override, needed):
    run = loaded(tmp_path, big_run(preset="125m"), [override])
    assert ("CUDA_DEVICE_MAX_CONNECTIONS" in variables(run)) is needed
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables(run, "nccl-test")


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage not in GPU_STAGES])
def test_a_stage_without_gpus_hides_the_devices_from_enroot(tmp_path, stage):
    """enroot's 99-mellanox hook fails on nodes without InfiniBand unless the variable is void."""
    found = variables(loaded(tmp_path, big_run(), [SHARP]), stage)
    online = {"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0"} if stage == "download" else {}
    assert {name: variable.value for name, variable in found.items()} == online | {
        "MELLANOX_VISIBLE_DEVICES": "void",
        "NVIDIA_VISIBLE_DEVICES": "void",
        "PYTHONNOUSERSITE": "1",
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
    }
    bare = variables(without_container(tmp_path), stage)
    assert set(bare) == {*online, "PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONUNBUFFERED"}


@pytest.mark.parametrize("stage", sorted(GPU_STAGES))
def test_only_containers_need_the_variables_of_enroots_hooks(tmp_path, stage):
    hooks = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "MELLANOX_VISIBLE_DEVICES"}
    pyxis = variables(loaded(tmp_path, big_run()), stage)
    enroot = variables(loaded(tmp_path, big_run(), ["container.runtime=enroot"]), stage)
    assert set(pyxis) == set(enroot)
    assert set(pyxis) - set(variables(without_container(tmp_path), stage)) == hooks


def test_sharp_is_off_unless_asked_for(tmp_path):
    for stage in STAGES:
        found = variables(loaded(tmp_path, big_run()), stage)
        assert not [name for name in found if name.startswith("SHARP_") or name == "NCCL_COLLNET_ENABLE"]


def test_one_switch_turns_sharp_on(tmp_path):
    """Megatron-Core sets NCCL_COLLNET_ENABLE itself, for one process group; job-wide it is for nccl-test alone."""
    run = loaded(tmp_path, big_run(), [SHARP])
    added = {}
    for stage in sorted(GPU_STAGES):
        before = variables(loaded(tmp_path, big_run()), stage)
        added[stage] = {name: v.value for name, v in variables(run, stage).items() if name not in before}
    sharp = {
        "SHARP_COLL_ENABLE_PCI_RELAXED_ORDERING": "1",
        "SHARP_COLL_ENABLE_SAT": "1",
        "SHARP_COLL_LOG_LEVEL": "3",
        "SHARP_SMX_UCX_INTERFACE": "mlx5_ib0:1",
    }
    assert added == {
        "evaluate": sharp,
        "generate": sharp,
        "memory-test": sharp,
        "nccl-test": {**sharp, "NCCL_COLLNET_ENABLE": "1"},
        "node-health": sharp,
        "run": sharp,
        "train": sharp,
        "tune": sharp,
    }


@pytest.mark.parametrize(
    ("container", "expected"),
    [
        ({"image": "nvcr.io#nvidia/pytorch:25.03-py3"}, {"OLD"}),
        ({"image": "nvcr.io#nvidia/pytorch:25.05-py3"}, {"NEW"}),
        ({"image": "/shared/own.sqsh", "torch_version": "2.7"}, {"OLD"}),
        ({"image": "/shared/own.sqsh", "torch_version": "2.10"}, {"NEW"}),
        ({"image": "/shared/own.sqsh"}, {"OLD", "NEW"}),
    ],
)
def test_variables_of_some_pytorch_versions(tmp_path, container, expected):
    """If the version is unknown, the variables of every version are set."""
    run = loaded(tmp_path, big_run(container=container))
    facts = {
        "OLD": Fact(value="1", why="older", source="x", torch="<2.8"),
        "NEW": Fact(value="1", why="newer", source="x", torch=">=2.8"),
    }
    run = dataclasses.replace(run, node_type=dataclasses.replace(run.node_type, environment=facts))
    assert {"OLD", "NEW"} & set(variables(run)) == expected


def test_avoid_record_streams_is_for_older_pytorch(tmp_path):
    name = "TORCH_NCCL_AVOID_RECORD_STREAMS"
    assert name in variables(loaded(tmp_path, big_run(), ["container.torch_version='2.7'"]))
    assert name not in variables(loaded(tmp_path, big_run(), ["container.torch_version='2.8'"]))


def test_ndv4_has_its_own_facts(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "ndv4"})
    found = {name: v.value for name, v in variables(loaded(tmp_path, big_run(cluster="./site.yaml"))).items()}
    expected = {
        "NCCL_TOPO_FILE": "/opt/microsoft/ndv4-topo.xml",
        "UCX_IB_PCI_RELAXED_ORDERING": "on",
        "NCCL_IB_TIMEOUT": "22",
        "NCCL_IGNORE_CPU_AFFINITY": "1",
    }
    assert expected.items() <= found.items()
    assert "NCCL_PXN_DISABLE" not in found


def test_training_on_cpus_has_no_nccl(tmp_path):
    found = variables(loaded(tmp_path, minimal_run()))
    assert not [name for name in found if "NCCL" in name or "CUDA" in name]
    assert found["GLOO_SOCKET_IFNAME"].value == "lo"


def test_the_code_directory_comes_first(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "code_dir": "/shared/code/abc"})
    found = variables(loaded(tmp_path, big_run(cluster="./site.yaml")))
    assert found["PYTHONPATH"].value == "/shared/code/abc"
    assert "PYTHONPATH" not in variables(loaded(tmp_path, big_run()))
