"""Recognizes errors that are due to the machine and not to what was being done: too little memory, or a failed GPU."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Texts of RuntimeErrors for missing memory: of NCCL and CUDA, of torch on a CPU, and of cuBLAS."""

GPU_ERRORS = ("CUDA error", "CUDA driver error", "NCCL error")
"""Texts that identify the plain RuntimeErrors of a GPU that failed."""


def is_out_of_memory(error: BaseException) -> bool:
    """True if a device or this machine had too little memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _has_text(error, OUT_OF_MEMORY)


def is_gpu_failure(error: BaseException) -> bool:
    """True if a GPU, or the communication between GPUs, failed."""
    return _has_text(error, GPU_ERRORS)


def _has_text(error: BaseException, texts: tuple[str, ...]) -> bool:
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
