"""Checkpoints in the form that Megatron-LM leaves them in."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from tests.trainer.runs import gpt_config
from trainer.checkpoint import megatron_lm
from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import COMMON, COMPLETE, TRACKER


def as_megatron_lm(checkpoint: Path, directory: Path) -> Path:
    """A copy as pretrain_gpt.py leaves it: with its arguments, without a record."""
    path = shutil.copytree(checkpoint, directory / "megatron" / checkpoint.name)
    record = checkpoint_files.read_record(path)
    plain = gpt_config("/corpus", Path("/run"))
    plain["model"] = record["model"]
    config = resolve(configuration.from_dict(TrainerConfig, plain, "test"))
    iteration = record["iteration"]
    args = vars(megatron_lm.common_state(config, iteration, 4 * iteration)["args"])
    common = {"args": argparse.Namespace(**args), "iteration": iteration, "checkpoint_version": 3.0}
    torch.save(common, path / COMMON)
    for name in (COMPLETE, "STARTED"):
        (path / name).unlink()
    (path.parent / TRACKER).write_text(str(iteration))
    return path
