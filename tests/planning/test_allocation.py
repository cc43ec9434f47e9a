"""The Slurm request of a stage: the origin of each setting, the options, and settings that Slurm would refuse."""

from __future__ import annotations

import dataclasses
import re

import pytest

from hpcgen.config.cpus import from_words, ranges
from hpcgen.config.node_type import NvLink, Processor
from hpcgen.config.profiles import read_profile
from hpcgen.config.slurm import PASSED_ON
from hpcgen.errors import Problem
from hpcgen.planning.allocation_warnings import allocation_warnings
from hpcgen.planning.request import (
    allocation_problems,
    cluster_problems,
    make_allocation,
    make_array,
    stage_settings,
)
from hpcgen.run_plan.profile import profile_mistakes
from hpcgen.stages import STAGES
from tests.cli.command import hpcgen
from tests.runs import big_run, loaded, minimal_run, write_yaml


def run_of(tmp_path, train=None, defaults=None, tokenize=None, download=None, **site):
    write_yaml(tmp_path / "site.yaml", {"extends": "azure-ndv5", **site})
    sections = {"train": train, "defaults": defaults, "tokenize": tokenize, "download": download}
    slurm = {name: given or {} for name, given in sections.items()}
    return loaded(tmp_path, big_run(cluster="./site.yaml", slurm=slurm))


def allocation(tmp_path, stage="train", **settings):
    run = run_of(tmp_path, **settings)
    return make_allocation(STAGES[stage], run.config, run.cluster, run.node_type)


def problems(tmp_path, stage="train", **settings) -> list[Problem]:
    settings.setdefault("defaults", {"time": "1:00:00"})
    run = run_of(tmp_path, **settings)
    return list(allocation_problems(STAGES[stage], run.config, run.cluster, run.node_type))


def test_a_training_stage_takes_whole_nodes(tmp_path):
    found = allocation(tmp_path, train={"nodes": 16, "time": "1-00:00:00"})
    assert found.num_tasks == 128
    assert found.resource_options() == {
        "nodes": "16",
        "ntasks-per-node": "8",
        "cpus-per-task": "12",
        "gpus-per-node": "8",
        "exclusive": True,
        "mem": "0",
        "time": "1-00:00:00",
        "partition": "hpc",
    }
    options = found.srun_options()
    assert options[:4] == ("--nodes=16", "--ntasks=128", "--ntasks-per-node=8", "--cpus-per-task=12")
    masks = next(option for option in options if option.startswith("--cpu-bind=mask_cpu:"))
    assert len(masks.split(",")) == 8
    assert options[-3:] == ("--kill-on-bad-exit=1", "--export=ALL", "--label")


def test_the_mpi_type_of_the_tasks(tmp_path):
    assert not any(option.startswith("--mpi") for option in allocation(tmp_path).srun_options())
    assert "--mpi=pmix" in allocation(tmp_path, mpi="pmix").srun_options()


def test_the_masks_share_out_every_cpu_once(tmp_path):
    masks = [int(mask, 16) for mask in allocation(tmp_path, train={"time": "1:00"}).cpu_masks]
    assert sum(masks) == 2**96 - 1
    assert all(mask.bit_count() == 12 for mask in masks)


def test_a_stage_without_gpus_asks_for_none(tmp_path):
    found = allocation(tmp_path, "tokenize", tokenize={"time": "1:00:00"})
    assert (found.num_tasks, found.gpus_per_node, found.cpus_per_task, found.cpu_masks) == (1, 0, 96, ())
    assert not {"gpus-per-node", "gres"} & found.resource_options().keys()


def shares(found):
    """The CPUs that a stage takes of a node that it shares, and the memory that it asks for."""
    options = found.resource_options()
    assert "exclusive" not in options
    return options["cpus-per-task"], options.get("mem")


def test_a_task_of_an_array_takes_a_whole_node(tmp_path):
    options = allocation(tmp_path, "tokenize", tokenize={"num_tasks": 4}).resource_options()
    assert (options["exclusive"], options["mem"], options["cpus-per-task"]) == (True, "0", "96")


@pytest.mark.parametrize(
    "given",
    [
        {"tokenize": {"cpus_per_task": 24}},
        {"defaults": {"cpus_per_task": 24}},
        {"slurm": {"partition": "hpc", "cpus_per_task": 24}},
    ],
)
def test_an_array_task_with_cpus_per_task_shares_the_node(tmp_path, given):
    """The CPUs may be set anywhere. Memory is Slurm's default unless it is also set."""
    assert shares(allocation(tmp_path, "tokenize", **given)) == ("24", None)
    given.setdefault("tokenize", {})["mem"] = "32G"
    assert shares(allocation(tmp_path, "tokenize", **given)) == ("24", "32G")


def test_other_stages_take_whole_nodes_whatever_their_cpus(tmp_path):
    assert allocation(tmp_path, "train", train={"time": "1:00", "cpus_per_task": 12}).exclusive
    assert allocation(tmp_path, "index-cache", defaults={"cpus_per_task": 12}).exclusive


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, ("4", None)), ({"mem": "8G"}, ("4", "8G")), ({"cpus_per_task": 16}, ("16", None))],
)
def test_a_download_takes_few_cpus_of_a_node_that_it_shares(tmp_path, given, expected):
    assert shares(allocation(tmp_path, "download", download=given)) == expected


def test_a_download_takes_no_more_cpus_than_there_are(tmp_path):
    run = run_of(tmp_path)
    small = dataclasses.replace(run.node_type, cpus_per_node=2)
    assert shares(make_allocation(STAGES["download"], run.config, run.cluster, small)) == ("2", None)


@pytest.mark.parametrize(
    ("gres", "option"),
    [
        ("gpus-per-node", {"gpus-per-node": "8"}),
        ("gpu:8", {"gres": "gpu:8"}),
        ("gpu:h100:8", {"gres": "gpu:h100:8"}),
        ("none", {}),
    ],
)
def test_the_form_of_the_gpu_request(tmp_path, gres, option):
    options = allocation(tmp_path, train={"time": "1:00"}, gres=gres).resource_options()
    assert {name: options[name] for name in ("gres", "gpus-per-node") if name in options} == option


@pytest.mark.parametrize(("cpus", "gpus"), [(288, 4), (512, 8), (1016, 8)])
def test_nodes_with_many_cpus_are_bound_and_drawn(tmp_path, monkeypatch, cpus, gpus):
    monkeypatch.chdir(tmp_path)
    each = cpus // gpus
    masks = tuple(hex((1 << each) - 1 << each * index) for index in range(gpus))
    node_type = {
        "description": "many",
        "device": "cuda",
        "gpus_per_node": gpus,
        "cpus_per_node": cpus,
        "cpu_masks": masks,
        "processor": {"arch": "arm64", "vendor": "ARM", "family": 1, "model": 1},
        "pci_link": {"speed_gt_s": 32, "width": 16},
        "numa_nodes": [{"cpus": f"{each * index}-{each * (index + 1) - 1}"} for index in range(gpus)],
        "gpus": [{"bus_id": f"000{index}:01:00.0", "numa": index} for index in range(gpus)],
    }
    write_yaml(tmp_path / "topologies/many.yaml", node_type)
    write_yaml(tmp_path / "site.yaml", {"node_type": "many", "slurm": {"time": "1:00:00"}})
    run = loaded(tmp_path, minimal_run(cluster="./site.yaml"))
    found = make_allocation(STAGES["train"], run.config, run.cluster, run.node_type)
    assert f"--cpus-per-task={each}" in found.srun_options()
    assert f"--cpu-bind=mask_cpu:{','.join(masks)}" in found.srun_options()
    last = f"{cpus - each}-{cpus - 1}"
    assert last in hpcgen("topology", "draw", "many").stdout
    affinity = re.findall('affinity="([0-9a-f,]*)"', hpcgen("topology", "xml", "many").stdout)
    assert [from_words(words) for words in affinity] == [int(mask, 16) for mask in masks]


@pytest.mark.parametrize(
    ("option", "version", "release"),
    [
        ("--segment=16", "22.05", "24.05"),
        ("--segment=16", "23.11.4", "24.05"),
        ("--segment=16", "24.05", None),
        ("--segment=16", None, None),
        ("--tres-per-task=gres/gpu:1", "22.05", "23.02"),
        ("--spread-segments", "25.05", "25.11"),
        ("--gres-flags=allow-task-sharing", "23.02", "23.11"),
        ("--gres-flags=enforce-binding", "20.11", None),
        ("--comment=x", "20.11", None),
    ],
)
def test_an_option_requires_the_release_that_added_it(tmp_path, option, version, release):
    profile = {"extends": "local", "slurm_version": version, "slurm": {"extra_directives": [option]}}
    write_yaml(tmp_path / "site.yaml", profile)
    run = loaded(tmp_path, minimal_run(cluster="./site.yaml"))
    found = [
        problem.reason
        for problem in allocation_problems(STAGES["train"], run.config, run.cluster, run.node_type)
    ]
    reason = f"requires Slurm {release}, but slurm_version of the cluster profile is {version}"
    assert found == ([reason] if release else [])


def test_fewer_tasks_than_gpus_are_not_bound_to_the_masks_of_eight(tmp_path):
    found = allocation(tmp_path, train={"time": "1:00", "ntasks_per_node": 4})
    assert (found.ntasks_per_node, found.cpus_per_task, found.cpu_masks) == (4, 24, ())


def test_masks_name_only_cpus_that_the_step_has(tmp_path, monkeypatch):
    """srun refuses a mask with CPUs outside of the step's allocation."""
    assert allocation(tmp_path, train={"time": "1:00", "cpus_per_task": 12}).cpu_masks
    assert allocation(tmp_path, train={"time": "1:00", "cpus_per_task": 4}).cpu_masks == ()
    monkeypatch.chdir(tmp_path)
    write_yaml(tmp_path / "topologies/shared.yaml", {"extends": "ndv5", "exclusive": False})
    found = allocation(tmp_path, train={"time": "1:00"}, node_type="shared")
    assert (found.exclusive, found.cpus_per_task, found.cpu_masks) == (False, 12, ())


def test_a_shared_node_leaves_memory_and_cpus_to_slurm(tmp_path):
    run = loaded(tmp_path, minimal_run())
    options = make_allocation(STAGES["train"], run.config, run.cluster, run.node_type).resource_options()
    assert not {"exclusive", "mem", "cpus-per-task"} & options.keys()


def test_a_setting_comes_from_the_stage_then_the_defaults_then_the_cluster(tmp_path):
    run = run_of(
        tmp_path,
        train={"account": "mine"},
        defaults={"account": "ours", "qos": "high", "nodes": 2},
        slurm={
            "account": "site",
            "qos": "low",
            "reservation": "week",
            "extra_directives": ["--no-kill"],
            "train": {"account": "site-train", "qos": "site-train", "constraint": "h100"},
            "tokenize": {"time": "3:00:00", "num_tasks": 3, "extra_directives": []},
            "nccl_test": {"time": "20:00", "partition": "test"},
        },
    )
    found = stage_settings(STAGES["train"], run.config, run.cluster)
    assert (found.account, found.qos, found.reservation, found.nodes) == ("mine", "high", "week", 2)
    assert (found.partition, found.constraint) == ("hpc", "h100")
    assert found.extra_directives == ("--no-kill",)
    tokenize = stage_settings(STAGES["tokenize"], run.config, run.cluster)
    assert (tokenize.account, tokenize.time, tokenize.extra_directives) == ("ours", "3:00:00", ())
    assert make_array(STAGES["tokenize"], run.config, run.cluster).num_tasks == 3
    nccl_test = stage_settings(STAGES["nccl-test"], run.config, run.cluster)
    assert (nccl_test.time, nccl_test.partition) == ("20:00", "test"), "not a default for all stages"


def test_a_mistake_in_a_stages_section_of_the_profile_is_found_there(tmp_path):
    site = {**LIMITS, "slurm": {"train": {"partition": "big", "ntasks_per_node": 9}, "time": "1:00:00"}}
    [problem] = problems(tmp_path, **site)
    assert (problem.path, problem.file) == ("slurm.train.ntasks_per_node", "cluster")
    [mistake] = profile_mistakes(read_profile("./site.yaml", tmp_path))
    assert str(mistake).startswith(f"{tmp_path}/site.yaml:")


def test_a_required_setting_may_come_from_the_run_or_from_the_profile(tmp_path):
    site = {"required_settings": ["account", "qos"], "slurm": {"partition": "hpc", "qos": "low"}}
    [problem] = problems(tmp_path, **site)
    assert (problem.path, problem.file) == ("slurm.defaults.account", "run")
    assert "--set slurm.defaults.account" in problem.hint
    assert "SBATCH_ACCOUNT" in problem.hint
    assert problems(tmp_path, **site, train={"account": "a"}) == []
    assert profile_mistakes(read_profile("./site.yaml", tmp_path)) == []


def test_a_key_that_slurm_gets_unchanged_is_a_directive_and_cannot_be_an_extra_one(tmp_path):
    assert {"partition", "account", "qos", "reservation", "constraint"} <= PASSED_ON.keys()
    given = {key: f"{key}-1" for key in PASSED_ON.values()}
    options = allocation(tmp_path, train=given).resource_options()
    assert [options[option] for option in PASSED_ON] == [*given.values()]
    extra = [f"--{option}=x" for option in PASSED_ON]
    found = problems(tmp_path, train={"extra_directives": extra})
    reasons = [f"sets --{option}, which hpcgen sets itself" for option in PASSED_ON]
    assert [problem.reason for problem in found] == reasons


def test_extra_directives_of_site_and_user_are_combined(tmp_path):
    """A user's --mail-type does not take the site's --switches away; of the same option, the user's holds."""
    site = {"extra_directives": ["--switches=1", "--nice=10"]}
    run = run_of(tmp_path, train={"extra_directives": ["--mail-type=FAIL", "--nice=5"]}, slurm=site)
    found = stage_settings(STAGES["train"], run.config, run.cluster)
    assert found.extra_directives == ("--switches=1", "--mail-type=FAIL", "--nice=5")
    assert stage_settings(STAGES["tokenize"], run.config, run.cluster).extra_directives == tuple(
        site["extra_directives"]
    )


def test_an_empty_list_is_a_choice_of_the_stage_against_the_defaults(tmp_path):
    run = run_of(
        tmp_path,
        train={"extra_directives": []},
        defaults={"extra_directives": ["--nice=5"]},
        slurm={"extra_directives": ["--no-kill"]},
    )
    assert stage_settings(STAGES["train"], run.config, run.cluster).extra_directives == ("--no-kill",)


def test_restarts(tmp_path):
    assert allocation(tmp_path).max_restarts == 100
    assert allocation(tmp_path, train={"max_restarts": 0}).max_restarts == 0


LIMITS = {"partitions": {"hpc": {"max_time": "2:00:00", "max_nodes": 4}, "big": {}}}
QOS = {"qos": {"short": {"max_time": "1:00:00", "max_nodes": 2}, "any": {}}}
NO_TIME = {"defaults": {"nodes": 1}}

REFUSED = {
    "no time limit": (NO_TIME, ["slurm.train.time"]),
    "a time limit of zero": (NO_TIME | {"train": {"time": "0:00"}}, ["slurm.train.time"]),
    "a time limit of zero hours": (NO_TIME | {"train": {"time": "00:00:00"}}, ["slurm.train.time"]),
    "a time limit of zero days": (NO_TIME | {"train": {"time": "0-0"}}, ["slurm.train.time"]),
    "more than the partition allows": (
        LIMITS | {"train": {"time": "2:00:01", "nodes": 5}},
        ["slurm.train.time", "slurm.train.nodes"],
    ),
    "more than the QOS allows": (
        QOS | {"train": {"time": "1:00:01", "nodes": 3, "qos": "short"}},
        ["slurm.train.time", "slurm.train.nodes"],
    ),
    "more than the partition and the QOS allow": (
        LIMITS | QOS | {"train": {"time": "2:00:01", "nodes": 5, "qos": "short"}},
        ["slurm.train.time", "slurm.train.nodes"],
    ),
    "an unknown QOS": (QOS | {"train": {"qos": "long"}}, ["slurm.train.qos"]),
    "a required setting": ({"required_settings": ["account"]}, ["slurm.defaults.account"]),
    "an unknown partition": (LIMITS | {"train": {"partition": "big,gpu"}}, ["slurm.train.partition"]),
    "more ranks than GPUs": ({"train": {"ntasks_per_node": 9}}, ["slurm.train.ntasks_per_node"]),
    "more CPUs than a node has": ({"train": {"cpus_per_task": 13}}, ["slurm.train.cpus_per_task"]),
    "more tasks than CPUs": (
        {"stage": "tokenize", "tokenize": {"ntasks_per_node": 97}},
        ["slurm.tokenize.ntasks_per_node"],
    ),
    **{
        f"{option}, which excludes one of hpcgen's own": (
            {"train": {"extra_directives": ["--no-kill", option]}},
            ["slurm.train.extra_directives[1]"],
        )
        for option in (
            "--cpus-per-gpu=12",
            "--mem-per-cpu=4G",
            "--mem-per-gpu=64G",
            "--ntasks-per-gpu=1",
            "--oversubscribe",
        )
    },
    "an option twice": (
        {"train": {"extra_directives": ["--nice=5", "--nice=6"]}},
        ["slurm.train.extra_directives[1]"],
    ),
    **{
        f"hpcgen's own {option}": (
            {"train": {"extra_directives": ["--no-kill", option]}},
            ["slurm.train.extra_directives[1]"],
        )
        for option in (
            *("--nodes=4", "--output=/tmp/x", "--wrap=x", "--array=1-3"),
            *("--part=debug", "--outp=/tmp/x", "--requeu"),  # sbatch takes --part for --partition
        )
    },
}


@pytest.mark.parametrize(("settings", "paths"), REFUSED.values(), ids=REFUSED)
def test_what_slurm_would_refuse_or_hpcgen_sets_itself(tmp_path, settings, paths):
    assert [problem.path for problem in problems(tmp_path, **settings)] == paths


@pytest.mark.parametrize(
    "settings",
    [
        {"train": {"nodes": 16, "extra_directives": ["--mail-type=FAIL", "--no-kill"]}},
        LIMITS | {"train": {"time": "2:00:00", "nodes": 4}},
        LIMITS | {"train": {"partition": "big", "nodes": 500, "time": "9-00:00:00"}},
        LIMITS | QOS | {"train": {"time": "2:00:00", "nodes": 4, "qos": "any"}},
        {"train": {"qos": "anything"}},
        {"train": {"ntasks_per_node": 8}},
        {"train": {"cpus_per_task": 12}},
    ],
)
def test_a_valid_request_has_no_problems(tmp_path, settings):
    assert problems(tmp_path, **settings) == []


def test_the_path_is_where_the_value_is_written(tmp_path):
    site = {"partitions": {"hpc": {"max_nodes": 4}}}
    [problem] = problems(tmp_path, defaults={"nodes": 5, "time": "1:00"}, **site)
    assert (problem.path, problem.file) == ("slurm.defaults.nodes", "run")


@pytest.mark.parametrize(
    "directive", ["--gpus-per-task=1", "--nodelist=n1", "--comment=x", "--switches=1", "--no-kill"]
)
def test_other_options_are_accepted(tmp_path, directive):
    assert problems(tmp_path, train={"extra_directives": [directive]}) == []


@pytest.mark.parametrize(
    ("gres", "wrong"), [("gpu:8", False), ("gpu:h100:8", False), ("none", False), ("gpu:4", True)]
)
def test_the_count_of_the_gres(tmp_path, gres, wrong):
    run = run_of(tmp_path, gres=gres)
    assert bool(list(cluster_problems(run.cluster, run.node_type))) is wrong


def test_a_stage_of_the_cluster_has_its_own_time_limit(tmp_path):
    """A limit that is meant for training would let a short test wait for a long slot."""
    site = {"extends": "azure-ndv5", "partitions": {"hpc": {"max_time": "1:00:00"}}}
    write_yaml(tmp_path / "site.yaml", site)
    run = loaded(tmp_path, big_run(cluster="./site.yaml", slurm={"defaults": {"time": "0:50:00"}}))

    def time_of(stage):
        return make_allocation(STAGES[stage], run.config, run.cluster, run.node_type).time_s

    assert (time_of("nccl-test"), time_of("train")) == (30 * 60, 50 * 60)
    assert time_of("tensorboard") == 60 * 60, "no longer than the partition allows"
    site |= {"slurm": {"qos": "short"}, "qos": {"short": {"max_time": "20:00"}}}
    write_yaml(tmp_path / "site.yaml", site)
    run = loaded(tmp_path, big_run(cluster="./site.yaml", slurm={"defaults": {"time": "0:50:00"}}))
    assert time_of("tensorboard") == time_of("nccl-test") == 20 * 60, "nor than the QOS"


def racks(tmp_path, nodes, spares=0, stage="train", version="25.11", **settings):
    """The run of a job on nodes of which 18 are an NVLink domain."""
    site = {"extends": "azure-ndv5", "slurm_version": version, "slurm": {"partition": "hpc", **settings}}
    write_yaml(tmp_path / "site.yaml", site)
    section = STAGES[stage].section
    values = big_run(cluster="./site.yaml", slurm={section: {"nodes": nodes, "time": "1:00:00"}})
    run = loaded(tmp_path, {**values, "preflight": {"spare_nodes": spares}})
    domain = NvLink(links=18, bandwidth_gb_s=1800, domain_nodes=18)
    return dataclasses.replace(run, node_type=dataclasses.replace(run.node_type, nvlink=domain))


SEGMENTS = {
    "whole segments": (32, 0, 16, ("32", "16", 16, 16)),
    "a spare segment": (32, 16, 16, ("48", "16", 16, 16)),
    "spare nodes in each segment": (32, 4, 18, ("36", "18", 16, 16)),
    "two spare segments": (32, 32, 16, ("64", "16", 16, 16)),
    "fewer nodes than a segment": (4, 0, 16, ("4", "4", 4, 4)),
    "a segment with spare nodes": (16, 2, 18, ("18", "18", 16, 16)),
    "a segment larger than the NVLink domain": (72, 0, 36, ("72", "36", 36, 18)),
    "one node": (1, 0, 16, ("1", None, 1, 18)),
    "no segment": (36, 1, None, ("37", None, 36, 18)),
}
"""Nodes, spare nodes and segment, and what follows: --nodes, --segment, nodes of a segment, nodes with NVLink."""


@pytest.mark.parametrize(("nodes", "spares", "segment", "expected"), SEGMENTS.values(), ids=SEGMENTS)
def test_segments(tmp_path, nodes, spares, segment, expected):
    run = racks(tmp_path, nodes, spares, segment=segment)
    found = make_allocation(STAGES["train"], run.config, run.cluster, run.node_type)
    options = found.resource_options()
    got = (options["nodes"], options.get("segment"), found.nodes_per_segment, found.nvlink_nodes)
    assert got == expected
    assert not list(allocation_problems(STAGES["train"], run.config, run.cluster, run.node_type))


@pytest.mark.parametrize(
    ("nodes", "spares", "path", "said"),
    [
        (
            30,
            0,
            "slurm.train.nodes",
            "cannot be divided into segments of 16 nodes (slurm.segment); use 16 or 32",
        ),
        (
            32,
            1,
            "slurm.train.nodes",
            "and preflight.spare_nodes = 1 make 33 nodes, which cannot be divided into segments of 16 nodes "
            "(slurm.segment); use 31 or 47, or set spare_nodes to 16",
        ),
        (31, 1, "preflight.spare_nodes", "would split a segment; use 2 with 30 nodes or 16 with 16 nodes"),
    ],
)
def test_nodes_that_segments_cannot_hold(tmp_path, nodes, spares, path, said):
    run = racks(tmp_path, nodes, spares, segment=16)
    [problem] = allocation_problems(STAGES["train"], run.config, run.cluster, run.node_type)
    assert problem.path == path
    assert str(problem).endswith(said)


@pytest.mark.parametrize("stage", ["node-health", "tokenize", "image", "export"])
def test_jobs_of_one_node_or_without_gpus_ask_for_no_segment(tmp_path, stage):
    run = racks(tmp_path, 32, segment=16)
    found = make_allocation(STAGES[stage], run.config, run.cluster, run.node_type)
    assert "segment" not in found.resource_options()


def test_the_key_segment_requires_a_release_and_replaces_the_option(tmp_path):
    run = racks(tmp_path, 32, version="23.11", segment=16)
    [old] = allocation_problems(STAGES["node-health"], run.config, run.cluster, run.node_type)
    assert str(old).startswith(
        "slurm.segment requires Slurm 24.05, but slurm_version of the cluster profile is 23.11"
    )
    run = racks(tmp_path, 32, segment=16, extra_directives=["--segment=8"])
    [twice] = allocation_problems(STAGES["train"], run.config, run.cluster, run.node_type)
    assert str(twice) == "slurm.extra_directives[0] is a duplicate of the key segment; remove it"
    run = racks(tmp_path, 32, extra_directives=["--segment=16"])
    assert not list(allocation_problems(STAGES["train"], run.config, run.cluster, run.node_type))
    [advice] = allocation_warnings(STAGES["train"], run.config, run.cluster, run.node_type)
    assert (advice.path, advice.hint) == ("slurm.extra_directives[0]", "use the key segment")


MASKS = {
    "used": ({}, {}, None),
    "other CPUs": (
        {"cpus_per_task": 4},
        {},
        "slurm.train.cpus_per_task is not the number of CPUs in a mask, 12, so ranks are not bound to the CPUs near "
        "their GPUs (cpu_masks of node type ndv5); use 12, or remove it",
    ),
    "fewer ranks": (
        {"ntasks_per_node": 4},
        {},
        "slurm.train.ntasks_per_node is not the number of masks, 8, so",
    ),
    "shared nodes": ({}, {"exclusive": False}, "node_type has cpu_masks, but its jobs share their nodes"),
    "cores in place of CPUs": (
        {},
        {"cpus_per_node": 48},
        "node_type has masks of 12 CPUs, but each rank gets 6 of cpus_per_node, so ranks are not bound",
    ),
    "no masks": ({"cpus_per_task": 4}, {"cpu_masks": ()}, None),
}


@pytest.mark.parametrize(("train", "facts", "said"), MASKS.values(), ids=MASKS)
def test_masks_that_are_not_used_are_a_warning(tmp_path, train, facts, said):
    run = run_of(tmp_path, train={"time": "1:00", **train})
    node_type = dataclasses.replace(run.node_type, **facts)
    found = make_allocation(STAGES["train"], run.config, run.cluster, node_type)
    warned = list(map(str, allocation_warnings(STAGES["train"], run.config, run.cluster, node_type)))
    assert len(warned) == bool(said)
    assert "".join(warned).startswith(said or "")
    assert bool(found.cpu_masks) == (said is None and bool(node_type.cpu_masks))
    sockets = "block" if found.cpu_masks else "block:block"
    assert f"--distribution={sockets}" in found.srun_options(), "without masks, neighbors are on one socket"


def test_the_masks_of_288_cpus_reach_srun(tmp_path):
    run = run_of(tmp_path, train={"time": "1:00"}, node_type="alps-gh200", gres="gpu:4")
    options = make_allocation(STAGES["train"], run.config, run.cluster, run.node_type).srun_options()
    [masks] = [option.partition(":")[2] for option in options if option.startswith("--cpu-bind=mask_cpu:")]
    assert [ranges(int(mask, 16)) for mask in masks.split(",")] == ["0-71", "72-143", "144-215", "216-287"]
    assert "--cpus-per-task=72" in options


@pytest.mark.parametrize(
    ("directory", "arch", "needed"),
    [
        ("hpcgen-0.2.0-aarch64-0c570a4d0d43", "arm64", None),
        ("hpcgen-0.2.0-0c570a4d0d43", "x86_64", None),
        ("hpcgen-0.2.0-0c570a4d0d43", "aarch64", "aarch64"),
        ("hpcgen-0.2.0-aarch64-0c570a4d0d43", "x86_64", "x86_64"),
        ("own-code", "arm64", None),
    ],
)
def test_code_for_other_processors_is_refused(tmp_path, directory, arch, needed):
    run = run_of(tmp_path, code_dir=f"/shared/code/{directory}")
    node_type = dataclasses.replace(run.node_type, processor=Processor(arch=arch))
    found = list(map(str, cluster_problems(run.cluster, node_type)))
    assert len(found) == bool(needed)
    assert all(message.endswith(f"run hpcgen install-code --architecture {needed}") for message in found)
