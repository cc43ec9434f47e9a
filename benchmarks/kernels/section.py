"""`python -m benchmarks.kernels.section NAME ROWS`: a process that measures every n-th job of a section on one GPU.

Each row is appended to ROWS, a JSON object per line, as soon as it is measured. A job that fails gives a row with its
error, and the next one follows.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import torch

from trainer.metrics.console import quiet_libraries

NAMES = ("products", "attention", "memory")
"""The sections whose jobs need one GPU each."""


def main() -> None:
    """Measure the jobs of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--part", type=int, default=0)
    parser.add_argument("--parts", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    arguments = parser.parse_args()
    quiet_libraries()
    if arguments.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())  # CUDA graphs cannot be recorded on the default stream
    section = importlib.import_module(f"benchmarks.kernels.{arguments.name}")
    jobs = section.jobs() if arguments.device == "cuda" else section.TINY
    with arguments.rows.open("a") as rows:
        for job in itertools.islice(jobs, arguments.part, None, arguments.parts):
            row = measured(section, job, arguments)
            rows.write(json.dumps(row) + "\n")
            rows.flush()


def measured(section: Any, job: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The row of a job, with its results or its error."""
    try:
        return job | section.measure(job, arguments.seconds, arguments.device)
    except Exception as error:  # any library can fail at a shape, and the others are worth having
        return job | {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
