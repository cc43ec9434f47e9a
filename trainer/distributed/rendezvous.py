"""Who this process is among the ranks, and where the ranks meet. Imports torch only where it is used."""

from __future__ import annotations

import contextlib
import datetime
import errno
import random
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainer.contract.errors import TrainerError

if TYPE_CHECKING:
    from torch.distributed import Store

PORTS = range(10_000, 30_000)
"""The batch scripts take MASTER_PORT from here: below the ephemeral range, so that no outgoing connection has it."""

PORT_STRIDE = 1009
"""Between the ports of one attempt: far from those of the neighboring jobs, and a prime."""

NUM_PORTS = 8
"""How many ports rank 0 tries."""

ANSWER_S = 2.0
"""A service that has not sent rank 0's greeting within this time is not rank 0 (seconds)."""

LOOK_AGAIN_S = 2.0
"""The longest pause between two looks at all ports (seconds)."""


@dataclass(frozen=True)
class Ranks:
    """This process's place, and what told us."""

    rank: int
    local_rank: int
    world_size: int
    source: str

    @property
    def name(self) -> str:
        """For lines of this process in a log that all ranks share."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()} (from {self.source})"


def find_ranks(environ: Mapping[str, str]) -> Ranks:
    """Reads who launched this process from its environment.

    In this order: torchrun; a launcher that set RANK, WORLD_SIZE and LOCAL_RANK (submitit's wrapper); srun;
    and else one plain process. The shell of a batch script has SLURM_PROCID=0 and the job's SLURM_NTASKS too:
    only a step started by srun has SLURM_STEP_ID. pyxis sets RANK and LOCAL_RANK without WORLD_SIZE.

    Raises:
        TrainerError: a variable is not a number.
    """
    launcher_names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:
        return _ranks(environ, launcher_names, "torchrun")
    if all(name in environ for name in launcher_names):
        return _ranks(environ, launcher_names, "RANK, LOCAL_RANK, WORLD_SIZE")
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        # In `srun -n 1` inside a job of 16 tasks, SLURM_NTASKS may be the job's.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        return _ranks(environ, ("SLURM_PROCID", "SLURM_LOCALID", size), "srun")
    return Ranks(rank=0, local_rank=0, world_size=1, source="no launcher")


def _ranks(environ: Mapping[str, str], names: tuple[str, str, str], source: str) -> Ranks:
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        values = ", ".join(f"{name}={environ.get(name)}" for name in names)
        raise TrainerError(
            f"{socket.gethostname()}: {source} should set {', '.join(names)}: {values}"
        ) from error
    return Ranks(rank, local_rank, world_size, source)


def take_gpu(ranks: Ranks) -> None:
    """Makes this process compute on the GPU of its local rank.

    Raises:
        TrainerError: the node shows fewer GPUs than it has ranks.
    """
    import torch

    # With --gpus-per-task each process sees one GPU, its own.
    count = torch.cuda.device_count()
    if count > 1 and ranks.local_rank >= count:
        raise TrainerError(f"{ranks}: local rank {ranks.local_rank}, but this node shows {count} GPUs")
    torch.cuda.set_device(ranks.local_rank if count > 1 else 0)


def open_store(
    ranks: Ranks,
    environ: Mapping[str, str],
    timeout: datetime.timedelta,
    *,
    hosts: bool = True,
    waits: bool = True,
) -> Store:
    """The store through which the ranks find each other; a single process needs no port.

    Rank 0 hosts the store. With `hosts` false, it too only connects to the store that it has opened already.
    With `waits`, rank 0 returns when every rank is there.

    TRAINER_RENDEZVOUS_ID, the same random word on all ranks of one attempt, makes MASTER_PORT a first choice: where
    another program holds that port, rank 0 goes on to the next one of a fixed sequence, and the other ranks follow.
    Without it, MASTER_PORT is the port of the store.

    Raises:
        TrainerError: MASTER_ADDR or MASTER_PORT is not set.
        RuntimeError: torch's DistError: the port is taken, all of the sequence are, or ranks did not come in time.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if ranks.world_size == 1:
        return HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise TrainerError(f"{ranks}: {' and '.join(missing)} not set, so the ranks cannot meet")
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # torchrun's agent already runs a store at this address; its ranks are all clients.
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = hosts and ranks.rank == 0 and not has_agent
    attempt = "" if has_agent else environ.get("TRAINER_RENDEZVOUS_ID", "")
    greeting = f"hpcgen {attempt} {ranks.world_size} {port} "
    if attempt and not is_master:
        port = _find_store(host, candidate_ports(port), greeting, timeout)
    # 0: any free port. The sequence is for the signpost, which alone must be where the others look.
    store = TCPStore(
        host,
        0 if attempt and is_master else port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
    )
    if attempt and is_master:
        _put_up_signpost(candidate_ports(port), f"{greeting}{store.port}\n".encode())
    # The agent's store outlives the ranks that it starts again, and with it all that those before them said.
    prefixed = PrefixStore(f"trainer/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if waits:
        _wait_for_all(prefixed, ranks, timeout)
    return prefixed


def candidate_ports(first: int) -> list[int]:
    """The ports that all ranks of an attempt try, in this order."""
    later = range(PORT_STRIDE, NUM_PORTS * PORT_STRIDE, PORT_STRIDE)
    return [first, *(PORTS.start + (first - PORTS.start + step) % len(PORTS) for step in later)]


def _put_up_signpost(ports: Sequence[int], line: bytes) -> None:
    """Sends `line` to whoever connects to the first free port, for as long as this process lives.

    The store itself cannot stand there: torch's client waits without end for a service that is silent, and prints
    a stack for one that hangs up, so that no rank could look at a port that may be another program's.
    """
    listener = _listen(ports)
    taken = listener.getsockname()[1]
    if taken != ports[0]:
        print(
            f"rank 0: port {ports[0]} is taken; the ranks meet at port {taken}", file=sys.stderr, flush=True
        )

    def answer() -> None:
        while True:
            try:
                visitor, _ = listener.accept()
            except OSError:  # the visitor has left, or too many files are open
                time.sleep(0.1)
                continue
            with visitor, contextlib.suppress(OSError):
                visitor.sendall(line)

    threading.Thread(target=answer, name="rendezvous", daemon=True).start()


def _listen(ports: Sequence[int]) -> socket.socket:
    from torch.distributed import DistNetworkError

    has_ipv6 = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_ipv6 else socket.AF_INET
    for port in ports:
        try:
            return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=has_ipv6)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise DistNetworkError(f"ports {', '.join(map(str, ports))} of {socket.gethostname()} are all taken")


def _find_store(host: str, ports: Sequence[int], greeting: str, timeout: datetime.timedelta) -> int:
    """The port of the store that rank 0 of this attempt, which says `greeting`, has opened on `host`."""
    from torch.distributed import DistStoreError

    end = time.monotonic() + timeout.total_seconds()
    pause_s, seen = 0.1, ""
    while True:
        for port in ports:
            try:
                answer = _answer_at(host, port)
            except OSError as error:  # rank 0 has not started yet, or does not answer
                answer, seen = "", seen or f"port {port}: {error}"
            if answer.startswith(greeting) and answer.endswith("\n"):
                return int(answer.removeprefix(greeting))
        if time.monotonic() > end:
            where = f"{host}, ports {', '.join(map(str, ports))}"
            raise DistStoreError(
                f"rank 0 did not answer within {timeout} at {where} ({seen or 'another program did'})"
            )
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # thousands of ranks would look at the same moment
        pause_s = min(2 * pause_s, LOOK_AGAIN_S)


def _answer_at(host: str, port: int) -> str:
    """The first line that a service sends by itself; what there is of it after ANSWER_S.

    Raises:
        OSError: nothing listens there, or it is silent.
    """
    end, answer = time.monotonic() + ANSWER_S, b""
    with socket.create_connection((host, port), ANSWER_S) as connection:
        while not answer.endswith(b"\n") and len(answer) < 256 and (left_s := end - time.monotonic()) > 0:
            connection.settimeout(left_s)
            part = connection.recv(256)
            if not part:
                break
            answer += part
    return answer.decode(errors="replace")


def _wait_for_all(store: Store, ranks: Ranks, timeout: datetime.timedelta) -> None:
    """Notes that this rank is there; rank 0 waits until all have."""
    from torch.distributed import DistStoreError

    store.set(f"here/{ranks.rank}", "")
    if ranks.rank != 0:
        return
    keys = [f"here/{rank}" for rank in range(ranks.world_size)]
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        if not missing:
            return
        first = f", rank {missing[0]} among them"
        raise DistStoreError(
            f"{len(missing)} of {ranks.world_size} ranks did not come within {timeout}{first}"
        ) from error
