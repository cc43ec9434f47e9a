"""The environment of a stage: which layer wins, what each stage needs, and what a file may not set."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.config.loader import load_cluster
from hpcgen.planning.environment import RESERVED, environment_problems, stage_environment
from tests.runs import big_run, loaded, minimal_run, planned, write_yaml

GOLDEN = Path(__file__).parents[1] / "golden"


def variables(run, stage="train", runtime="pyxis"):
    return {
        v.name: v for v in stage_environment(stage, run.config, run.cluster, run.node_type, runtime=runtime)
    }


def test_what_ndv5_needs(tmp_path):
    """The values of Azure's own examples and NVIDIA's recipes for H100."""
    found = {name: variable.value for name, variable in variables(loaded(tmp_path, big_run())).items()}
    expected = {
        "NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_SOCKET_IFNAME": "=eth0",
        "NCCL_PXN_DISABLE": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "UCX_NET_DEVICES": "mlx5_ib0:1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "MELLANOX_VISIBLE_DEVICES": "all",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/shared/runs/big/nccl-flight-record-",
        "PYTHONNOUSERSITE": "1",
        "HF_HUB_OFFLINE": "1",
    }
    assert expected.items() <= found.items()
    assert "NCCL_COLLNET_ENABLE" not in found
    assert "PYTHONPATH" not in found


def test_every_variable_says_why_and_from_where(tmp_path):
    found = variables(loaded(tmp_path, big_run(environment={"NCCL_DEBUG": "INFO"})))
    assert all(variable.why for variable in found.values())
    assert {variable.layer for variable in found.values()} == {"built-in", "node type", "run file"}
    assert list(found) == sorted(found)


def test_higher_layers_win(tmp_path):
    write_yaml(
        tmp_path / "site.yaml",
        {"extends": "azure-ndv5", "environment": {"NCCL_DEBUG": "INFO", "UCX_TLS": "ud"}},
    )
    run = loaded(tmp_path, big_run(cluster="./site.yaml", environment={"NCCL_DEBUG": "TRACE"}))
    found = variables(run)
    assert (found["NCCL_DEBUG"].value, found["NCCL_DEBUG"].layer) == ("TRACE", "run file")
    assert (found["UCX_TLS"].value, found["UCX_TLS"].layer) == ("ud", "cluster")
    assert found["NCCL_PXN_DISABLE"].layer == "node type"


def test_max_connections_only_where_communication_must_keep_ahead(tmp_path):
    one = loaded(tmp_path, big_run(preset="125m"))
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in variables(one)
    context = loaded(tmp_path, big_run(preset="125m"), ["parallelism.context_parallel_size=2"])
    assert variables(context)["CUDA_DEVICE_MAX_CONNECTIONS"].value == "1"


def test_a_stage_without_gpus_hides_the_devices_from_enroot(tmp_path):
    """enroot's 99-mellanox hook fails on nodes without InfiniBand unless the variable is void."""
    run = loaded(tmp_path, big_run())
    found = variables(run, stage="tokenize")
    assert found["NVIDIA_VISIBLE_DEVICES"].value == found["MELLANOX_VISIBLE_DEVICES"].value == "void"
    assert not [name for name in found if name.startswith(("NCCL_", "UCX_", "TORCH_"))]
    assert "HF_HUB_OFFLINE" not in found
    assert "NVIDIA_VISIBLE_DEVICES" not in variables(run, stage="tokenize", runtime="none")


def test_training_on_cpus_has_no_nccl(tmp_path):
    found = variables(loaded(tmp_path, minimal_run()), runtime="none")
    assert not [name for name in found if "NCCL" in name]
    assert found["GLOO_SOCKET_IFNAME"].value == "lo"


def test_the_code_directory_comes_first(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "code_dir": "/shared/code/abc"})
    found = variables(loaded(tmp_path, big_run(cluster="./site.yaml")))
    assert found["PYTHONPATH"].value == "/shared/code/abc"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MASTER_ADDR", "is set by the script or the image"),
        ("WORLD_SIZE", "is set by the script or the image"),
        ("RANK", "is set by the script or the image"),
        ("PATH", "is set by the script or the image"),
        ("PYTHONPATH", "is set by the script or the image"),
        ("HOME", "is set by the script or the image"),
        ("HF_HOME", "is set by the script or the image"),
        ("IFS", "is set by the script or the image"),
        ("LD_PRELOAD", "is set by the script or the image"),
        ("SLURM_JOB_ID", "changes what Slurm or bash does behind the script's back"),
        ("SBATCH_PARTITION", "changes what Slurm or bash does behind the script's back"),
        ("BASH_ENV", "changes what Slurm or bash does behind the script's back"),
        ("BASHOPTS", "changes what Slurm or bash does behind the script's back"),
        ("life", "is in lower case, as the script's own variables are"),
        ("rc", "is in lower case, as the script's own variables are"),
        ("_", "is in lower case, as the script's own variables are"),
        ("HF_TOKEN", "looks like a secret, and would be written into the script"),
        ("WANDB_API_KEY", "looks like a secret, and would be written into the script"),
        ("AWS_SECRET_ACCESS_KEY", "looks like a secret, and would be written into the script"),
        ("DB_PASSWORD", "looks like a secret, and would be written into the script"),
    ],
)
def test_what_a_file_may_not_set(name, reason):
    [problem] = environment_problems({name: "x"}, ())
    assert (problem.path, problem.reason) == (f"environment.{name}", reason)
    assert problem.hint


@pytest.mark.parametrize(
    "name",
    [
        "NCCL_DEBUG",
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "OMP_NUM_THREADS",
        "http_proxy",
        "no_proxy",
        "HTTPS_PROXY",
        "LD_LIBRARY_PATH",
    ],
)
def test_what_a_file_may_set(name):
    assert list(environment_problems({name: "x"}, ())) == []


def test_secrets_go_by_name():
    assert list(environment_problems({}, ("HF_TOKEN", "WANDB_API_KEY"))) == []
    found = environment_problems({}, ("HF_TOKEN", "PATH", "SLURM_JOB_ID", "BASH_ENV"))
    assert [problem.path for problem in found] == ["secrets[1]", "secrets[2]", "secrets[3]"]


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*/*.sbatch")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_no_file_can_set_a_variable_of_the_scripts_own(path):
    """What the script assigns is either exported for the stage, or a name that `environment` is refused."""
    script = re.sub(r"^ *#.*", "", path.read_text(), flags=re.MULTILINE)
    exported = set(re.findall(r"^export ([A-Za-z_]+)='?", script, re.MULTILINE))
    assigned = set(re.findall(r"^ *(?:local |export )?([A-Za-z_]+)=", script, re.MULTILINE))
    named = set(re.findall(r"\bfor ([A-Za-z_]+)\b|\bread -r ([A-Za-z_]+)\b", script))
    for name in (assigned - exported) | {name for pair in named for name in pair if name}:
        assert list(environment_problems({name: "x"}, ())), name


def test_shipped_files_obey(tmp_path):
    for name in ("azure-ndv5", "local"):
        cluster, node_type = load_cluster(name)
        given = {**cluster.environment, **{key: fact.value for key, fact in node_type.environment.items()}}
        assert list(environment_problems(given, ())) == []
    assert not RESERVED & set(planned(tmp_path, big_run()).stages["train"].container.environment) - {
        "MASTER_ADDR",
        "MASTER_PORT",
        "WORLD_SIZE",
        "TRAINER_CONFIG",
        "TRAINER_STOP_FILE",
    }


def test_undoing_what_tensor_parallelism_needs_is_a_warning(tmp_path):
    undone = planned(tmp_path, big_run(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}))
    assert any("environment.CUDA_DEVICE_MAX_CONNECTIONS is not 1" in warning for warning in undone.warnings)
    kept = planned(tmp_path, big_run(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in warning for warning in kept.warnings)
