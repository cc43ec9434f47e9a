"""Process groups of one process, which need neither a network nor a host name that can be resolved."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

INTERFACE = "GLOO_SOCKET_IFNAME"
"""Variable with the network interface that gloo listens on."""


@contextlib.contextmanager
def on_loopback(world_size: int = 1) -> Iterator[None]:
    """If there is only one rank, make gloo listen on the loopback interface only. It opens a port even then."""
    if world_size > 1:
        yield
        return
    before = os.environ.get(INTERFACE)
    os.environ[INTERFACE] = "lo"
    try:
        yield
    finally:
        del os.environ[INTERFACE]
        if before is not None:
            os.environ[INTERFACE] = before


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """Make this process the only rank of a process group on the CPU.

    torch is imported here, since `device.prepare` must come first.
    """
    import torch

    with on_loopback():
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
        try:
            yield  # more groups may be made
        finally:
            torch.distributed.destroy_process_group()
