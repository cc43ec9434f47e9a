"""Faults at random in a real training on a real Slurm, and what each of them must leave in the run directory."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcgen.logs.failure import Failure
from hpcgen.runs.attempts import read_attempts
from hpcgen.runs.failures import root_failure
from tests.patience import wait_until
from tests.slurm.cluster import FINAL_STATES
from tests.slurm.long_run import SAVE_INTERVAL, LongRun, fork_of

SETTINGS = (
    "SlurmdTimeout=15",
    "PreemptType=preempt/partition_prio",
    "PreemptMode=REQUEUE",
    "PartitionName=urgent Nodes=ALL PriorityTier=9 MaxTime=INFINITE State=UP",
)
"""Lines of slurm.conf: a lost node is noticed soon, and jobs in this partition take the nodes of a training job."""

LAYERS = """
import dataclasses
import os
import pathlib
from megatron.core.transformer.transformer_layer import TransformerLayer

POISON = pathlib.Path(os.environ["TRAINER_CONFIG"]).parents[2] / "poison"

class Layer(TransformerLayer):
    def forward(self, *arguments, **named):
        hidden, *others = super().forward(*arguments, **named)
        if os.environ["SLURM_PROCID"] == "1" and POISON.exists():
            hidden = hidden * float("nan")
        return (hidden, *others)

def layers(core, vp_stage, usual):
    specs = [dataclasses.replace(layer, module=Layer) for layer in usual.layer_specs]
    return dataclasses.replace(usual, layer_specs=specs)
"""
"""The model of the run. Rank 1 computes NaN while the run directory has a file `poison`."""


@dataclass(frozen=True)
class Fault:
    """A kind of fault."""

    name: str
    inject: Callable[[ChaosRun, int], None]
    """Does it to a run and a rank. The run's processes end soon."""
    outcomes: frozenset[str]
    """What the job's events may say of it: verdicts, `restarted` for a restart in the job, `killed` without an end."""
    kinds: frozenset[str] = frozenset()
    """Kinds of the root failure that the logs must show. Empty: it is no failure."""
    hits_rank: bool = False
    """True if the logs must name the rank."""
    repair: Callable[[ChaosRun], None] = lambda run: None
    """What a person or a machine does before the run can go on."""


@dataclass(frozen=True)
class Report:
    """What the run directory says of a fault."""

    fault: Fault
    rank: int
    outcome: str
    reason: str
    failure: Failure | None

    def problems(self) -> Iterator[str]:
        """What differs from what was done."""
        if self.outcome not in self.fault.outcomes:
            yield f"{self}: the outcome is none of {sorted(self.fault.outcomes)}"
        if self.outcome in ("restarted", "killed"):  # the attempt goes on, or its script could not conclude
            return
        if (self.failure.kind if self.failure else None) not in (self.fault.kinds or {None, *ENDED_BY_SLURM}):
            yield f"{self}: the root is none of {sorted(self.fault.kinds)}"
        elif self.failure and self.fault.hits_rank and self.failure.rank != self.rank:
            yield f"{self}: the root is another rank"

    def __str__(self) -> str:
        root = f"; root: {self.failure}" if self.failure else ""
        return f"{self.fault.name} (rank {self.rank}) -> {self.outcome}: {self.reason}{root}"


class ChaosRun(LongRun):
    """A run that meets faults. Its script is submitted again when its job has ended, as a person would do it."""

    submissions = 0
    """How often the script was submitted again."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.reports: list[Report] = []
        super().__init__(*arguments, **named)

    def meet(self, fault: Fault, rank: int) -> None:
        """Returns when the fault is repaired, and the run directory says how the attempt ended."""
        hit, begun = read_attempts(self.directory)[-1], time.time()
        fault.inject(self, rank)
        self.note_end()
        fault.repair(self)
        found = ""

        def is_told() -> bool:
            nonlocal hit, found
            self.cluster.state(self.job_id)  # hastens a requeued job
            attempts = read_attempts(self.directory)
            [hit] = [each for each in attempts if (each.job, each.restart) == (hit.job, hit.restart)]
            later = {each["event"] for each in hit.events if each["time"] >= begun}
            if "restart_in_job" in later:
                found = "restarted"
            elif "end" in later:
                found = hit.verdict or ""
            elif attempts[-1] is not hit:
                found = "killed"
            return bool(found)

        wait_until(is_told, self.log, interval_s=0.2)
        failure = None if found in ("restarted", "killed") else root_failure(self.directory, hit)
        self.reports.append(Report(fault, rank, found, hit.reason, failure))

    def submit_again(self) -> None:
        """Submits the script if its job has ended."""
        if self.cluster.state(self.job_id) in FINAL_STATES - {"COMPLETED"}:
            self.submissions += 1
            assert self.submissions <= len(self.reports), self.log()
            self.submit()

    def training(self, rank: int) -> int:
        """The process that trains as this rank."""
        return fork_of(self.ranks[rank])


def disturb(run: ChaosRun, faults: Sequence[Fault], choose: random.Random) -> None:
    """Lets the run meet faults, each at a random step of an attempt."""
    for fault in faults:
        run.wait_for_attempt()
        run.wait_for_step(choose.randint(1, 2 * SAVE_INTERVAL))
        run.meet(fault, choose.randrange(len(run.ranks)))
        print(run.reports[-1], flush=True)


@contextlib.contextmanager
def small_disk(directory: Path) -> Iterator[Path]:
    """A new directory. Root gets a small file system of its own there."""
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", directory]
    is_mounted = os.geteuid() == 0 and subprocess.run(mount, check=False).returncode == 0
    try:
        yield directory
    finally:
        if is_mounted:
            subprocess.run(["umount", "--lazy", directory], check=True)


def _kill(run: ChaosRun, rank: int) -> None:
    os.kill(run.ranks[rank], signal.SIGKILL)


def _hang(run: ChaosRun, rank: int) -> None:
    os.kill(run.training(rank), signal.SIGSTOP)


def _exhaust_memory(run: ChaosRun, rank: int) -> None:
    """Forbids the process to get more memory, as a full node does that does not overcommit."""
    resource.prlimit(run.training(rank), resource.RLIMIT_AS, (1 << 20, 1 << 20))


def _fill_disk(run: ChaosRun, rank: int) -> None:
    with contextlib.suppress(OSError), (run.checkpoints / "other").open("wb") as file:
        while True:
            file.write(b"0" * (1 << 16))


def _free_disk(run: ChaosRun) -> None:
    (run.checkpoints / "other").unlink()


def _poison(run: ChaosRun, rank: int) -> None:
    (run.directory / "poison").touch()


def _heal(run: ChaosRun) -> None:
    (run.directory / "poison").unlink()


def _warn(run: ChaosRun, rank: int) -> None:
    run.cluster.run("scancel", "--batch", "--signal=USR2", run.job_id)


def _cancel(run: ChaosRun, rank: int) -> None:
    run.cluster.run("scancel", run.job_id)


def _requeue(run: ChaosRun, rank: int) -> None:
    run.cluster.run("scontrol", "requeue", run.job_id)


def _preempt(run: ChaosRun, rank: int) -> None:
    script = "#!/bin/bash\n#SBATCH --partition=urgent --nodes=2 --exclusive --output=/dev/null\nsleep 1\n"
    run.cluster.sbatch(script, cwd=run.directory)


def _reach_time_limit(run: ChaosRun, rank: int) -> None:
    """Slurm looks at limits every 30 s. Until then, training gets little time, so that it does not end before."""
    run.cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=1")
    ranks = [run.training(each) for each in range(len(run.ranks))]
    while all(Path(f"/proc/{pid}").exists() for pid in ranks):
        for signum, pause_s in ((signal.SIGSTOP, 1.0), (signal.SIGCONT, 0.2)):
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signum)
            time.sleep(pause_s)


def _extend_time(run: ChaosRun) -> None:
    run.cluster.run("scontrol", "update", f"JobId={run.job_id}", "TimeLimit=30")


def _lose_node(run: ChaosRun, rank: int) -> None:
    """Rank 0 is on the node with the batch script."""
    run.cluster.kill_node(run.cluster.nodes[rank])


def _start_nodes(run: ChaosRun) -> None:
    """Starts the lost node again when Slurm has noticed its loss."""

    def lost() -> list[str]:
        states = run.cluster.run("sinfo", "--noheader", "--Node", "--format=%N %T").stdout
        return sorted({line.split()[0] for line in states.splitlines() if "down" in line})

    wait_until(lost, interval_s=0.5)
    for node in lost():
        run.cluster.start_node(node)


ENDED_BY_SLURM = frozenset({"canceled", "preempted", "time-limit"})
CRASHED = frozenset({"restarted", "requeued"})
LOST = frozenset({"killed", "silent", "crash"})

KILL = Fault("kill a rank", _kill, CRASHED, LOST, hits_rank=True)
WARN = Fault("warn of the time limit", _warn, frozenset({"requeued"}))
REQUEUE = Fault("requeue", _requeue, frozenset({"terminated"}))
CANCEL = Fault("cancel", _cancel, frozenset({"terminated"}))
PREEMPT = Fault("preempt", _preempt, frozenset({"terminated", "requeued"}))
MEMORY = Fault("exhaust memory", _exhaust_memory, CRASHED, frozenset({"host-memory"}), hits_rank=True)
DISK = Fault("fill the disk", _fill_disk, frozenset({"failed"}), frozenset({"disk-full"}), repair=_free_disk)
POISON = Fault("compute NaN", _poison, frozenset({"failed"}), frozenset({"not-finite"}), repair=_heal)
HANG = Fault("hang", _hang, CRASHED, frozenset({"hang", "collective-timeout"}), hits_rank=True)
TIME_LIMIT = Fault("reach the time limit", _reach_time_limit, frozenset({"requeued"}), repair=_extend_time)
LOSE_NODE = Fault(
    "lose a node",
    _lose_node,
    CRASHED | {"terminated", "killed"},
    LOST | {"node-failure"},
    repair=_start_nodes,
)
FAULTS = (KILL, WARN, REQUEUE, CANCEL, PREEMPT, MEMORY, DISK, POISON, HANG, TIME_LIMIT, LOSE_NODE)
