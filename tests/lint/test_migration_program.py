"""`hpcgen init --from` for scripts whose program becomes the section `program`."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config import document
from tests.cli.command import Ended, hpcgen

pytestmark = pytest.mark.usefixtures("workplace")

DIRECTIVES = "#SBATCH --nodes=4 --gpus-per-node=8 --time=12:00:00\n"


def init(text: str, *options: str) -> Ended:
    Path("job.sh").write_text(f"#!/bin/bash\n{textwrap.dedent(text)}")
    ended = hpcgen("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5", *options)
    assert ended.status == 0, ended.stderr
    return ended


def written() -> dict[str, Any]:
    return document.read(Path("run.yaml")).values


def command_of(text: str) -> list[str]:
    init(DIRECTIVES + text)
    return list(written()["program"]["command"])


def test_a_torchrun_script_becomes_a_valid_run_file() -> None:
    ended = init(
        """\
        #SBATCH --job-name=llama
        #SBATCH --nodes=4
        #SBATCH --ntasks-per-node=1
        #SBATCH --gpus-per-node=8
        #SBATCH --time=12:00:00
        #SBATCH --partition=hpc
        #SBATCH --account=research
        #SBATCH --container-image=/shared/job.sqsh
        module load cuda/12.4
        export NCCL_IB_TIMEOUT=23 WANDB_API_KEY=abc HF_HOME=/shared/hf
        export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
        cd /elsewhere/project
        srun --container-image=nvcr.io/nvidia/pytorch:25.03-py3 --container-mounts=/shared:/shared \\
            torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 --node_rank $SLURM_PROCID --max_restarts=3 \\
            --rdzv_backend c10d --rdzv_endpoint $MASTER_ADDR:29500 -m project.train --run "$SLURM_JOB_ID" '{"a": 1}'
        """
    )
    values = written()
    assert values["program"] == {
        "command": ["-m", "project.train", "--run", "{JOB_ID}", '{{"a": 1}}'],
        "launcher": "torchrun",
        "directory": "/elsewhere/project",
    }
    assert values["slurm"] == {
        "defaults": {"time": "12:00:00", "partition": "hpc", "account": "research"},
        "run": {"nodes": 4},
    }
    assert values["container"]["image"] == "nvcr.io#nvidia/pytorch:25.03-py3"
    assert values["container"]["mounts"] == [{"source": "/shared"}]
    assert values["secrets"] == ["WANDB_API_KEY"]
    assert values["name"] == "llama"
    comments = Path("run.yaml").read_text().partition("# Not converted from job.sh:\n")[2]
    for line, what in (
        (9, "--container-image=/shared/job.sqsh: the batch script runs on the host"),
        (10, "module load cuda/12.4"),
        (11, "HF_HOME"),
        (15, "torchrun --max-restarts=3"),
    ):
        assert f"#   line {line}: {what}" in comments
        assert f"job.sh:{line}: not converted: {what.partition(': ')[0]}\n" in ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert (checked.status, "4 nodes x 1 task" in checked.stdout) == (0, True), checked.stderr


def test_variables_of_slurm_become_those_of_the_command() -> None:
    words = command_of(
        "#SBATCH --ntasks-per-node=8\n"
        "export MASTER_PORT=29500\n"
        "srun python -u train.py --rank=$SLURM_PROCID --local ${SLURM_LOCALID} --world $SLURM_NTASKS "
        "--init tcp://$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1):$MASTER_PORT\n"
    )
    assert words[:3] == ["python", "-u", "train.py"]
    assert words[3:6] == ["--rank={RANK}", "--local", "{LOCAL_RANK}"]
    assert words[6:8] == ["--world", "{WORLD_SIZE}"]
    assert words[8:] == ["--init", "tcp://{MASTER_ADDR}:29500"]


def test_a_value_that_only_the_job_knows_must_be_replaced_before_the_run_file_is_valid() -> None:
    assert command_of("srun python train.py --out $OUT/x --seed $(date +%s)\n")[3:] == [
        "{OUT}/x",
        "--seed",
        "{$(date +%s)}",
    ]
    long = init("srun bash -c 'cd /a; python train.py --seed $(date +%s) | tee log'\n", "--force")
    assert "not converted: $(date +%s)\n" in long.stderr
    init("srun python train.py --out $OUT/x --seed $(date +%s)\n", "--force")
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 2
    assert "has the unknown variable {OUT}" in checked.stderr
    assert "has the unknown variable {$(date +%s)}" in checked.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "deepspeed --hostfile hosts train.py --deepspeed z.json\n",
            ["python", "train.py", "--deepspeed", "z.json"],
        ),
        (
            "srun accelerate launch --machine_rank $SLURM_NODEID train.py\n",
            ["accelerate", "launch", "--machine_rank", "{NODE_RANK}", "train.py"],
        ),
        ("srun apptainer exec --nv image.sif python train.py\n", ["python", "train.py"]),
        ("srun ./solver --steps 3\n", ["./solver", "--steps", "3"]),
        (
            "srun python pretrain_bert.py --num-layers 3\n",
            ["python", "pretrain_bert.py", "--num-layers", "3"],
        ),
        (
            "srun bash -c 'numactl -N 0 python train.py --rank $SLURM_PROCID'\n",
            ["numactl", "-N", "0", "python", "train.py", "--rank", "{RANK}"],
        ),
    ],
)
def test_launchers_and_wrappers(text: str, expected: list[str]) -> None:
    assert command_of(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("srun --ntasks-per-node=8 python train.py\n", {"nodes": 4}),
        ("srun --ntasks-per-node=4 python train.py\n", {"nodes": 4, "ntasks_per_node": 4}),
        ("srun deepspeed train.py\n", {"nodes": 4}),
        ("deepspeed --num_gpus 4 train.py\n", {"nodes": 4, "ntasks_per_node": 4}),
        ("srun accelerate launch train.py\n", {"nodes": 4, "ntasks_per_node": 1}),
        ("srun torchrun --nproc_per_node=4 train.py\n", {"nodes": 4, "ntasks_per_node": 4}),
    ],
)
def test_as_many_ranks_start_as_in_the_script(text: str, expected: dict[str, int]) -> None:
    init(DIRECTIVES + text)
    assert written()["slurm"]["run"] == expected


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        ("", {"nodes": 1, "ntasks_per_node": 1}),
        ("#SBATCH --gpus=4 -n 4", {"nodes": 1, "ntasks_per_node": 4}),
        ("#SBATCH --ntasks=8", {"nodes": 1}),
        ("#SBATCH --ntasks=16", {"nodes": 1}),
        ("#SBATCH --ntasks-per-node=2", {"nodes": 1, "ntasks_per_node": 2}),
        ("#SBATCH --nodes=2", {"nodes": 2, "ntasks_per_node": 1}),
    ],
)
def test_the_ranks_of_a_script_without_a_number_of_nodes_or_tasks(
    directive: str, expected: dict[str, int]
) -> None:
    init(f"#SBATCH --time=1:00:00\n{directive}\nsrun python train.py\n")
    assert written()["slurm"]["run"] == expected


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("90", "90:00"),
        ("72:0:0", "3-00:00:00"),
        ("00:5:00", "00:05:00"),
        ("500:00:00", "20-20:00:00"),
        ("7-0:0", "7-00:00:00"),
        ("1-12", "1-12"),
    ],
)
def test_a_time_limit_of_any_form_that_sbatch_reads_is_carried_over(given: str, expected: str) -> None:
    init(f"#SBATCH --nodes=1 --time={given}\nsrun python train.py\n")
    assert written()["slurm"]["defaults"]["time"] == expected


def test_what_is_in_front_of_the_shell_that_starts_the_program_is_listed() -> None:
    inner = 'singularity exec inner.sif bash -c "export A=1; python train.py"'
    ended = init(DIRECTIVES + f"srun numactl -N 0 apptainer exec -B /a outer.sif bash -c '{inner}'\n")
    assert written()["program"]["command"] == ["python", "train.py"]
    assert "not converted: the container of singularity\n" in ended.stderr
    assert "in place of singularity exec inner.sif\n" in ended.stderr
    assert "not converted: numactl -N 0 apptainer exec -B /a outer.sif in front of the shell" in ended.stderr


def test_secrets_of_the_command_are_neither_converted_nor_printed() -> None:
    token = "hf_" + "Zq7" * 12
    program = f"env HUB_TOKEN={token} A=x python train.py --key {token} --b={token}"
    launch = f"srun -N1 --comment={token} timeout 9 {program}\n"
    ended = init(DIRECTIVES + launch + f"./other --key {token}\n")
    assert token not in ended.stderr + Path("run.yaml").read_text()
    assert written()["secrets"] == ["HUB_TOKEN"]
    command = [
        "timeout",
        "9",
        "env",
        "{secret}",
        "A=x",
        "python",
        "train.py",
        "--key",
        "{secret}",
        "{secret}",
    ]
    assert written()["program"]["command"] == command


def test_the_value_of_an_option_for_a_secret_is_neither_converted_nor_printed() -> None:
    own = "--api_key 0q7 --hf-token ab12cd34ef56gh78 --password=hunter2"
    usual = "--eos-token '</s>' --max_tokens 512 --token $TOK"
    ended = init(f"{DIRECTIVES}srun python prepare.py --secret pr3p\nsrun python train.py {own} {usual}\n")
    text = ended.stderr + Path("run.yaml").read_text()
    assert not [secret for secret in ("0q7", "ab12cd34ef56gh78", "hunter2", "pr3p") if secret in text]
    assert "not converted: --api_key ...\n" in ended.stderr
    command = written()["program"]["command"][2:]
    assert command[:5] == ["--api_key", "{secret}", "--hf-token", "{secret}", "{secret}"]
    assert command[5:] == ["--eos-token", "</s>", "--max_tokens", "512", "--token", "{TOK}"]


def test_a_variable_that_the_script_unsets_is_not_carried_over() -> None:
    init(f"{DIRECTIVES}export A=1 B=2 C=3\nunset A\n[ -e x ] && unset B\nsrun python train.py\nunset C\n")
    assert written()["environment"] == {"C": "3"}


def test_several_programs_of_a_step_are_refused() -> None:
    Path("job.sh").write_text(f"#!/bin/bash\n{DIRECTIVES}srun --multi-prog programs.conf\n")
    ended = hpcgen("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5")
    assert (ended.status, Path("run.yaml").exists()) == (2, False)
    assert "srun --multi-prog: the run file starts one program" in ended.stderr


def test_a_program_that_starts_on_the_first_node_only_is_refused() -> None:
    Path("job.sh").write_text(f"#!/bin/bash\n{DIRECTIVES}python train.py\n")
    command = ("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5")
    ended = hpcgen(*command)
    assert (ended.status, Path("run.yaml").exists()) == (2, False)
    assert (
        "job.sh:3: train.py: the script starts it on the first node only, and the run file on each of 4"
        in ended.stderr
    )
    assert hpcgen(*command, "--set", "slurm.run.nodes=1").status == 0
    assert written()["slurm"]["run"] == {"nodes": 1, "ntasks_per_node": 1}


def test_with_program_megatron_lm_is_run_as_it_is() -> None:
    text = DIRECTIVES + "srun python pretrain_gpt.py --num-layers 12 --exit-signal-handler\n"
    init(text, "--program")
    expected = ["python", "pretrain_gpt.py", "--num-layers", "12", "--exit-signal-handler"]
    assert written()["program"]["command"] == expected
    assert "model" not in written()


def test_a_signal_for_the_tasks_becomes_the_stop_and_another_is_listed() -> None:
    init(DIRECTIVES + "#SBATCH --signal=USR1@120\nsrun python train.py\n")
    assert written()["program"]["stop"] == {"signal": "USR1"}
    assert written()["slurm"]["run"]["signal_lead_s"] == 120
    ended = init(DIRECTIVES + "#SBATCH --signal=B:USR1@120\nsrun python train.py\n", "--force")
    assert "stop" not in written()["program"]
    assert "not converted: --signal=B:USR1@120" in ended.stderr


def test_other_work_of_the_script_is_listed() -> None:
    ended = init(
        DIRECTIVES
        + "#SBATCH --array=0-3\nrsync -a data /tmp\npython prepare.py\n"
        + "srun --mpi=pmix python train.py\nsrun python evaluate.py\n"
    )
    assert written()["program"]["command"] == ["python", "train.py"]
    left = (
        "--array=0-3",
        "rsync -a data /tmp",
        "python prepare.py",
        "srun --mpi=pmix",
        "srun ... python evaluate.py",
    )
    for what in left:
        assert f"not converted: {what}\n" in ended.stderr


def test_arguments_that_depend_on_a_condition_are_kept_and_listed_once() -> None:
    script = """\
        #SBATCH --nodes=1
        ARGS=(--lr 1)
        if [ -n "$WANDB" ]; then
            ARGS+=(--wandb-project p --wandb-name n)
        fi
        srun python train.py "${ARGS[@]}" --last
        """
    ended = init(script)
    assert ended.status == 0, ended.stderr
    command = ["python", "train.py", "--lr", "1", "--wandb-project", "p", "--wandb-name", "n", "--last"]
    assert written()["program"]["command"] == command
    assert ended.stderr.count("the condition of") == 1
    assert "not converted: the condition of --wandb-project p --wandb-name n\n" in ended.stderr


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        ("for i in 1 2; do srun python train.py; done", "the loop around train.py"),
        ('if [ "$X" ]; then srun python train.py; fi', "the condition of the command that starts train.py"),
    ],
)
def test_a_loop_or_a_condition_around_the_program_is_listed(launch: str, what: str) -> None:
    assert f"job.sh:3: not converted: {what}\n" in init(f"{DIRECTIVES}{launch}\n").stderr


def test_a_program_that_starts_differently_in_each_branch_is_refused() -> None:
    launch = 'if [ "$X" ]; then h="srun torchrun -m a"; else h="torchrun -m a"; fi; $h --lr 1'
    Path("job.sh").write_text(f"#!/bin/bash\n{DIRECTIVES}{launch}\n")
    ended = hpcgen("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5")
    assert (ended.status, Path("run.yaml").exists()) == (2, False)
    assert "branches of the script start the program in different ways" in ended.stderr


def test_a_refusal_also_shows_what_would_be_listed() -> None:
    Path("job.sh").write_text(f"{DIRECTIVES}module load cuda\nsrun ./run < input.txt\n")
    ended = hpcgen("init", "run.yaml", "--from", "job.sh", "--cluster", "azure-ndv5")
    assert ended.status == 2
    assert "job.sh:2: not converted: module load cuda" in ended.stderr
    assert "job.sh:3: < input.txt: the program gets no standard input" in ended.stderr
    assert not Path("run.yaml").exists()
