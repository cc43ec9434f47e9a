"""Rank of this process, and the store through which the ranks meet. Imports torch only in functions that need it."""

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
"""Range of MASTER_PORT in the batch scripts. It is below the ephemeral ports that outgoing connections use."""

PORT_STRIDE = 1009
"""Distance between the ports of one attempt: a prime, and far from the ports of neighboring jobs."""

NUM_PORTS = 8
"""Number of ports that rank 0 tries."""

ANSWER_S = 2.0
"""Time within which rank 0 sends its greeting (seconds). Other services send none."""

MAX_PAUSE_S = 2.0
"""Maximum pause between two searches for rank 0 on all ports (seconds)."""


@dataclass(frozen=True)
class Ranks:
    """Rank of this process, and the source of this information."""

    rank: int
    local_rank: int
    world_size: int
    source: str

    @property
    def name(self) -> str:
        """Name of this process in a log that all ranks share."""
        return f"rank {self.rank} on {socket.gethostname()}"

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size} on {socket.gethostname()} (from {self.source})"


def find_ranks(environ: Mapping[str, str]) -> Ranks:
    """Determine the rank of this process from the variables of its launcher.

    The order is: torchrun; a launcher that sets RANK, WORLD_SIZE and LOCAL_RANK (submitit's wrapper); srun; a single
    process. The shell of a batch script also has SLURM_PROCID=0 and the job's SLURM_NTASKS, but only a step started by
    srun has SLURM_STEP_ID. pyxis sets RANK and LOCAL_RANK without WORLD_SIZE.

    Raises:
        TrainerError: a variable is not a number.
    """
    launcher_names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in environ:
        return _ranks(environ, launcher_names, "torchrun")
    if all(name in environ for name in launcher_names):
        return _ranks(environ, launcher_names, "RANK, LOCAL_RANK, WORLD_SIZE")
    if "SLURM_STEP_ID" in environ and "SLURM_PROCID" in environ:
        # In `srun -n 1` in a job with 16 tasks, SLURM_NTASKS may be the job's.
        size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
        return _ranks(environ, ("SLURM_PROCID", "SLURM_LOCALID", size), "srun")
    return Ranks(rank=0, local_rank=0, world_size=1, source="no launcher")


def _ranks(environ: Mapping[str, str], names: tuple[str, str, str], source: str) -> Ranks:
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in names)
    except (KeyError, ValueError) as error:
        values = ", ".join(f"{name}={environ.get(name)}" for name in names)
        raise TrainerError(
            f"{source} must set {', '.join(names)} to numbers; got {values}", where=socket.gethostname()
        ) from error
    return Ranks(rank, local_rank, world_size, source)


def select_gpu(ranks: Ranks) -> None:
    """Make this process compute on the GPU of its local rank.

    Raises:
        TrainerError: fewer GPUs are visible than the node has ranks.
    """
    import torch

    # With --gpus-per-task each process sees only its own GPU.
    count = torch.cuda.device_count()
    if count > 1 and ranks.local_rank >= count:
        raise TrainerError(
            f"local rank {ranks.local_rank}, but only {count} GPUs are visible on this node", where=ranks
        )
    torch.cuda.set_device(ranks.local_rank if count > 1 else 0)


def open_store(
    ranks: Ranks,
    environ: Mapping[str, str],
    timeout: datetime.timedelta,
    *,
    hosts: bool = True,
    waits: bool = True,
) -> Store:
    """Open the store through which the ranks find each other. A single process needs no port.

    Rank 0 hosts the store. With `hosts` false, it only connects to the store that it has already opened. With `waits`,
    rank 0 waits until every rank has connected.

    TRAINER_RENDEZVOUS_ID is a random word that is the same on all ranks of one attempt. With it, MASTER_PORT is only
    the first choice: if another program uses that port, rank 0 tries the next one of a fixed sequence, and the other
    ranks follow. Without it, MASTER_PORT is the port of the store.

    Raises:
        TrainerError: MASTER_ADDR or MASTER_PORT is not set.
        RuntimeError: torch's DistError: the port or the complete sequence is in use, or ranks did not connect in time.
    """
    from torch.distributed import HashStore, PrefixStore, TCPStore

    if ranks.world_size == 1:
        return HashStore()
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if missing:
        raise TrainerError(f"{' and '.join(missing)} not set, so the ranks cannot connect", where=ranks)
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # torchrun's agent already runs a store at this address, and all ranks are clients.
    has_agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = hosts and ranks.rank == 0 and not has_agent
    attempt = "" if has_agent else environ.get("TRAINER_RENDEZVOUS_ID", "")
    greeting = f"hpcgen {attempt} {ranks.world_size} {port} "
    if attempt and not is_master:
        port = _find_store(host, candidate_ports(port), greeting, timeout)
    # Port 0 means any free port. Only the signpost must be on a port of the sequence.
    store = TCPStore(
        host,
        0 if attempt and is_master else port,
        is_master=is_master,
        timeout=timeout,
        wait_for_workers=False,
    )
    if attempt and is_master:
        _serve_signpost(candidate_ports(port), f"{greeting}{store.port}\n".encode())
    # The agent's store survives a restart of the ranks, and still has the messages of earlier attempts.
    prefixed = PrefixStore(f"trainer/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    if waits:
        _wait_for_all(prefixed, ranks, timeout)
    return prefixed


def candidate_ports(first: int) -> list[int]:
    """Ports that all ranks of an attempt try, in this order."""
    later = range(PORT_STRIDE, NUM_PORTS * PORT_STRIDE, PORT_STRIDE)
    return [first, *(PORTS.start + (first - PORTS.start + step) % len(PORTS) for step in later)]


def _serve_signpost(ports: Sequence[int], line: bytes) -> None:
    """Send `line` to every client that connects to the first free port, until this process ends.

    The store itself cannot use this port. A rank must be able to try ports of other programs, but torch's client waits
    forever for a service that is silent, and prints a stack for one that closes the connection.
    """
    listener = _listen(ports)
    port = listener.getsockname()[1]
    if port != ports[0]:
        print(
            f"rank 0: port {ports[0]} is in use; the ranks meet at port {port}", file=sys.stderr, flush=True
        )

    def answer() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # the client has disconnected, or too many files are open
                time.sleep(0.1)
                continue
            with client, contextlib.suppress(OSError):
                client.sendall(line)

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
    raise DistNetworkError(f"ports {', '.join(map(str, ports))} of {socket.gethostname()} are all in use")


def _find_store(host: str, ports: Sequence[int], greeting: str, timeout: datetime.timedelta) -> int:
    """Find the port of the store on `host`. The signpost of rank 0 of this attempt answers with `greeting`."""
    from torch.distributed import DistStoreError

    end = time.monotonic() + timeout.total_seconds()
    pause_s, seen = 0.1, ""
    while True:
        for port in ports:
            try:
                answer = _read_line(host, port)
            except OSError as error:  # rank 0 has not started yet, or does not answer
                answer, seen = "", seen or f"port {port}: {error}"
            if answer.startswith(greeting) and answer.endswith("\n"):
                return int(answer.removeprefix(greeting))
        if time.monotonic() > end:
            where = f"{host}, ports {', '.join(map(str, ports))}"
            raise DistStoreError(
                f"rank 0 did not answer within {timeout} at {where} ({seen or 'another program did'})"
            )
        time.sleep(pause_s * random.uniform(0.5, 1.0))  # so that thousands of ranks do not connect at once
        pause_s = min(2 * pause_s, MAX_PAUSE_S)


def _read_line(host: str, port: int) -> str:
    """The first line that a service sends after a connection, or the part of it that arrives within ANSWER_S.

    Raises:
        OSError: nothing listens on the port, or it sends nothing.
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
    """Announce this rank. Rank 0 also waits until all ranks have done so."""
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
            f"{len(missing)} of {ranks.world_size} ranks did not connect within {timeout}{first}"
        ) from error
