from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from hpcgen.stages import STAGES
from tests.cli.command import hpcgen
from tests.cli.every_stage import STAGES_AND_RUNTIMES, run_of_stage, script_of
from tests.patience import PATIENCE_S
from tests.rendering.scripts import CANARY, HOSTILE_WORDS, UNPRINTABLE
from tests.runs import big_run, loaded, planned, write_yaml

CLEAN = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}


@pytest.fixture
def run_file(workplace: Path) -> Path:
    return write_yaml(workplace / "run.yaml", big_run(secrets=["HF_TOKEN"]))


def as_json(*arguments: object) -> dict:
    found = hpcgen("env", *arguments, "--format", "json")
    assert found.status == 0, found.stderr
    return json.loads(found.stdout)


def sourced(text: str, directory: Path, how: str) -> tuple[dict[str, str], str]:
    """Exports of a shell that has read the text, and its HPCGEN_CONTAINER_ENV."""
    (directory / "exports").write_text(text, encoding="utf-8")
    script = f'set -euo pipefail; {how}; printf "%s\\0" "$HPCGEN_CONTAINER_ENV"; env -0'
    done = subprocess.run(
        ["bash", "-c", script], cwd=directory, env=CLEAN, capture_output=True, check=True, timeout=PATIENCE_S
    )
    assert done.stderr == b""
    names, *entries = os.fsdecode(done.stdout).split("\0")[:-1]
    pairs = (entry.split("=", 1) for entry in entries)
    own = {*CLEAN, "PWD", "OLDPWD", "SHLVL", "_"}
    return {name: value for name, value in pairs if name not in own}, names


@pytest.mark.process
@pytest.mark.parametrize("how", ["source <(cat exports)", 'eval "$(cat exports)"'])
def test_a_shell_gets_exactly_the_values_of_the_json(workplace, how):
    values = {f"HOSTILE_{number}": word for number, word in enumerate(HOSTILE_WORDS)}
    run_file = workplace / "run.yaml"
    run_file.write_text(json.dumps(big_run(environment=values), ensure_ascii=False), encoding="utf-8")
    expected = as_json("-c", run_file)
    assert values.items() <= expected["environment"].items()
    found, names = sourced(hpcgen("env", "-c", run_file).stdout, workplace, how)
    assert found == expected["environment"]
    assert names.split(",") == expected["container_env"]
    assert not list(workplace.rglob(CANARY))


@pytest.mark.parametrize("word", UNPRINTABLE)
def test_values_that_a_shell_cannot_represent_are_refused(workplace, word):
    run_file = write_yaml(workplace / "run.yaml", big_run(environment={"A": word}))
    found = hpcgen("env", "-c", run_file)
    assert (found.status, found.stdout) == (2, "")
    assert "unprintable" in found.stderr


@pytest.mark.parametrize(("stage", "runtime"), STAGES_AND_RUNTIMES)
def test_the_exports_are_those_of_the_rendered_script(tmp_path, workplace, stage, runtime):
    script = script_of(tmp_path, stage, runtime, environment={"FOO": "a b"})
    [section] = re.findall(r"^# ==== environment ====\n(.*?)^# ==== ", script, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in section.splitlines()]
    exports = [line.partition(" # ")[0] for line in lines if line.startswith("export ")]
    found = hpcgen("env", stage, "-c", tmp_path / "run.yaml")
    assert [line for line in found.stdout.splitlines() if line.startswith("export ")] == exports
    assert "export FOO='a b'" in exports


OF_THE_LAUNCH_LINE = {
    *("TRAINER_CONFIG", "TRAINER_STOP_FILE", "TRAINER_RENDEZVOUS_ID"),
    *("CORPUS_JOB", "EVALUATION_CONFIG", "MEMORY_TEST_CONFIG"),
}


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage != "image"])
def test_the_names_for_the_container_are_those_of_the_rendered_script(tmp_path, workplace, stage):
    """But for what the launch line of the trainer or of a data stage needs."""
    values = run_of_stage(stage, "pyxis", secrets=["HF_TOKEN"])
    container = planned(tmp_path, values, [stage]).stages[stage].container
    rendered = set(container.environment) - OF_THE_LAUNCH_LINE
    assert set(as_json(stage, "-c", tmp_path / "run.yaml")["container_env"]) == rendered


def test_each_export_is_below_its_reason(run_file):
    lines = hpcgen("env", "-c", run_file).stdout.splitlines()
    exports = [number for number, line in enumerate(lines) if line.startswith("export ")]
    assert len(exports) > 20
    assert all(lines[number - 1].startswith("# ") for number in exports)
    above = lines[lines.index("export NCCL_PXN_DISABLE=1") - 1]
    assert above == (
        "# Each GPU uses its own NIC; relaying through a neighbor over NVLink is slower here. "
        "(node type, ndv5: ai-infrastructure-on-azure, hopper.conf)"
    )
    assert "# Export these yourself before srun: HF_TOKEN, MASTER_ADDR, MASTER_PORT, WORLD_SIZE" in lines


def test_a_cluster_without_a_run_lists_what_a_run_would_add(workplace):
    lines = hpcgen("env", "--cluster", "azure-ndv5").stdout.splitlines()
    run_dir = f"{workplace}/runs/azure-ndv5"
    assert lines[1] == f"# Without a run file, the run directory is {run_dir} (change it with --run-dir)."
    assert (
        "# --set parallelism.tensor_model_parallel_size=2 also sets CUDA_DEVICE_MAX_CONNECTIONS=1." in lines
    )
    assert not [line for line in lines if line.startswith("export CUDA_DEVICE_MAX_CONNECTIONS")]
    setting = "parallelism.tensor_model_parallel_size=4"
    assert (
        "export CUDA_DEVICE_MAX_CONNECTIONS=1"
        in hpcgen("env", "train", "--cluster", "azure-ndv5", "--set", setting).stdout.splitlines()
    )


def test_a_cluster_without_a_run_has_the_same_values(workplace, run_file):
    """As far as no run is asked."""
    alone = as_json("--cluster", "azure-ndv5", "--run-dir", "/shared/runs/big")["environment"]
    of_run = as_json("-c", run_file)["environment"]
    assert {**alone, "CUDA_DEVICE_MAX_CONNECTIONS": "1"} == of_run
    for stage in STAGES:
        if STAGES[stage].environment_of == "train":
            continue
        alone, of_run = (
            as_json(stage, "--cluster", "azure-ndv5"),
            as_json(stage, "-c", run_file),
        )
        assert alone["environment"] == of_run["environment"]


def test_the_shells_own_library_path_is_left_alone(run_file):
    setting = "environment.LD_LIBRARY_PATH=/opt/x"
    found = hpcgen("env", "-c", run_file, "--set", setting)
    assert "LD_LIBRARY_PATH" not in found.stdout
    assert "\nwarning: LD_LIBRARY_PATH (--set environment.LD_LIBRARY_PATH) is left out" in found.stderr
    form = as_json("-c", run_file, "--set", setting)
    assert "LD_LIBRARY_PATH" not in {*form["environment"], *form["container_env"]}


def test_secrets_go_by_name(run_file, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    for form in ("sh", "json"):
        found = hpcgen("env", "-c", run_file, "--format", form)
        assert "HF_TOKEN" in found.stdout
        assert "hunter2" not in found.stdout + found.stderr


def test_mistakes_print_no_export(run_file):
    found = hpcgen("env", "-c", run_file, "--set", "environment.PATH=/x")
    assert (found.status, found.stdout) == (2, "")
    assert found.stderr.startswith(
        "--set environment.PATH: environment.PATH is set by the script or the image"
    )


def test_sharp_on_nodes_without_it_is_a_mistake(workplace):
    arguments = ["env", "nccl-test", "--cluster", "local"]
    found = hpcgen(*arguments, "--set", "parallelism.use_sharp=true")
    assert (found.status, found.stdout) == (2, "")
    assert "node type cpu does not define SHARP" in found.stderr


def test_relative_paths_start_at_the_run_file(tmp_path, workplace):
    """A relative run directory starts at the run file, not where the command runs."""
    run = loaded(tmp_path, big_run(paths={"run_dir": "runs/x"}))
    found = as_json("-c", run.directory / "run.yaml")["environment"]
    assert found["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] == f"{tmp_path}/runs/x/stacks/flight-record-"


def test_a_directory_that_no_script_can_name_prints_no_exports(workplace, monkeypatch):
    (workplace / "a\nb").mkdir()
    monkeypatch.chdir(workplace / "a\nb")
    found = hpcgen("env", "--cluster", "azure-ndv5")
    assert (found.status, found.stdout) == (2, "")
    assert "unprintable character" in found.stderr
