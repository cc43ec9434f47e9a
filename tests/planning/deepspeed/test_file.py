"""DeepSpeed's configuration as the program reads it: in the job's directory, or on the disk of its node."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgen import render
from tests.planning.test_program import mistakes, planned, program_run

SHOW = "import json, sys; print(json.dumps([sys.argv[1], json.load(open(sys.argv[1]))]))"
SIZES = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}


def with_deepspeed(config: dict[str, Any], **section: Any) -> dict[str, Any]:
    command = ["python3", "-c", SHOW, "{DEEPSPEED_CONFIG}"]
    return program_run(command=command, deepspeed={"config": config, **section})


def read_by_the_program(directory: Path, config: dict[str, Any], **section: Any) -> tuple[str, Any]:
    """The path and the content of the configuration in a task of the job 7."""
    values = with_deepspeed(config, **section)
    values["paths"]["run_dir"] = str(directory / "run")
    values["program"]["directory"] = str(directory)
    stage = planned(directory, values).stages["run"]
    job_dir = directory / "run" / "jobs" / "7"
    scratch = directory / "scratch"
    for folder in (job_dir, scratch):
        folder.mkdir(parents=True)
    for name, text in stage.files.items():
        (job_dir / name).write_text(text, encoding="utf-8")
    environment = {
        "PATH": "/usr/bin:/bin",
        "SLURM_PROCID": "9",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "7",
        "TMPDIR": str(scratch),
    }
    done = subprocess.run(
        ["sh", str(job_dir / "program.sh")], env=environment, capture_output=True, text=True, check=True
    )
    path, document = json.loads(done.stdout)
    return path, document


@pytest.mark.process
def test_the_configuration_is_a_file_of_the_job(tmp_path: Path) -> None:
    config = {**SIZES, "zero_optimization": {"stage": 3}, "tensorboard": {"output_path": "{RUN_DIR}/{{tb}}"}}
    path, found = read_by_the_program(tmp_path, config)
    assert path == f"{tmp_path}/run/jobs/7/ds_config.json"
    assert found == {
        "train_batch_size": 4 * 2 * 16,
        **SIZES,
        "zero_optimization": {"stage": 3},
        "tensorboard": {"output_path": f"{tmp_path}/run/{{tb}}"},
    }


@pytest.mark.process
def test_variables_of_the_job_are_expanded_on_the_node_and_nothing_else_is(tmp_path: Path) -> None:
    hostile = 'a"b \\ $HOME `id` $(id) \\ue000RANK\\ue001 \\\\n é'
    offload = {"device": "nvme", "nvme_path": "{SCRATCH}/swap"}
    config = {
        **SIZES,
        "zero_optimization": {"stage": 3, "offload_optimizer": offload},
        "csv_monitor": {"job_name": hostile, "output_path": "{RUN_DIR}/{JOB_ID}"},
    }
    path, found = read_by_the_program(tmp_path, config)
    assert path == f"{tmp_path}/scratch/ds_config-7-9.json"
    assert found["zero_optimization"]["offload_optimizer"]["nvme_path"] == f"{tmp_path}/scratch/swap"
    assert found["csv_monitor"] == {"job_name": hostile, "output_path": f"{tmp_path}/run/7"}


def test_torchrun_gets_the_path_too(tmp_path: Path) -> None:
    values = with_deepspeed(SIZES)
    values["program"] |= {"launcher": "torchrun", "command": ["t.py", "{DEEPSPEED_CONFIG}"]}
    files = planned(tmp_path, values).stages["run"].files
    assert "DEEPSPEED_CONFIG=/shared/runs/mine/jobs/$SLURM_JOB_ID/ds_config.json\n" in files["program.sh"]
    assert files["program.sh"].endswith('t.py "$DEEPSPEED_CONFIG"\n')
    assert json.loads(files["ds_config.json"])["train_batch_size"] == 4 * 2 * 16


def test_the_script_of_a_program_without_deepspeed_has_none_of_it(tmp_path: Path) -> None:
    script = render(planned(tmp_path, program_run()), "run")
    assert "DEEPSPEED" not in script.replace(" DEEPSPEED_*", "")  # a pattern of variables to unset


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        (
            {"command": ["a", "{DEEPSPEED_CONFIG}"]},
            "but there is no section program.deepspeed; add the section",
        ),
        (
            {"deepspeed": {"config": SIZES}},
            "does not name, because no argument has {DEEPSPEED_CONFIG}; pass it",
        ),
        ({"deepspeed": {}}, "program.deepspeed.config is missing"),
    ],
)
def test_the_command_and_the_section_belong_together(
    tmp_path: Path, program: dict[str, Any], expected: str
) -> None:
    [mistake] = mistakes(tmp_path, program_run(**program))
    assert expected in mistake


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{SCRTCH}", "has the unknown variable {SCRTCH}; did you mean SCRATCH?; write {{ and }} for braces"),
        ("{LOCAL_RANK}", "but all ranks need the same configuration"),
        ("a{b", "has a single {; write {{ for a brace"),
    ],
)
def test_strings_have_known_variables_of_a_node(tmp_path: Path, text: str, expected: str) -> None:
    config = {**SIZES, "csv_monitor": {"output_path": text}}
    [mistake] = mistakes(tmp_path, with_deepspeed(config))
    assert f"program.deepspeed.config.csv_monitor.output_path = {json.dumps(text)}" in mistake
    assert expected in mistake
