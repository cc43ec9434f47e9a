"""Command line and process group for tools that read a run's data in a single process on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def config_parser(program: str, description: str) -> argparse.ArgumentParser:
    """An argument parser with the option --config."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="resolved configuration of the training run (JSON)",
    )
    return parser


@contextlib.contextmanager
def single_process_group() -> Iterator[None]:
    """Make this process the only rank of a process group. Uses no network and resolves no host name.

    torch is imported here, since `device.prepare` must come first.
    """
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
