"""What the tools share that look at a run's data with its configuration, as one process on a CPU."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """A command line that names the configuration, as `config`."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="the training run's resolved configuration (JSON)",
    )
    return parser


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Makes this process the only rank, which Core asks for its rank; no network is used, and no name resolved.

    torch is imported here: what imports megatron.core comes after `device.prepare`.
    """
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()
