"""Writes an index and a common state as Megatron-LM does, with the Python that runs this file.

The files next to it were written by `python tests/trainer/pickles/write.py` of Python 3.10.13, 3.11.2, 3.11.7, 3.12.1
and 3.13.0, with torch 2.13.0 and megatron-core 0.16.1. They contain every value that Pythons pickle differently.
"""

from __future__ import annotations

import argparse
import pickle
import platform
import signal
from pathlib import Path

import torch
from megatron.core.enums import ModelType
from megatron.core.transformer.enums import AttnBackend
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

HERE = Path(__file__).parent
TENSORS = {"weight": torch.zeros(2, 3), "bias": torch.zeros(3, dtype=torch.bfloat16)}


def index() -> Metadata:
    """Index with the plans of the ranks, which Megatron-Core keeps, and the directory as a path."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({**TENSORS, "layer/_extra_state": b"1"}, is_coordinator=True)
    _, metadata = planner.create_global_plan([planner.create_local_plan()])
    metadata.all_local_plans = [planner.plan]
    metadata.storage_data = {item.index: _StorageInfo("__0_0.distcp", 0, 1) for item in planner.plan.items}
    metadata.storage_meta = StorageMeta(checkpoint_id=Path("/runs/gpt/iter_0000001"))
    metadata.version = "1.0.0"
    return metadata


def arguments() -> argparse.Namespace:
    """The kinds of values that Megatron-LM's arguments have."""
    return argparse.Namespace(
        attention_backend=AttnBackend.auto,
        model_type=ModelType.encoder_or_decoder,
        exit_signal=signal.SIGTERM,
        save=Path("/runs/gpt"),
        seed=1234,
    )


if __name__ == "__main__":
    version = platform.python_version()
    (HERE / f"index-{version}").write_bytes(pickle.dumps(index()))
    torch.save({"args": arguments(), "iteration": 1}, HERE / f"common-{version}.pt")
