"""Command line of tools that read a run's data in a single process on a CPU."""

from __future__ import annotations

import argparse
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
