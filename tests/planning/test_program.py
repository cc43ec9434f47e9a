"""A run file with a program: what it may have, what its job runs, and how arguments reach the program."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from hpcgen import plan, render
from hpcgen.config.program import VARIABLES
from hpcgen.errors import ConfigErrors
from hpcgen.run_plan.plan import Plan
from tests.runs import loaded

PYTHON = ["python", "train.py"]


def program_run(**program: Any) -> dict[str, Any]:
    """A run file without a model; `program` are the keys of its section."""
    return {
        "name": "mine",
        "cluster": "azure-ndv5",
        "paths": {"run_dir": "/shared/runs/mine"},
        "container": {"image": "/shared/images/mine.sqsh"},
        "slurm": {"run": {"nodes": 2, "time": "1-00:00:00"}},
        "program": {"command": PYTHON, **program},
    }


def planned(directory: Path, values: dict[str, Any], *stages: str) -> Plan:
    return plan(loaded(directory, values), stages, exists=lambda path: True)


def mistakes(directory: Path, values: dict[str, Any], *stages: str) -> list[str]:
    with pytest.raises(ConfigErrors) as caught:
        planned(directory, values, *stages)
    return [str(mistake) for mistake in caught.value.mistakes]


def arguments_of(directory: Path, *command: str) -> list[str]:
    """The arguments that a task passes to a program, which prints them as JSON."""
    show = "import json, sys; print(json.dumps(sys.argv[1:]))"
    values = program_run(command=["python3", "-c", show, *command])
    file = planned(directory, values).stages["run"].files["program.sh"]
    environment = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1"}
    environment |= {
        "MASTER_ADDR": "10.0.0.4",
        "MASTER_PORT": "12345",
        "TMPDIR": "/nvme/a b",
        "SLURM_JOB_ID": "7",
    }
    done = subprocess.run(["sh", "-c", file], env=environment, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.process
def test_variables_are_replaced_and_everything_else_reaches_the_program_as_it_is(tmp_path: Path) -> None:
    found = arguments_of(
        tmp_path,
        "{RANK}/{WORLD_SIZE} {LOCAL_RANK} {NODE_RANK} {NNODES}x{RANKS_PER_NODE} {GPUS_PER_NODE}",
        "tcp://{MASTER_ADDR}:{MASTER_PORT}",
        "{RUN_DIR} {SCRATCH} {JOB_ID} {RESTART}",
        '{{"a": {{}}}}',
        'it\'s $HOME `id` $(id) \\n * "q" ; rm -rf x',
        "{{RANK}}",
    )
    assert found == [
        "9/16 1 1 2x8 8",
        "tcp://10.0.0.4:12345",
        "/shared/runs/mine /nvme/a b 7 0",
        '{"a": {}}',
        'it\'s $HOME `id` $(id) \\n * "q" ; rm -rf x',
        "{RANK}",
    ]


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ({"command": []}, "program.command = [] is empty"),
        ({"command": ["a", "{RNAK}"]}, "{RNAK}; did you mean RANK"),
        ({"command": ["a", "{x"]}, "has a single {; write {{ for a brace"),
        ({"command": ["-u", "x"]}, "program.command[0] = -u is not a command"),
        ({"launcher": "torchrun"}, "program.command[0] = python is started by launcher torchrun itself"),
        (
            {"command": ["t.py", "{RANK}"], "launcher": "torchrun"},
            "which torchrun sets for each of its processes",
        ),
        ({"command": ["t.py"], "launcher": "torchrun", "stop": {"signal": "USR1"}}, "would kill torchrun"),
        ({"progress": {}}, "program.progress sets nothing; set file, checkpoints or log"),
        (
            {"done": {"file": "{SCRATCH}/done"}},
            'program.done.file = "{SCRATCH}/done" has {SCRATCH}, which is replaced only in the command; begin with '
            "{RUN_DIR}/, or write the path itself",
        ),
        ({"progress": {"file": "a", "log": "(a)"}}, "program.progress sets file and log"),
        ({"progress": {"checkpoints": "ckpt"}}, "a path without '..' that has a wildcard"),
        ({"progress": {"log": "step [0-9]+"}}, "has no group; put parentheses around the number"),
        ({"progress": {"log": "step ([0-9]+"}}, "is not a regular expression"),
        ({"progress": {"log": "step (\\d+)"}}, "use [0-9]"),
        ({"progress": {"log": "step (?:a)([0-9])"}}, "use a plain group"),
        ({"stop": {}}, "program.stop sets nothing; set signal or file"),
        ({"directory": "nowhere"}, "program.directory = nowhere is not a directory"),
    ],
)
def test_mistakes_in_the_section_are_reported(tmp_path: Path, program: dict[str, Any], expected: str) -> None:
    [mistake] = mistakes(tmp_path, program_run(**program))
    assert expected in mistake


def test_keys_of_the_trainer_next_to_a_program_are_mistakes(tmp_path: Path) -> None:
    values = {**program_run(), "model": {"num_layers": 2}, "data": {"split": "1,1,1"}, "preset": "175b"}
    found = mistakes(tmp_path, {**values, "generation": {"seed": 1}})
    assert [mistake.split(": ")[1].split()[0] for mistake in found] == [
        *("preset", "model", "generation", "data.split")
    ]
    assert all("is for hpcgen's trainer, but the run file has the section program" in each for each in found)


def test_a_program_leaves_no_model_for_training_and_run_needs_a_program(tmp_path: Path) -> None:
    values = {**program_run(), "slurm": {"defaults": {"time": "1:00:00"}}}
    [mistake] = mistakes(tmp_path, values, "train")
    assert "program replaces hpcgen's trainer, so there is no model for stage train; use stage run" in mistake
    values = {**program_run(), "preset": "175b", "data": {"mock": True}}
    del values["program"]
    [mistake] = mistakes(tmp_path, values, "run")
    assert "program is missing, but stage run needs it" in mistake


def test_a_time_limit_without_time_before_the_stop_is_a_mistake(tmp_path: Path) -> None:
    values = program_run(stop={"file": "stop"})
    values["slurm"]["run"]["time"] = "5:00"
    [mistake] = mistakes(tmp_path, values)
    assert "slurm.run.time = 5:00 leaves no time to run" in mistake
    values["slurm"]["run"]["signal_lead_s"] = 60
    directives = planned(tmp_path, values).stages["run"].directives
    assert "--signal=B:USR2@60" in directives


def test_torchrun_is_one_task_per_node_with_a_rank_per_gpu(tmp_path: Path) -> None:
    found = planned(tmp_path, program_run(launcher="torchrun", command=["train.py", "--lr=1"]))
    stage = found.stages["run"]
    assert (stage.allocation.ntasks_per_node, stage.allocation.ranks_per_node) == (1, 8)
    assert stage.allocation.cpus_per_task == 96
    assert "--gpus-per-node=8" in stage.directives
    command = stage.files["program.sh"].splitlines()[-1]
    assert command == (
        "exec python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=8 "
        '--node-rank="$SLURM_NODEID" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" train.py --lr=1'
    )
    assert "RANK=" not in stage.files["program.sh"]


def test_the_environment_of_hpcgens_own_code_is_not_the_programs(tmp_path: Path) -> None:
    """PYTHONSAFEPATH would hide the modules next to the program's script."""
    names = {variable.name for variable in planned(tmp_path, program_run()).stages["run"].environment}
    assert "NCCL_IB_QPS_PER_CONNECTION" in names
    assert not names & {"PYTHONSAFEPATH", "PYTHONPATH"}


def test_the_documentation_lists_every_variable() -> None:
    page = (Path(__file__).parents[2] / "docs" / "program.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `{")]
    assert rows == [f"| `{{{name}}}` | {meaning} |" for name, meaning in VARIABLES.items()]


def test_preflight_and_spares_are_as_for_training(tmp_path: Path) -> None:
    script = render(planned(tmp_path, {**program_run(), "preflight": {"spare_nodes": 1}}), "run")
    assert "#SBATCH --nodes=3\n" in script
    assert "    choose_good_nodes" in script
    assert "run_until_good launch" in script


def test_paths_of_the_section_start_at_the_run_file_and_can_be_written_in_the_container(
    tmp_path: Path,
) -> None:
    below = tmp_path / "a[b]"
    below.mkdir()
    values = program_run(progress={"checkpoints": "out/step_*"}, done={"file": "/shared/done/yes"})
    values["container"] = {"runtime": "none"}
    stage = planned(below, values).stages["run"]
    assert stage.values["progress_pattern"] == f"{tmp_path}/a[[]b]/out/step_*"
    assert stage.directories == (str(below), f"{below}/out", "/shared/done")


def test_paths_of_the_section_can_begin_with_the_run_directory(tmp_path: Path) -> None:
    below = tmp_path / "a[b]"
    below.mkdir()
    values = program_run(
        progress={"checkpoints": "{RUN_DIR}/step_*"},
        stop={"file": "{RUN_DIR}/stop"},
        done={"file": "{RUN_DIR}/done"},
    )
    plan = planned(below, values)
    run_dir = plan.config.paths.run_dir
    found = plan.stages["run"].values
    assert found["progress_pattern"] == f"{run_dir.replace('a[b]', 'a[[]b]')}/step_*"
    assert (found["stop_path"], found["done_file"]) == (f"{run_dir}/stop", f"{run_dir}/done")


@pytest.mark.parametrize(
    ("pattern", "existing", "expected"),
    [
        ("last*.ckpt", [], "may count copies: a tool that saves last, then last-v1, starts again from last"),
        ("out/Best-[0-9]", [], "may count copies: a tool that saves Best-"),
        (
            "out/*.ckpt",
            ["step=40.ckpt", "step=40-v1.ckpt"],
            "takes 1 for the progress of {here}/out/step=40-v1.ckpt",
        ),
        ("out/step_*", ["step_40", "step_80"], None),
        ("last/step_*", [], None),
    ],
)
def test_a_name_that_counts_copies_in_place_of_steps_warns(
    tmp_path: Path, pattern: str, existing: list[str], expected: str | None
) -> None:
    (tmp_path / "out").mkdir()
    for name in existing:
        (tmp_path / "out" / name).touch()
    warnings = planned(tmp_path, program_run(progress={"checkpoints": pattern})).warnings
    found = [each for each in warnings if "program.progress.checkpoints" in each]
    assert len(found) == (expected is not None)
    assert all((expected or "").format(here=tmp_path) in each for each in found)


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["python", "train.py"], "{here}/train.py"),
        (["accelerate", "launch", "--num_processes=8", "sub/t.py"], "{here}/sub/t.py"),
        (["bash", "{here}/start.sh", "train.py"], "{here}/start.sh"),
        (["python", "/code/train.py"], "{here}/mounted/train.py"),
        (["python", "/code/there.py"], None),
        (["python", "there.py"], None),
        (["python", "/in/the/image.py"], None),
        (["python", "/only-on-nodes/train.py"], None),
        (["python", "-m", "train", "--out={RUN_DIR}/x.py"], None),
        (["bash", "-c", "python train.py"], None),
    ],
)
def test_a_missing_script_is_a_warning_if_this_machine_can_see_its_place(
    tmp_path: Path, command: list[str], missing: str | None
) -> None:
    for script in ("there.py", "mounted/there.py"):
        path = tmp_path / script
        path.parent.mkdir(exist_ok=True)
        path.touch()
    values = program_run(command=[argument.replace("{here}", str(tmp_path)) for argument in command])
    values["container"]["mounts"] = [
        {"source": str(tmp_path / "mounted"), "target": "/code"},
        {"source": "/only-on-nodes"},
    ]
    warned = [warning for warning in plan(loaded(tmp_path, values)).warnings if "program.command" in warning]
    assert len(warned) == (missing is not None)
    if missing is not None:
        assert f"does not exist ({missing.replace('{here}', str(tmp_path))});" in warned[0]


def test_a_script_in_the_image_is_on_the_host_without_a_container(tmp_path: Path) -> None:
    values = program_run(command=["python", f"{tmp_path}/train.py"])
    values["container"] = {"runtime": "none"}
    [warning] = [warning for warning in plan(loaded(tmp_path, values)).warnings if "command" in warning]
    assert warning.endswith(f"does not exist ({tmp_path}/train.py); correct the path")
