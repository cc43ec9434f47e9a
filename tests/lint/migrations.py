"""A script as `hpcgen init --from` converts it."""

from __future__ import annotations

import itertools
import re
import textwrap
from pathlib import Path

from hpcgen.config import document
from tests.cli.command import Ended, hpcgen

TRAINING = (
    "srun python pretrain_gpt.py --num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024 "
    "--max-position-embeddings 1024 --micro-batch-size 1"
)
WHOLE = f"{TRAINING} --global-batch-size 256 --train-iters 1000 --lr 1e-4 --mock-data"
"""A training that can be converted unchanged."""
ROPE = "--position-embedding-type rope"


def init(text: str, *options: str) -> Ended:
    Path("job.sh").write_text(textwrap.dedent(text))
    cluster = () if "--cluster" in options else ("--cluster", "azure-ndv5")
    return hpcgen("init", "run.yaml", "--from", "job.sh", *cluster, *options)


def written() -> dict:
    return document.read(Path("run.yaml")).values


def left(ended: Ended) -> dict[str, str]:
    """The options that were not converted, with the reasons."""
    lines = ended.stderr.splitlines()
    pairs = itertools.pairwise(lines)
    return {
        what.partition("not converted: ")[2]: why.strip() for what, why in pairs if "not converted: " in what
    }


def refused(ended: Ended) -> dict[str, str]:
    """Options that are refused because results depend on them -> the reasons, for a script without a run file."""
    assert ended.status == 2, ended.stderr
    assert not Path("run.yaml").exists()
    found = (
        re.fullmatch(r"job\.sh:\d+: ((?!not converted: ).+?): (.+)", line)
        for line in ended.stderr.splitlines()
    )
    return {match[1]: match[2] for match in found if match}


def migrated(options: str, *more: str) -> tuple[dict, dict[str, str]]:
    """The valid run file for a training with `options`, and the options that were not converted."""
    options += " --mock-data --global-batch-size 256"
    for name, value in {"lr": "1e-4", "train-iters": "1000"}.items():
        if f"--{name} " not in options and not (name == "train-iters" and "--train-samples " in options):
            options += f" --{name} {value}"
    ended = init(
        f"#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\n{TRAINING} {options}\n", *more
    )
    assert ended.status == 0, ended.stderr
    checked = hpcgen("validate", "-c", "run.yaml")
    assert checked.status == 0, checked.stderr
    return written(), left(ended)
