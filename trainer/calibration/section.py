"""Rows of the sections whose kernels need one GPU each: products, attention, kernels that move memory, power."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import torch

from trainer.contract.calibration import Job

SECTIONS = ("products", "attention", "memory", "power")


def measured(job: Job, seconds: float, device: str) -> dict[str, Any]:
    """The row of a job, with its results or its error."""
    section = importlib.import_module(f"trainer.calibration.{job.section}")
    try:
        row: dict[str, Any] = section.measure(job.row, seconds, device)
        return job.row | row
    except Exception as error:  # any library can fail at a shape, and the others are worth having
        return job.row | {"error": f"{type(error).__name__}: {error}"[:500]}
    finally:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
