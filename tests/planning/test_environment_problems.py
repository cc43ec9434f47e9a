"""Variables that files may not set, and those that are answered with a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hpcgen.config.loader import Run
from hpcgen.config.profiles import load_cluster
from hpcgen.config.variables import RESERVED
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.environment import (
    all_environment_problems,
    environment_problems,
    environment_warnings,
    stage_environment,
)
from hpcgen.planning.paths import absolute_paths
from hpcgen.run_plan.explanation import explain
from hpcgen.stages import STAGES
from tests.runs import big_run, loaded, planned, write_yaml

GOLDEN = Path(__file__).parents[1] / "golden"
SHARP = "parallelism.use_sharp=true"


def warnings(run: Run, stage: str = "train") -> list[str]:
    variables = stage_environment(STAGES[stage], run, absolute_paths(run.config, run.directory))
    found = environment_warnings(STAGES[stage], run, variables)
    return [f"{problem.path} {problem.reason}; {problem.hint}" for problem in found]


def refused(directory: Path, environment: dict[str, str], secrets: tuple[str, ...] = ()) -> list[Problem]:
    return list(environment_problems(environment, secrets))


REFUSED = {
    **{
        name: ({"environment": {name: "x"}}, [f"environment.{name}"])
        for name in (
            # set by the script or the image
            *(
                "MASTER_ADDR",
                "WORLD_SIZE",
                "RANK",
                "PATH",
                "PYTHONPATH",
                "HOME",
                "HF_HOME",
                "IFS",
                "LD_PRELOAD",
            ),
            # read by Slurm and bash
            *("SLURM_JOB_ID", "SBATCH_PARTITION", "BASH_ENV", "BASHOPTS"),
            # the script's own
            *("life", "rc", "_"),
            # secrets
            *("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"),
        )
    },
    "a password in an address": (
        {"environment": {"https_proxy": "http://user:hunter2@proxy:3128"}},
        ["environment.https_proxy"],
    ),
    "a token in another variable": ({"environment": {"SETTING": "hf_" + "a" * 34}}, ["environment.SETTING"]),
    "secrets that are none": (
        {"environment": {}, "secrets": ("HF_TOKEN", "PATH", "SLURM_JOB_ID", "BASH_ENV")},
        ["secrets[1]", "secrets[2]", "secrets[3]"],
    ),
    "a secret with a value": (
        {"environment": {"WANDB_MODE": "offline"}, "secrets": ("HF_TOKEN", "WANDB_MODE")},
        ["secrets[1]"],
    ),
}


@pytest.mark.parametrize(("settings", "paths"), REFUSED.values(), ids=REFUSED)
def test_what_a_file_may_not_set(tmp_path, settings, paths):
    assert [problem.path for problem in refused(tmp_path, **settings)] == paths


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
    assert list(environment_problems({}, ("HF_TOKEN", "WANDB_API_KEY", "https_proxy", "SETTING"))) == []


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*/*.sbatch")), ids=lambda path: f"{path.parent.name}-{path.stem}"
)
def test_no_file_can_set_a_variable_of_the_scripts_own(path):
    """Variables that the script assigns are either exported for the stage, or refused in `environment`."""
    script = re.sub(r"^ *#.*|(?<= )# .*", "", path.read_text(), flags=re.MULTILINE)
    exported = set(re.findall(r"^ *export ([A-Za-z_]+)='?", script, re.MULTILINE))
    assigned = set(re.findall(r"^ *(?:local |export )?([A-Za-z_]+)=", script, re.MULTILINE))
    named = set(re.findall(r"\bfor ([A-Za-z_]+)\b|\bread -r ([A-Za-z_]+)\b", script))
    for name in (assigned - exported) | {name for pair in named for name in pair if name}:
        assert list(environment_problems({name: "x"}, ())), name


def test_shipped_files_obey(tmp_path):
    for name in ("azure-ndv5", "local"):
        cluster, node_type = load_cluster(name)
        given = {**cluster.environment, **dict.fromkeys((*node_type.environment, *node_type.sharp), "x")}
        assert list(environment_problems(given, ())) == []
    named = set(planned(tmp_path, big_run()).stages["train"].container.environment)
    assert named & RESERVED == set(STAGES["train"].script_variables)


def test_the_token_of_the_source_is_the_downloads_alone(tmp_path):
    source = {"huggingface": {"repo_id": "a/b"}, "token_variable": "HF_TOKEN"}
    corpus = {"directory": "/shared/corpus", "source": source}
    found = planned(tmp_path, big_run(data={"corpus": corpus}), ["download", "prepare"]).stages
    assert found["download"].secrets == ("HF_TOKEN",)
    assert "HF_TOKEN" in found["download"].container.environment
    assert found["prepare"].secrets == ()
    assert "HF_TOKEN" not in found["prepare"].container.environment
    online = {v.name: v.value for v in found["download"].environment}
    assert (online["HF_HUB_OFFLINE"], online["TRANSFORMERS_OFFLINE"]) == ("0", "0")
    with pytest.raises(ConfigErrors, match=r"data\.corpus\.source\.token_variable = HF_HOME is not a secret"):
        planned(
            tmp_path, big_run(data={"corpus": {**corpus, "source": {**source, "token_variable": "HF_HOME"}}})
        )


def test_the_secrets_of_the_profile_are_those_of_every_stage(tmp_path):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "secrets": ["LICENSE_KEY", "HF_TOKEN"]})
    found = planned(tmp_path, big_run(cluster="./site.yaml", secrets=["HF_TOKEN", "MY_KEY"]))
    train = found.stages["train"]
    assert train.secrets == ("LICENSE_KEY", "HF_TOKEN", "MY_KEY")
    assert set(train.secrets) <= set(train.container.environment)
    assert explain("nccl-test", found.run).secrets == train.secrets
    run = loaded(tmp_path, big_run(cluster="./site.yaml", environment={"LICENSE_KEY": "x"}))
    assert {problem.path for problem in all_environment_problems(run)} == {"environment.LICENSE_KEY"}


def test_all_problems_name_their_file(tmp_path):
    site = {"extends": "azure-ndv5", "node_type": "ndv4", "environment": {"PATH": "/x"}}
    write_yaml(tmp_path / "site.yaml", site)
    run = loaded(tmp_path, big_run(cluster="./site.yaml", environment={"HF_TOKEN": "x"}), [SHARP])
    assert [(problem.path, problem.file) for problem in all_environment_problems(run)] == [
        ("environment.HF_TOKEN", "run"),
        ("environment.PATH", "cluster"),
        ("parallelism.use_sharp", "run"),
    ]


def test_overriding_a_variable_of_tensor_parallelism_is_a_warning(tmp_path):
    undone = planned(tmp_path, big_run(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"}))
    assert any("environment.CUDA_DEVICE_MAX_CONNECTIONS is not 1" in warning for warning in undone.warnings)
    kept = planned(tmp_path, big_run(environment={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}))
    assert not any("CUDA_DEVICE_MAX_CONNECTIONS" in warning for warning in kept.warnings)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("NCCL_IB_HCAS", "mlx5", "has no effect, because nothing reads it; did you mean NCCL_IB_HCA?"),
        (
            "NCCL_MIN_CHANNELS",
            "32",
            "has no effect, because nothing reads it; did you mean NCCL_MIN_NCHANNELS?",
        ),
        ("NCCL_TIMEOUT", "60", "has no effect: NCCL has no timeout"),
        ("NCCL_DEBUG", "INFOO", "is INFOO, which is not a level"),
    ],
)
def test_an_unread_variable_is_a_warning_in_any_file(tmp_path, monkeypatch, name, value, said):
    monkeypatch.chdir(tmp_path)
    of_run = planned(tmp_path, big_run(environment={name: value}))
    [warning] = [text for text in of_run.warnings if said in text]
    assert re.match(rf"{tmp_path}/\S+\.yaml:\d+: environment\.{name} ", warning)
    overridden = loaded(tmp_path, big_run(), [f"environment.{name}={value}"])
    assert [text for text in warnings(overridden, "tokenize") if said in text]
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "environment": {name: value}})
    of_site = planned(tmp_path, big_run(cluster="./site.yaml"))
    [warning] = [text for text in of_site.warnings if said in text]
    assert re.search(rf"site\.yaml:\d+: environment\.{name} ", warning)
    (tmp_path / "topologies").mkdir()
    fact = {"value": value, "why": "faster", "source": "a forum"}
    write_yaml(tmp_path / "topologies/own.yaml", {"extends": "ndv5", "environment": {name: fact}})
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "own"})
    of_nodes = planned(tmp_path, big_run(cluster="./site.yaml"))
    [warning] = [text for text in of_nodes.warnings if said in text]
    assert re.search(rf"site\.yaml:\d+: node_type = own sets {name} \(topologies/own\.yaml:\d+\)", warning)


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_OFI_NRAILS", "2"), ("NCCL_DEBUG", "info"), ("SITE_RACK", "7"), ("NCCL_NEWER", "1")],
)
def test_variables_of_plugins_and_newer_releases_are_accepted(tmp_path, name, value):
    assert warnings(loaded(tmp_path, big_run(environment={name: value}))) == []


def test_collnet_for_the_whole_training_is_a_warning(tmp_path):
    run = loaded(tmp_path, big_run(environment={"NCCL_COLLNET_ENABLE": "1"}))
    [warning] = warnings(run)
    assert warning.startswith("environment.NCCL_COLLNET_ENABLE is removed by Megatron-Core")
    assert warning.endswith("set parallelism.use_sharp")
    assert warnings(run, "nccl-test") == []
    assert warnings(loaded(tmp_path, big_run(environment={"NCCL_COLLNET_ENABLE": "0"}))) == []


@pytest.mark.parametrize(
    ("container", "named", "advice"),
    [
        (
            {"image": "nvcr.io#nvidia/pytorch:25.03-py3"},
            "image nvcr.io#nvidia/pytorch:25.03-py3",
            "use an image up to 25.01",
        ),
        (
            {"image": "nvcr.io#nvidia/pytorch:25.01-py3"},
            "image nvcr.io#nvidia/pytorch:25.01-py3",
            "check the nodes' OFED",
        ),
        ({"image": "/shared/own.sqsh"}, "image /shared/own.sqsh", "check the image's SHARP"),
        ({"runtime": "none"}, "the host's SHARP library", "check the nodes' SHARP"),
    ],
)
def test_sharp_warns_of_images_and_drivers_known_to_fail(tmp_path, container, named, advice):
    run = loaded(tmp_path, big_run(container=container), [SHARP])
    for stage in sorted(name for name, stage in STAGES.items() if stage.uses_gpus):
        [warning] = warnings(run, stage)
        assert named in warning
        assert advice in warning
        assert "25.02 and newer (SHARP 3.10.3) failed" in warning
        assert "OFED 25.04" in warning
    assert warnings(run, "tokenize") == []


def test_a_download_without_access_to_its_hub_is_a_warning(tmp_path):
    run = loaded(tmp_path, big_run(environment={"HF_HUB_OFFLINE": "1"}))
    [warning] = warnings(run, "download")
    assert warning.startswith("environment.HF_HUB_OFFLINE prevents downloads from the hub")
    assert warnings(run, "train") == []


def test_a_node_type_may_not_set_them_either(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fact = {"value": "/evil.so", "why": "a test", "source": "us"}
    write_yaml(tmp_path / "topologies/mine.yaml", {"extends": "ndv5", "environment": {"LD_PRELOAD": fact}})
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "node_type": "mine"})
    with pytest.raises(ConfigErrors, match=r"mine sets LD_PRELOAD \(.*mine\.yaml:\d+\), which is set by"):
        planned(tmp_path, big_run(cluster="./site.yaml"))


@pytest.mark.parametrize("name", ["LD_LIBRARY_PATH", "PYTHONSTARTUP", "PERL5OPT", "GIT_SSH_COMMAND"])
def test_a_variable_that_makes_programs_load_other_code_is_a_warning(tmp_path, name):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", "environment": {name: "/opt/x"}})
    found = planned(tmp_path, big_run(cluster="./site.yaml")).warnings
    [warning] = [text for text in found if f"environment.{name}" in text]
    assert re.search(r"site\.yaml:\d+: ", warning)
    assert ("library_path in the cluster profile" in warning) == (name == "LD_LIBRARY_PATH")
