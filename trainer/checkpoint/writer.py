"""Writes one rank's part of a checkpoint in the background, from a copy in host memory.

Core plans which rank writes which data to which file. Its own background writers are processes. This module uses
threads, which neither copy the GPU state nor die from a signal that Slurm sends to every process of the step.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer.contract.files.hashed_file import HashedFile

ALIGNMENT = 512
"""Alignment of copies from a GPU (bytes)."""


class NotFiniteError(ValueError):
    """A tensor to be written contains numbers that are not finite; the message names it."""


def not_finite(tensor: torch.Tensor) -> bool:
    """True if a tensor contains NaN or an infinity. One pass is enough: `aminmax` propagates NaN. Ignores FP8."""
    if not tensor.is_floating_point() or tensor.element_size() == 1 or tensor.numel() == 0:
        return False
    return not bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


Bucket = tuple[str, str, tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, torch.Tensor]]]]
"""A file in Core's plan: its path, its name, and the objects and tensors in it."""


class HostBuffer:
    """Host memory for a copy of the data that a rank saves. Reused by every save, since pinning it takes seconds."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int, device: int) -> None:
        """Pin `size` bytes for copies from a GPU in the background, so that the first save does not wait for it."""

        def reserve() -> None:
            torch.cuda.set_device(device)  # a new thread starts with the first device
            self._reserve(size, pinned=True)

        self._preparing = threading.Thread(target=reserve, name="checkpoint-memory", daemon=True)
        self._preparing.start()

    def copy(self, buckets: list[Bucket]) -> list[Bucket]:
        """Return `buckets` with copies of the tensors, so that training may change the originals."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
        self._reserve(sum(map(_aligned_bytes, tensors)), pinned=any(tensor.is_cuda for tensor in tensors))
        copies, offset = [], 0
        for tensor in tensors:
            copy = self._view(tensor, offset)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies.append(copy)
            offset += _aligned_bytes(tensor)
        torch.cuda.current_stream().synchronize()
        remaining = iter(copies)
        return [
            (path, name, (objects, [(item, next(remaining)) for item, _ in pairs]))
            for path, name, (objects, pairs) in buckets
        ]

    def _reserve(self, size: int, *, pinned: bool) -> None:
        if self._memory is not None and len(self._memory) >= size:
            return
        self._release()
        self._memory = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Hide it from loader processes that are forked later: the kernel would copy pinned pages for each of them.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # the kernel may not support huge pages
                self._memory.madvise(advice)
        if pinned:
            self._pin(len(self._memory))

    def _pin(self, size: int) -> None:
        """Pin the memory until it is released or the buffer is deleted. If pinning fails, copies are only slower."""
        # Not torch's own allocator of pinned memory, which rounds sizes up to a power of two.
        address, runtime = self._address(), torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:
            # Unregister before unmapping. Otherwise CUDA keeps the registration and refuses new memory at this address.
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
            self._unpin.atexit = False
        else:
            # Clear the error, which the next kernel of this thread would raise.
            with contextlib.suppress(RuntimeError):
                torch.empty(1, device="cuda").zero_()

    def _release(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = None

    def _address(self) -> int:
        return torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()

    def _view(self, like: torch.Tensor, offset: int) -> torch.Tensor:
        """A tensor with a storage of its own, since torch.save writes complete storages."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


def _aligned_bytes(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Written:
    """Files that a rank wrote."""

    files: dict[str, dict[str, Any]]
    """Size and SHA-256 of each file by name, as in the record."""
    results: list[WriteResult]
    """Location of each tensor, for Core's index."""
    seconds: float


class Writing:
    """Background write of one rank's files. It has ended, with or without an `error`, when `is_done`."""

    def __init__(self, buckets: list[Bucket], unchecked: Collection[str] = ()) -> None:
        """All tensors must be finite, except those named in `unchecked`; otherwise `error` is a NotFiniteError."""
        self._buckets, self._unchecked = buckets, unchecked
        self._streams: list[HashedFile] = []
        self._outcome: Written | None = None
        self.error: BaseException | None = None
        # A daemon thread, so that a rank that fails or leaves does not wait for hanging storage.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """True if the write has ended."""
        return not self._thread.is_alive()

    @property
    def bytes(self) -> int:
        """Number of bytes handed to the storage so far."""
        return sum(stream.size for stream in self._streams)

    def wait(self, seconds: float | None = None) -> Written | None:
        """Wait for the write, for at most `seconds`. Returns the result, or None if it has not ended or has failed."""
        self._thread.join(seconds)
        return self._outcome

    def _run(self) -> None:
        started = time.perf_counter()
        try:
            with ThreadPoolExecutor(max(1, len(self._buckets)), "checkpoint-file") as files:
                written = list(files.map(self._write_file, self._buckets))
            self._outcome = Written(
                files={name: entry for name, entry, _ in written},
                results=[result for _, _, results in written for result in results],
                seconds=time.perf_counter() - started,
            )
        except BaseException as error:  # the training loop must learn of any error
            self.error = error

    def discard(self) -> None:
        """Delete the files of a failed write, so that a full disk has space to record why the run ends."""
        for path, _, _ in self._buckets:
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)

    def _write_file(self, bucket: Bucket) -> tuple[str, dict[str, Any], list[WriteResult]]:
        path, name, (objects, tensors) = bucket
        try:
            with HashedFile(Path(path)) as stream:
                self._streams.append(stream)
                results = []
                for item, data in (*objects, *tensors):
                    self._check(item.index.fqn, data)
                    results.append(_write_item(stream, name, item, data))
                return name, stream.finish(), results
        except OSError as error:
            error.filename = path
            raise

    def _check(self, name: str, data: Any) -> None:
        # Checked here and not before the copy, so that training does not wait for it.
        if isinstance(data, torch.Tensor) and name not in self._unchecked and not_finite(data):
            count = data.numel() - int(data.isfinite().sum())
            raise NotFiniteError(f"{count:,} of {data.numel():,} numbers of {name} are not finite")


def _write_item(stream: HashedFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    """Write one object or tensor in the format of torch.distributed.checkpoint."""
    offset = stream.size
    if isinstance(data, torch.Tensor):
        try:
            torch.save(data, stream)
        except RuntimeError as error:  # torch raises it for an OSError of the stream
            if stream.error is None:
                raise
            raise stream.error from error
    else:
        stream.write(data.getbuffer())  # already serialized by Core
    length = stream.size - offset
    return WriteResult(item.index, length, _StorageInfo(name, offset, length))
