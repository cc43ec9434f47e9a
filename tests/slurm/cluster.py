"""A private Slurm cluster on this machine: real daemons, invented hardware (8 GPUs a node, as NDv5).

It owns one directory under /tmp, a munge key and a few free ports, so it meets neither a cluster that the
machine already has nor a second one of its own kind. It needs no root: its jobs run as whoever started it.
`python -m tests.slurm.cluster [--accounting] -- COMMAND` runs a command beside such a cluster. Its programs are the
first on PATH.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.patience import PATIENCE_S, wait_until
from tests.slurm import accounting

NODES = ("ndv5-1", "ndv5-2")  # of a cluster that asks for nothing else
GPUS_PER_NODE = 8
FINAL_STATES = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE")
)

# munged refuses a directory below one that others cannot enter, and a socket's path holds at most 107 bytes.
BASE_DIR = Path("/tmp")
PREFIX = "hpcgen-slurm-"

# Below the ephemeral ports: no outgoing connection takes one between our choice and the daemon's bind.
PORTS = range(16_000, 20_000)
START_ATTEMPTS = 3

# Daemons are in sbin, which an ordinary user's PATH lacks.
SEARCH_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
DAEMONS = ("munged", "slurmctld", "slurmd")
CLIENTS = ("sbatch", "srun", "squeue", "scontrol", "scancel", "sinfo")

# MinJobAge keeps finished jobs visible to `scontrol show job`, for there is no slurmdbd. cred_expire is how
# long a requeued job waits (121 s by default), yet a launch's credentials must reach a busy node within it.
# SchedulerParameters ends Slurm's own patience: 3 s before a batch job, up to 30 s before a requeued one.
SLURM_CONF = """\
ClusterName={directory.name}
SlurmctldHost=localhost
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={directory}/munge.socket,cred_expire=8
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SwitchType=switch/none
MpiDefault=none
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2
MinJobAge=3600
FirstJobId={first_job_id}
KillWait={kill_wait_s}
SlurmctldTimeout=30
SlurmdTimeout=30
"""
HARDWARE = f"Sockets=2 CoresPerSocket=48 ThreadsPerCore=1 RealMemory=1900000 Gres=gpu:h100:{GPUS_PER_NODE}"
NODE = "NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} {hardware} State=UNKNOWN\n"
PARTITION = "PartitionName={name} Nodes=ALL Default={default} MaxTime=INFINITE State=UP\n"
# Nodes that only Slurm knows: cloud nodes that were never started count as available, and need no slurmd.
CLOUD_NODES = """\
ResumeProgram=/bin/true
SuspendProgram=/bin/true
NodeName={names} {hardware} State=CLOUD
"""
GRES_CONF = "NodeName={nodes} Name=gpu Type=h100 File={directory}/nvidia[0-{last}]\n"


class SlurmClusterError(Exception):
    """The cluster did not start, or one of its commands failed; the message holds what it printed."""


def missing_slurm() -> str | None:
    """Why no cluster can be started on this machine, in one line, or None when one can."""
    missing = [name for name in (*DAEMONS, *CLIENTS) if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"no Slurm on this machine (missing: {', '.join(missing)}); apt-get install slurm-wlm munge"
    return None


def missing_accounting() -> str | None:
    """Why no cluster on this machine can have accounting, in one line, or None when one can."""
    missing = [name for name in accounting.PROGRAMS if shutil.which(name, path=SEARCH_PATH) is None]
    if missing:
        return f"no accounting (missing: {', '.join(missing)}); make setup installs slurmdbd and MariaDB"
    return None


class SlurmCluster:
    """The daemons and the clients' side of one cluster; a context manager that starts and stops it.

    The cluster has `num_nodes` nodes with a slurmd each, ndv5-1 and so on, and `num_cloud_nodes` more that
    exist for Slurm alone, cloud-1 and so on: `sbatch --test-only` judges by them, and no job may run there.
    Every partition of `partitions` has all nodes; the first is the default. `kill_wait_s` is how long what is to end
    may take.

    `switches` maps the name of each switch to its nodes. One more switch connects them.

    Jobs count from `first_job_id`. The ports of a job's ranks follow from its number, so jobs with the same number in
    clusters that run side by side would share them.

    `plugins` are lines of plugstack.conf, in which {directory} is the cluster's own. Daemons, and so tasks, find
    the programs in the directory `programs` before all others.

    With `accounting`, the cluster has a slurmdbd and a MariaDB of its own. `settings` are further lines of slurm.conf.
    """

    def __init__(
        self,
        num_nodes: int = len(NODES),
        *,
        num_cloud_nodes: int = 0,
        partitions: Sequence[str] = ("gpu",),
        first_job_id: int = 1,
        kill_wait_s: int = 5,
        plugins: Sequence[str] = (),
        programs: Path | None = None,
        switches: Mapping[str, str] | None = None,
        accounting: bool = False,
        settings: Sequence[str] = (),
    ) -> None:
        self.nodes = tuple(f"ndv5-{index}" for index in range(1, num_nodes + 1))
        self.num_cloud_nodes = num_cloud_nodes
        self.partitions = partitions
        self.first_job_id = first_job_id
        self.kill_wait_s = kill_wait_s
        self.plugins = plugins
        self.programs = programs
        self.switches = switches or {}
        self.accounting = accounting
        self.settings = settings
        self.directory = Path()
        self.env: dict[str, str] = {}
        self._hastened: set[tuple[str, str]] = set()
        """Jobs, with their restarts, that `state` has given an earlier start."""

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start munged, slurmctld and a slurmd for each node, and return when these nodes are idle.

        Raises SlurmClusterError with the daemons' logs. Clusters whose test run was killed are stopped first.
        """
        if (reason := missing_slurm() or (missing_accounting() if self.accounting else None)) is not None:
            raise SlurmClusterError(reason)
        stop_abandoned()
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                self._start_daemons()
                return
            except SlurmClusterError:  # most likely another program took one of the ports meanwhile
                self.stop()
                if attempt == START_ATTEMPTS:
                    raise
            except BaseException:
                self.stop()
                raise

    def stop(self) -> None:
        """Cancel what runs, stop the daemons by the pids in their pid files, and remove the directory."""
        if self.env:
            stop_daemons(self.directory)
            self.env = {}

    def run(
        self,
        *args: str | os.PathLike[str],
        input: str | None = None,
        cwd: Path | None = None,
        timeout_s: float = PATIENCE_S,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the cluster's environment; its failure raises SlurmClusterError if `check`."""
        result = subprocess.run(
            args, input=input, cwd=cwd, env=self.env, text=True, capture_output=True, timeout=timeout_s
        )
        if check and result.returncode != 0:
            raise SlurmClusterError(f"{args} ended with {result.returncode}:\n{result.stdout}{result.stderr}")
        return result

    def sbatch(self, script: str, *args: str, cwd: Path) -> str:
        """Pipe the text of a script into sbatch, as `hpcgen render ... | sbatch` does; the job id."""
        return self.run("sbatch", "--parsable", *args, input=script, cwd=cwd).stdout.strip().partition(";")[0]

    def show(self, job_id: str) -> dict[str, str]:
        """Output of `scontrol show job` for a job, by its keys (JobState, Restarts, NodeList, ...)."""
        line = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout.strip()
        return dict(re.findall(r"(\S+?)=(.*?)(?=\s+[A-Z][\w:/]*=|\s*$)", line))

    def wait(self, job_id: str, timeout_s: float = PATIENCE_S, states: frozenset[str] = FINAL_STATES) -> str:
        """The job's state once it is one of `states` (by default: over, and no requeue to follow).

        Raises TimeoutError with the job's record and the daemons' logs.
        """
        wait_until(
            lambda: self.state(job_id) in states,
            lambda: f"{sorted(states)}: {self.show(job_id)}\n{self.logs()}",
            timeout_s=timeout_s,
            interval_s=0.3,
        )
        return self.state(job_id)

    def state(self, job_id: str) -> str:
        """The job's state. Starts a requeued job within seconds, not only when its old credentials have expired.

        All its nodes have revoked these before it is pending again. They accept credentials of a later second.
        """
        job = self.show(job_id)
        attempt = (job_id, job["Restarts"])
        waits = (job["JobState"], job["Reason"]) == ("PENDING", "BeginTime") and job["Restarts"] != "0"
        if waits and attempt not in self._hastened:
            self._hastened.add(attempt)
            self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now+1", check=False)
        return job["JobState"]

    def kill_node(self, name: str) -> None:
        """Kill a node's slurmd, its steps and their tasks at one blow, as the loss of a machine does.

        Slurm learns of it when the node stays silent (SlurmdTimeout). `start_node` brings it back.
        """
        while pids := _node_processes(self.directory, name):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.run("slurmd", "-N", name)

    def logs(self, num_lines: int = 40) -> str:
        """The last lines of each daemon's log."""
        return "\n".join(
            f"== {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:])
            for log in sorted(self.directory.glob("*.log"))
        )

    def _start_daemons(self) -> None:
        self.directory = create_directory(self._configuration)
        self.env = client_environment(self.directory, os.environ)
        if self.programs is not None:
            self.env["PATH"] = f"{self.programs}{os.pathsep}{self.env['PATH']}"
        try:
            self.run(
                "munged",
                *(f"--{name}-file={self.directory}/munge.{name}" for name in ("key", "log", "seed")),
                f"--pid-file={self.directory}/munged.pid",
                f"--socket={self.directory}/munge.socket",
            )
            if self.accounting:
                accounting.start(self.directory, _user(), self.run)
            self.run("slurmctld")
            for node in self.nodes:
                self.start_node(node)
            wait_until(self._nodes_are_idle, timeout_s=120, interval_s=0.1)
            if self.accounting:
                accounting.add_user(_user(), self.run)
        except (SlurmClusterError, subprocess.TimeoutExpired, TimeoutError) as error:
            raise SlurmClusterError(f"the Slurm cluster did not start: {error}\n{self.logs()}") from error

    def _nodes_are_idle(self) -> bool:
        nodes = self.run("sinfo", "--noheader", "--Node", "--format=%N %T", check=False)
        states = dict(line.split() for line in nodes.stdout.splitlines())
        return all(states.get(node) == "idle" for node in self.nodes)

    def _configuration(self, directory: Path) -> dict[str, str]:
        """The files of the cluster's configuration, by name."""
        controller, slurmdbd, *ports = free_ports(2 + len(self.nodes))
        slurm_conf = SLURM_CONF.format(
            directory=directory,
            user=_user(),
            port=controller,
            first_job_id=self.first_job_id,
            kill_wait_s=self.kill_wait_s,
        )
        for name, port in zip(self.nodes, ports, strict=True):
            slurm_conf += NODE.format(name=name, port=port, hardware=HARDWARE)
        names = list(self.nodes)
        if self.num_cloud_nodes:
            names.append(f"cloud-[1-{self.num_cloud_nodes}]")
            slurm_conf += CLOUD_NODES.format(names=names[-1], hardware=HARDWARE)
        for partition in self.partitions:
            default = "YES" if partition == self.partitions[0] else "NO"
            slurm_conf += PARTITION.format(name=partition, default=default)
        gres_conf = GRES_CONF.format(nodes=",".join(names), directory=directory, last=GPUS_PER_NODE - 1)
        plugstack_conf = "".join(f"{line.format(directory=directory)}\n" for line in self.plugins)
        files = {"gres.conf": gres_conf, "plugstack.conf": plugstack_conf}
        if self.switches:
            slurm_conf += "TopologyPlugin=topology/tree\n"
            leaves = "".join(f"SwitchName={name} Nodes={nodes}\n" for name, nodes in self.switches.items())
            files["topology.conf"] = f"{leaves}SwitchName=top Switches={','.join(self.switches)}\n"
        if self.accounting:
            slurm_conf += accounting.SLURM_CONF.format(directory=directory, port=slurmdbd)
            files["slurmdbd.conf"] = accounting.SLURMDBD_CONF.format(
                directory=directory, user=_user(), port=slurmdbd
            )
        slurm_conf += "".join(f"{line}\n" for line in self.settings)
        return {"slurm.conf": slurm_conf, **files}


def create_directory(configuration: Callable[[Path], Mapping[str, str]]) -> Path:
    """A new cluster's directory: its configuration, munge key, fake GPUs, and the process it belongs to."""
    directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=BASE_DIR))
    directory.chmod(0o711)  # munged requires that everyone can reach its socket
    (directory / "owner").write_text(_process_identity(os.getpid()))
    (directory / "state").mkdir()
    key = directory / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    for index in range(GPUS_PER_NODE):  # slurmd accepts only character devices
        (directory / f"nvidia{index}").symlink_to("/dev/null")
    for name, text in configuration(directory).items():
        (directory / name).write_text(text)
    return directory


def _user() -> str:
    """The user who runs the daemons and the jobs."""
    return pwd.getpwuid(os.geteuid()).pw_name


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nothing listens on at this moment."""
    ports: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise SlurmClusterError(f"fewer than {count} free ports in {PORTS}")


def client_environment(directory: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for the clients of the cluster in `directory`, without what another cluster or job set."""
    foreign = ("SLURM_", "SLURMD_", "SBATCH_", "SALLOC_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "MUNGE_")
    kept = {name: value for name, value in environ.items() if not name.startswith(foreign)}
    return kept | {"SLURM_CONF": f"{directory}/slurm.conf", "PATH": SEARCH_PATH}


def stop_daemons(directory: Path) -> None:
    """Stop the cluster in `directory`: its jobs, then the daemons in its pid files; remove the directory."""
    env = client_environment(directory, os.environ)
    if _daemon_pid(directory / "slurmctld.pid") is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            _cancel_jobs(env)
    daemons = ("slurmctld", *accounting.DAEMONS, "munged")
    for pid_file in (*directory.glob("slurmd-*.pid"), *(directory / f"{name}.pid" for name in daemons)):
        _stop_daemon(pid_file)
    shutil.rmtree(directory, ignore_errors=True)


def stop_abandoned() -> None:
    """Stop the clusters of this user whose owner is gone without having stopped them (kill -9, a crash)."""
    for directory in BASE_DIR.glob(f"{PREFIX}*"):
        with contextlib.suppress(FileNotFoundError):  # its owner is just removing or making it
            owner = (directory / "owner").read_text()
            ours = directory.stat().st_uid == os.geteuid()
            if ours and owner and _process_identity(int(owner.split()[0])) != owner:
                stop_daemons(directory)


def _cancel_jobs(env: Mapping[str, str]) -> None:
    """Cancel every job, and wait until Slurm has killed their processes (at most KillWait and a little)."""

    def all_gone() -> bool:
        queue = subprocess.run(("squeue", "--noheader"), env=env, text=True, capture_output=True, timeout=10)
        return queue.returncode != 0 or not queue.stdout.strip()

    if not all_gone():
        for state in ("PENDING", "RUNNING", "SUSPENDED"):  # scancel cancels nothing when no filter is given
            subprocess.run(("scancel", f"--state={state}"), env=env, capture_output=True, timeout=10)
        with contextlib.suppress(TimeoutError):
            wait_until(all_gone, timeout_s=15, interval_s=0.2)


def _stop_daemon(pid_file: Path) -> None:
    """TERM, and KILL after 5 s, to the daemon a pid file names."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        pid = _daemon_pid(pid_file)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: _daemon_pid(pid_file) is None, timeout_s=5)


def _daemon_pid(pid_file: Path) -> int | None:
    """The pid in a daemon's pid file, or None when it is gone (its number may be another program's)."""
    try:
        pid = int(pid_file.read_text())
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    name = pid_file.stem.partition("-")[0]
    return pid if Path(os.fsdecode(words[0])).name == name else None


def _node_processes(directory: Path, node: str) -> set[int]:
    """The pids of a node's slurmd, of its steps' slurmstepd, and of everything that these started."""
    log = directory / f"slurmd-{node}.log"  # a node's daemons, and they alone, hold its log open
    task = {f"SLURM_CONF={directory}/slurm.conf".encode(), f"SLURMD_NODENAME={node}".encode()}
    parents: dict[int, int] = {}
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            state, parent = (process / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z":  # dead already; it waits for its parent
                continue
            parents[int(process.name)] = int(parent)
            if log in _open_files(process) or task <= set((process / "environ").read_bytes().split(b"\0")):
                found.add(int(process.name))
    while children := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= children
    return found


def _open_files(process: Path) -> set[Path]:
    """The files that a process (its directory in /proc) has open."""
    files = set()
    for descriptor in (process / "fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            files.add(descriptor.readlink())
    return files


def _process_identity(pid: int) -> str:
    """The pid and when it started (clock ticks since boot), or "" when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    # proc(5): field 22; the fields are counted after the name, which is in parentheses and may hold anything.
    return f"{pid} {stat.rpartition(')')[2].split()[19]}"


@contextlib.contextmanager
def _terminated_as_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind as an interrupt does, so that the cluster is stopped."""

    def interrupt(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    previous = {signum: signal.signal(signum, interrupt) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def main(argv: Sequence[str]) -> int:
    """Run the command in `argv` (after an optional "--") with its own cluster. Returns the exit status."""
    options, command = (argv[:1], argv[1:]) if argv[:1] == ["--accounting"] else ([], argv)
    command = command[1:] if command[:1] == ["--"] else command
    if not command:
        print("usage: python -m tests.slurm.cluster [--accounting] -- COMMAND [ARGUMENT...]", file=sys.stderr)
        return 2
    if (reason := missing_slurm() or (missing_accounting() if options else None)) is not None:
        print(reason, file=sys.stderr)
        return 1
    with _terminated_as_interrupt(), SlurmCluster(accounting=bool(options)) as cluster:
        return subprocess.run(command, env=cluster.env).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
