"""Jobs whose submitting shell exports variables that Slurm's programs, libraries and bash read."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hpcgen import api
from hpcgen.planning.environment import LEAKED
from hpcgen.planning.slurm_variables import CLIENT, DEFAULTS
from tests.slurm.cluster import SlurmCluster
from tests.slurm.conftest import HPCGEN, profile_text, program_first
from tests.slurm.test_run import ended

MANUAL = Path("/usr/share/man/man1")
LISTED = [
    line.split()
    for line in Path(__file__).with_name("input_variables.txt").read_text().splitlines()
    if line[0] != "#"
]
INPUTS = {program: [name for reader, name in LISTED if reader == program] for program in ("sbatch", "srun")}
ALLOWED = {*CLIENT, *(name for names in DEFAULTS.values() for name in names)}

GPU_NODES = """\
description: two nodes of the test cluster
device: cuda
gpus_per_node: 8
exclusive: true
sources: {device: tests, gpus_per_node: tests, exclusive: tests}
"""
RUN = {
    "name": "shell",
    "cluster": "./cluster.yaml",
    "paths": {"run_dir": "run"},
    "slurm": {"run": {"time": "10:00", "nodes": 2, "ntasks_per_node": 2, "cpus_per_task": 3, "mem": "4G"}},
    "program": {"command": ["sh", "-c", "env >env.$RANK; pwd; umask"]},
}

BAD = {
    "SLURM_CPU_BIND": "map_cpu:0",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_EXIT_ERROR": "0",
    "SLURM_GRES": "gpu:1",
    "SLURM_HINT": "nomultithread",
    "SLURM_MPI_TYPE": "pmix",
    "SLURM_PARTITION": "other",
    "SLURM_UMASK": "0777",
    "SLURM_WORKING_DIR": "/tmp",
    "SLURM_REMOTE_CWD": "/tmp",
    "SBATCH_EXPORT": "NONE",
    "SBATCH_OUTPUT": "/dev/null",
}
"""Values that differ from the plan. All other variables get 1, which no option of the job is."""


def value(name: str) -> str:
    return BAD.get(name, "1")


@pytest.fixture
def gpu_run(tmp_path: Path) -> Path:
    """A run file with a program that writes its environment to env.RANK, on nodes with GPUs."""
    (tmp_path / "topologies").mkdir()
    (tmp_path / "topologies/tested.yaml").write_text(GPU_NODES)
    (tmp_path / "cluster.yaml").write_text(
        profile_text().replace("local", "local\nnode_type: tested\ngres: gpus-per-node")
    )
    (tmp_path / "run").mkdir()
    run = tmp_path / "run.yaml"
    run.write_text(json.dumps(RUN))
    return run


def sbatch(cluster: SlurmCluster, shell: dict[str, str], script: str, directory: Path) -> str:
    """Queues a script from a shell with these variables."""
    done = subprocess.run(
        ["sbatch", "--parsable"],
        input=script,
        env=cluster.env | shell,
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def environment_of(run: Path, rank: int) -> dict[str, str]:
    lines = (run.parent / f"env.{rank}").read_text().splitlines()
    return dict(line.partition("=")[::2] for line in lines)


def require_planned(run: Path) -> None:
    """Each rank has the GPUs, CPUs and tasks of the plan, and nothing of the submitting shell."""
    for rank in range(4):
        found = environment_of(run, rank)
        assert found["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
        expected = {
            "SLURM_PROCID": str(rank),
            "SLURM_NTASKS": "4",
            "SLURM_CPUS_PER_TASK": "3",
            "SLURM_STEP_NUM_NODES": "2",
        }
        assert expected.items() <= found.items()
        assert not [name for name, text in found.items() if "planted" in name.lower() or text == "planted"]


@pytest.mark.skipif(
    not (MANUAL / "sbatch.1.gz").exists(), reason="the manual pages of Slurm are not installed"
)
@pytest.mark.parametrize("program", INPUTS)
def test_every_input_variable_in_the_manual_page_is_listed(program: str) -> None:
    text = gzip.decompress((MANUAL / f"{program}.1.gz").read_bytes()).decode()
    [section] = re.findall(
        r'^\.SH "?INPUT ENVIRONMENT VARIABLES"?\n(.*?)^\.SH ', text, re.DOTALL | re.MULTILINE
    )
    entries = re.findall(r"^\\fB(?!NOTE)(.*)", section, re.MULTILINE)
    names = {name for entry in entries for name in re.findall(r"(?:S[A-Z]+|PMI)_[A-Z0-9_]*[A-Z0-9]", entry)}
    assert len(names) > 50
    assert names <= set(INPUTS[program])


def test_options_of_srun_in_the_submitting_shell_do_not_reach_a_job(
    slurm_cluster: SlurmCluster, gpu_run: Path
) -> None:
    """All variables that srun reads, and one of each kind that changes libraries, as in a shell of an outer job."""
    names = {name for name in INPUTS["srun"] if name not in (*INPUTS["sbatch"], *ALLOWED)}
    shell = {name: value(name) for name in names} | {
        leak.replace("*", "PLANTED"): "planted" for leak in LEAKED if "*" in leak
    }
    shell |= {
        "SLURM_RESTART_COUNT": "3",
        "CUDA_VISIBLE_DEVICES": "7",
        "SQUEUE_PARTITION": "none",
        "SLURM_ARRAY_TASK_ID": "5",
    }
    del shell["LD_PLANTED"], shell["SBATCH_PLANTED"]
    script = api.render(api.plan(api.load_run(gpu_run)), "run")
    job_id = sbatch(slurm_cluster, shell, script, gpu_run.parent)
    log = ended(slurm_cluster, gpu_run, job_id)
    assert "restart 0, on ndv5-[1-2]" in log
    assert "SLURM_MEM_PER_CPU" in log
    require_planned(gpu_run)
    assert "SLURM_ARRAY_TASK_ID" not in environment_of(gpu_run, 0)


def test_options_of_sbatch_in_the_submitting_shell_do_not_reach_the_jobs_of_submit(
    slurm_cluster: SlurmCluster, gpu_run: Path
) -> None:
    names = {name for program in INPUTS.values() for name in program if name not in ALLOWED}
    shell = {name: value(name) for name in names} | {"SHELLOPTS": "braceexpand:hashall:noexec"}
    done = subprocess.run(
        [*HPCGEN, "submit", "run", "-c", str(gpu_run)],
        env=slurm_cluster.env | shell | {"SBATCH_ACCOUNT": "lab"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [warning] = [line for line in done.stderr.splitlines() if "not passed to the new jobs" in line]
    assert "SBATCH_TIMELIMIT" in warning
    assert "SBATCH_ACCOUNT" not in warning
    job_id = done.stdout.split()[0]
    log = ended(slurm_cluster, gpu_run, job_id)
    assert "SBATCH" not in log
    require_planned(gpu_run)
    job = slurm_cluster.show(job_id)
    planned = {
        "JobName": "shell",
        "TimeLimit": "00:10:00",
        "Partition": "gpu",
        "Requeue": "1",
        "Account": "lab",
    }
    assert planned.items() <= job.items()


def test_a_script_says_which_options_sbatch_took_from_the_submitting_shell(
    slurm_cluster: SlurmCluster, gpu_run: Path
) -> None:
    """sbatch prefers its variables to the script's directives. The job can only correct --no-requeue.

    What Slurm itself sets in a job, some for options, does not count as the shell's.
    """
    options = "slurm.run.extra_directives=[--dependency=singleton, --gpu-bind=none]"
    script = api.render(api.plan(api.load_run(gpu_run, [options])), "run")
    shell = {
        "SBATCH_TIMELIMIT": "3",
        "SBATCH_JOB_NAME": "other",
        "SBATCH_NO_REQUEUE": "1",
        "SBATCH_QOS": "high",
    }
    job_id = sbatch(slurm_cluster, shell, script, gpu_run.parent)
    log = ended(slurm_cluster, gpu_run, job_id)
    assert "sbatch read SBATCH_JOB_NAME SBATCH_NO_REQUEUE SBATCH_TIMELIMIT in the submitting shell" in log
    assert slurm_cluster.show(job_id)["Requeue"] == "1"
    assert environment_of(gpu_run, 0)["SBATCH_QOS"] == "high"
    assert not re.search(
        r"unset these variables of the submitting shell: .*\b(SLURM|HYDRA|I_MPI|OMPI|PRTE)_", log
    )


def test_a_job_starts_without_the_variables_of_the_submitting_shell(
    slurm_cluster: SlurmCluster, gpu_run: Path
) -> None:
    script = api.render(api.plan(api.load_run(gpu_run)), "run")
    # With NONE, the job has the PATH of a login shell, which may not lead to the Slurm of these tests.
    is_found = shutil.which("srun", path="/usr/local/bin:/usr/bin") == shutil.which(
        "srun", path=slurm_cluster.env["PATH"]
    )
    export = "NONE" if is_found else "PATH"
    job_id = sbatch(slurm_cluster, {"SBATCH_EXPORT": export}, script, gpu_run.parent)
    ended(slurm_cluster, gpu_run, job_id)
    require_planned(gpu_run)


def test_a_stage_on_this_machine_does_not_take_itself_for_a_rank_of_the_outer_job(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    program = {"command": ["sh", "-c", "env >env.$RANK"]}
    run.write_text(
        json.dumps({"name": "here", "cluster": "local", "paths": {"run_dir": "run"}, "program": program})
    )
    outer = {
        "SLURM_NTASKS": "16",
        "SLURM_PROCID": "5",
        "SLURM_STEP_ID": "0",
        "SLURM_JOB_ID": "12",
        "SLURM_CPUS_PER_TASK": "1",
    }
    shell = {
        **os.environ,
        **outer,
        "RANK": "5",
        "WORLD_SIZE": "16",
        "OMPI_COMM_WORLD_SIZE": "16",
        "NCCL_DEBUG": "INFO",
    }
    command = [*HPCGEN, "submit", "run", "-c", str(run), "--launcher=local"]
    done = subprocess.run(command, env=shell, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = environment_of(run, 0)
    assert (found["RANK"], found["WORLD_SIZE"], found["NCCL_DEBUG"], found["SLURM_PROCID"]) == (
        "0",
        "1",
        "INFO",
        "0",
    )
    assert not {"SLURM_NTASKS", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE"} & found.keys()


def test_a_chain_that_breaks_names_the_jobs_that_are_queued(
    slurm_cluster: SlurmCluster, tiny_run: Path
) -> None:
    """The second sbatch fails after Slurm accepted the job, as it does when the controller is slow."""
    programs = tiny_run.parent / "programs"
    real = shutil.which("sbatch", path=slurm_cluster.env["PATH"])
    program_first(
        slurm_cluster,
        programs,
        "sbatch",
        f"""#!/bin/bash
[[ -e {programs}/second ]] || {{ : >{programs}/second; exec {real} --hold "$@"; }}
{real} --hold "$@" >/dev/null
echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2; exit 1
""",
    )
    env = slurm_cluster.env | {"PATH": f"{programs}:{slurm_cluster.env['PATH']}"}
    command = [*HPCGEN, "submit", "index-cache", "train", "-c", str(tiny_run)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    [job_id] = re.findall(
        r"^already queued: (\d+) \(index-cache\); to cancel them: scancel \1$", done.stderr, re.MULTILINE
    )
    assert "Slurm may have accepted train before: look for tiny in squeue --me" in done.stderr
    assert "stage train was not submitted" in done.stderr
    slurm_cluster.run("scancel", job_id)


def hostile_shell(script: str, directory: Path) -> dict[str, str]:
    """Every option of bash, the variables that it reads, and a function for every command of the script."""
    listing = ["bash", "-c", "set -o | cut -f1; echo; shopt | cut -f1; echo; compgen -bk"]
    answer = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    options, shopts, builtins = (part.split() for part in answer.split("\n\n"))
    words = set(re.findall(r"[A-Za-z_.:\[][\w.-]*", script))
    commands = {word for word in words if word in builtins or shutil.which(word)}
    functions = commands | set(re.findall(r"^(\w+)\(\)", script, re.MULTILINE))
    assert {"srun", "scontrol", "printf", "local", "mkdir", "main", "say"} <= functions
    started = directory / "started"
    (directory / "bash_env").write_text(f"touch {started}; exit 3\n")
    return {
        "SHELLOPTS": ":".join(options),
        "BASHOPTS": ":".join(shopts),
        **dict.fromkeys(("BASH_ENV", "ENV"), str(directory / "bash_env")),
        **{
            f"BASH_FUNC_{name}%%": f"() {{ touch {started}; return 9; }}"
            for name in sorted(functions - {"case", "for", "if"})
        },
        **{"POSIXLY_CORRECT": "1", "GLOBIGNORE": "*", "CDPATH": "/", "IFS": "0123", "EXECIGNORE": "*/srun"},
        **{
            "FUNCNEST": "1",
            "TMOUT": "1",
            "BASH_COMPAT": "3.1",
            "BASH_XTRACEFD": "1",
            "PS4": "$(touch started)",
        },
    }


@pytest.mark.parametrize("by", ["sbatch", pytest.param("submit", marks=pytest.mark.slow)])
def test_a_job_ignores_shell_options_and_functions_that_the_submitting_shell_exports(
    slurm_cluster: SlurmCluster, gpu_run: Path, by: str
) -> None:
    script = api.render(api.plan(api.load_run(gpu_run)), "run")
    shell = hostile_shell(script, gpu_run.parent)
    if by == "sbatch":
        job_id = sbatch(slurm_cluster, shell, script, gpu_run.parent)
    else:
        command = [*HPCGEN, "submit", "run", "-c", str(gpu_run)]
        done = subprocess.run(
            command, env=slurm_cluster.env | shell, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        job_id = done.stdout.split()[0]
    ended(slurm_cluster, gpu_run, job_id)
    require_planned(gpu_run)
    assert not (gpu_run.parent / "started").exists()
