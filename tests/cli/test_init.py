from __future__ import annotations

import json
import os

import pytest

from hpcgen.config.loader import load_run
from hpcgen.config.presets import PRESETS
from hpcgen.planning.request import stage_settings
from hpcgen.stages import STAGES
from tests.cli.command import hpcgen, listing
from tests.runs import write_yaml


def test_the_first_run(workplace):
    found = hpcgen("init")
    assert (found.status, found.stdout) == (0, "")
    assert found.stderr == "wrote run.yaml; next: hpcgen validate -c run.yaml\n"
    assert sorted(listing(workplace)) == ["run.schema.json", "run.yaml", "runs", "runs/run"]
    assert json.loads((workplace / "run.schema.json").read_text())["title"] == "hpcgen RunConfig"
    assert (workplace / "runs/run").stat().st_mode & 0o777 == 0o700
    assert hpcgen("render", "train", "-c", "run.yaml").status == 0


@pytest.mark.parametrize("preset", ["tiny", "125m", "llama3-8b"])
def test_what_it_writes_can_be_rendered_at_once(preset):
    assert hpcgen("init", "mini.yaml", "--preset", preset).status == 0
    found = hpcgen("render", "train", "-c", "mini.yaml")
    assert found.status == 0, found.stderr


def test_the_time_limit_fits_the_partition(workplace):
    profile = "extends: local\npartitions: {short: {max_time: '4:00:00'}}\nslurm: {partition: short}\n"
    (workplace / "short.yaml").write_text(profile)
    assert hpcgen("init", "--cluster", "./short.yaml", "--preset", "tiny").status == 0
    assert 'time: "4:00:00"' in (workplace / "run.yaml").read_text()


OTHER_LAYOUTS = {
    "small GPUs": ("1.3b", "gpu_memory_gib: 20.0", "", "does not fit GPUs of 20 GiB"),
    "nodes with one GPU": ("llama3-8b", "gpus_per_node: 1", "", "does not suit the nodes"),
    "a small partition": ("30b", "{}", "partitions: {hpc: {max_nodes: 1}}", "needs 2 nodes"),
}


@pytest.mark.parametrize(("preset", "facts", "profile", "why"), OTHER_LAYOUTS.values(), ids=OTHER_LAYOUTS)
def test_a_preset_that_does_not_suit_the_cluster_gets_another_layout(workplace, preset, facts, profile, why):
    (workplace / "topologies").mkdir()
    (workplace / "topologies/mine.yaml").write_text(f"extends: h100-sxm\n{facts}\n".replace("{}\n", ""))
    (workplace / "mine.yaml").write_text(f"extends: azure-ndv5\nnode_type: mine\n{profile}\n")
    assert hpcgen("init", "--cluster", "./mine.yaml", "--preset", preset).status == 0
    text = (workplace / "run.yaml").read_text()
    [comment] = [line for line in text.splitlines() if "# hpcgen init: " in line]
    assert comment.endswith(f" tokens/s per GPU predicted. The preset's layout {why}")
    found = hpcgen("validate", "-c", "run.yaml", "--set", "data.mock=true")
    assert found.status == 0, found.stderr
    assert "on a device with" not in found.stderr


def test_a_model_that_no_layout_fits_into_a_partition_is_refused(workplace):
    (workplace / "mine.yaml").write_text("extends: azure-ndv5\npartitions: {hpc: {max_nodes: 1}}\n")
    found = hpcgen("init", "--cluster", "./mine.yaml", "--preset", "175b")
    assert found.status == 2
    assert found.stderr.startswith(
        "--preset 175b: no layout fits into the memory of the GPUs of 1 node, the maximum of partition hpc; use "
    )
    assert sorted(listing(workplace)) == ["mine.yaml"]


SETTINGS = {
    "nodes": 3,
    "ntasks_per_node": 2,
    "cpus_per_task": 5,
    "mem": "7G",
    "time": "10:00:00",
    "partition": "long",
    "account": "a",
    "qos": "q",
    "reservation": "r",
    "constraint": "c",
    "segment": 3,
    "signal_lead_s": 900,
    "max_restarts": 6,
    "chain": 2,
    "extra_directives": ("--mail-type=FAIL",),
}
"""A value for each Slurm setting of a profile."""


@pytest.mark.parametrize("of_stage", [False, True], ids=["of all stages", "of the stage"])
@pytest.mark.parametrize(
    "options", [(), ("--preset", "tiny"), ("--preset", "llama3-8b"), ("--program",)], ids=str
)
def test_a_new_run_hides_no_slurm_setting_of_the_profile(workplace, options, of_stage):
    settings = {**SETTINGS, "extra_directives": list(SETTINGS["extra_directives"])}
    profile = {
        "node_type": "ndv5",
        "partitions": {"long": {"max_time": "2-00:00:00"}},
        "slurm": dict.fromkeys(("train", "run"), settings) if of_stage else settings,
    }
    write_yaml(workplace / "site.yaml", profile)
    found = hpcgen("init", "--cluster", "./site.yaml", *options)
    assert found.status == 0, found.stderr
    run = load_run(workplace / "run.yaml")
    stage = STAGES["run" if "--program" in options else "train"]
    assert vars(stage_settings(stage, run.config, run.cluster)) == SETTINGS


def test_a_time_limit_of_the_profile_that_the_partition_refuses_is_shortened(workplace):
    profile = {
        "node_type": "ndv5",
        "partitions": {"short": {"max_time": "4:00:00"}},
        "slurm": {"partition": "short", "time": "8:00:00"},
    }
    write_yaml(workplace / "site.yaml", profile)
    assert hpcgen("init", "--cluster", "./site.yaml").status == 0
    assert load_run(workplace / "run.yaml").config.slurm.defaults.time == "4:00:00"


def test_a_tiny_run_renders_for_the_local_cluster():
    assert hpcgen("init", "mini.yaml", "--preset", "tiny", "--cluster", "local", "--name", "t").status == 0
    assert hpcgen("render", "train", "-c", "mini.yaml").status == 0


def test_an_existing_file_is_not_overwritten(workplace):
    (workplace / "run.yaml").write_text("mine")
    before = listing(workplace)
    found = hpcgen("init")
    assert found.status == 2
    assert found.stderr == "run.yaml: already exists; choose another name, or use --force\n"
    assert listing(workplace) == before
    assert hpcgen("init", "--force").status == 0
    assert (workplace / "run.yaml").read_text() != "mine"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--preset", "175B"), "--preset 175B: unknown preset; did you mean 175b?"),
        (("--preset", "xyz"), f"--preset xyz: unknown preset; use one of {', '.join(PRESETS)}"),
        (("--cluster", "locl"), "--cluster locl is not a known cluster profile; did you mean local?"),
        (("nope/run.yaml",), "/nope does not exist; create it first"),
        (("-",), "-: not a file name; name a file"),
        (("/dev/null", "--force"), "/dev/null: not a file name; name a file"),
        (("--cluster", "nowhere"), "is not a known cluster profile"),
        (("--name", "a b"), "name"),
        (("--run-dir", "~/x"), "paths.run_dir"),
        (("--run-dir", "a b"), "paths.run_dir"),
        (("--name", "a\nb"), "unprintable"),
    ],
)
def test_mistakes_write_nothing(workplace, options, message):
    found = hpcgen("init", *options)
    assert found.status == 2
    assert message in found.stderr
    assert listing(workplace) == {}


def test_force_leaves_a_link_where_it_is(workplace):
    (workplace / "real.yaml").write_text("old")
    (workplace / "run.yaml").symlink_to("real.yaml")
    assert hpcgen("init", "--force").status == 0
    assert (workplace / "run.yaml").is_symlink()
    assert (workplace / "real.yaml").read_text().startswith("#")


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_permission(workplace):
    workplace.chmod(0o500)
    found = hpcgen("init")
    assert found.status == 2
    assert "cannot be created" in found.stderr


def test_a_write_protected_run_file_stays_and_so_does_its_schema(workplace):
    (workplace / "run.yaml").write_text("name: mine\n")
    (workplace / "run.yaml").chmod(0o444)
    before = listing(workplace)
    ended = hpcgen("init", "run.yaml", "--force")
    assert ended.status == 2
    assert "run.yaml: is write-protected" in ended.stderr
    assert listing(workplace) == before
