"""Stand-ins for Slurm's programs on a machine without Slurm: what srun starts really runs, as processes here.

`batch` runs a rendered script as sbatch would. The stand-in of srun starts every task with Slurm's variables, waits
for all, and ends them when one fails, as --kill-on-bad-exit does; a "node" is a name in SLURMD_NODENAME. Where GPUs
are named by CUDA_VISIBLE_DEVICES, each node has its share of them, and NCCL_HOSTID makes NCCL take nodes for hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.patience import PATIENCE_S

PROGRAMS = ("srun", "scontrol", "squeue")
NODES = "STANDIN_NODES"
"""The job's nodes, separated by commas."""
OF_NODE = "STANDIN_ENVIRONMENT_"
"""With a node's name: NAME=VALUE that its tasks have besides, as a node's own prolog could set it."""


@dataclass(frozen=True)
class Batch:
    """A script that has ended."""

    status: int
    log: str


def batch(
    script: str,
    directory: Path,
    nodes: Sequence[str] = ("n1",),
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    job_id: int = 77,
    array_task: int = 0,
    timeout_s: float = PATIENCE_S,
) -> Batch:
    """Runs the text of a batch script to its end, with these nodes."""
    programs = directory / "standins"
    programs.mkdir(parents=True, exist_ok=True)
    for name in PROGRAMS:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).resolve()} {name} "$@"\n')
        program.chmod(0o755)
    path = directory / "job.sh"
    path.write_text(script)
    log = re.search(r"^#SBATCH --output=(\S+)$", script, re.MULTILINE)
    assert log is not None
    log_file = Path(log[1].replace("%j", str(job_id)).replace("%A_%a", f"{job_id}_{array_task}"))
    log_file.touch()  # a run directory that is missing fails here, as it does in Slurm
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PYTEST_"))}
    job = subprocess.Popen(
        ["bash", str(path), *arguments],
        env={
            **kept,
            **(environment or {}),
            "PATH": f"{programs}:{kept['PATH']}",
            "SLURM_JOB_ID": str(job_id),
            "SLURM_ARRAY_JOB_ID": str(job_id),
            "SLURM_ARRAY_TASK_ID": str(array_task),
            "SLURM_JOB_NODELIST": ",".join(nodes),
            NODES: ",".join(nodes),
        },
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        log, _ = job.communicate(timeout=timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):  # as Slurm ends the steps that a script leaves behind
            os.killpg(job.pid, signal.SIGTERM)
    log_file.write_text(log)
    return Batch(job.returncode, log)


def main(arguments: Sequence[str]) -> int:
    """One of the programs, by its name; its exit status."""
    name, *words = arguments
    if words == ["--help"]:
        print("--container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH")
    elif name == "srun":
        return Step(words).run()
    elif name == "scontrol" and words[:2] == ["show", "hostnames"]:
        print(*words[2].split(","), sep="\n")
    elif name == "scontrol" and words[:3] == ["show", "node", "-o"]:
        for node in words[3].split(","):
            print(f"NodeName={node} NodeAddr=127.0.0.1 NodeHostName=here Port=1")
    return 0


class Step:
    """The tasks that srun's options request."""

    def __init__(self, words: Sequence[str]) -> None:
        self._options: dict[str, str] = {}
        rest = list(words)
        while rest and rest[0].startswith("--"):
            option, _, value = rest.pop(0)[2:].partition("=")
            self._options[option] = value
        self._command = rest
        nodes = self._options.get("nodelist") or os.environ[NODES]
        count = int(self._options.get("nodes", len(nodes.split(","))))
        self._nodes = nodes.split(",")[:count]
        self._num_tasks = int(self._options.get("ntasks", len(self._nodes)))
        self._started: list[subprocess.Popen[str]] = []

    def run(self) -> int:
        """Starts the tasks and waits for all of them; the largest of their statuses."""
        signal.signal(signal.SIGTERM, lambda number, frame: self._kill())
        each = self._num_tasks // len(self._nodes)
        for rank in range(self._num_tasks):
            environment = self._environment(rank, rank // each, rank % each)
            task = subprocess.Popen(
                self._command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            self._started.append(task)
        waiting = [
            threading.Thread(target=self._follow, args=(rank, task))
            for rank, task in enumerate(self._started)
        ]
        for thread in waiting:
            thread.start()
        for thread in waiting:
            thread.join()
        return max(abs(task.returncode) for task in self._started)

    def _environment(self, rank: int, node: int, local_rank: int) -> dict[str, str]:
        name = self._nodes[node]
        environment = os.environ | {
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(node),
            "SLURM_NTASKS": str(self._num_tasks),
            "SLURM_STEP_NUM_TASKS": str(self._num_tasks),
            "SLURMD_NODENAME": name,
        }
        all_nodes = os.environ[NODES].split(",")
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        if len(all_nodes) > 1 and len(gpus) >= len(all_nodes):
            share, place = len(gpus) // len(all_nodes), all_nodes.index(name)
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[place * share : (place + 1) * share])
            environment["NCCL_HOSTID"] = name
        if own := os.environ.get(f"{OF_NODE}{name}"):
            variable, _, value = own.partition("=")
            environment[variable] = value
        return environment

    def _follow(self, rank: int, task: subprocess.Popen[str]) -> None:
        label = f"{rank}: " if "label" in self._options else ""
        assert task.stdout is not None
        for line in task.stdout:
            sys.stdout.write(f"{label}{line}")
            sys.stdout.flush()
        if task.wait() != 0 and self._options.get("kill-on-bad-exit") == "1":
            self._kill()

    def _kill(self) -> None:
        for task in self._started:
            if task.poll() is None:
                task.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
