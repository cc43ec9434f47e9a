"""Writes one rank's part of a checkpoint from a copy in host memory, in the background.

Core plans what goes where. Its own background writers fork or spawn processes; these are threads, which
neither copy the GPU's state nor die of a signal that Slurm sends to every process of the step.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
import weakref
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.storage import WriteResult

ALIGNMENT = 512
"""Bytes; copies from a GPU like them round."""

SYNC_EVERY = 2**30
"""Bytes of a file after which they are sent to the disk: all at the end would look like storage that hangs."""


class NotFiniteError(ValueError):
    """A tensor that was to be written holds numbers that are not finite; the message names it."""


def not_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds NaN or an infinity, in one pass: `aminmax` propagates NaN. FP8 is not looked at."""
    if not tensor.is_floating_point() or tensor.element_size() == 1 or tensor.numel() == 0:
        return False
    return not bool(torch.stack(torch.aminmax(tensor)).isfinite().all())


Bucket = tuple[str, str, tuple[list[tuple[WriteItem, Any]], list[tuple[WriteItem, torch.Tensor]]]]
"""What Core's writer makes of one file: its path, its name, and the objects and tensors in it."""


class HostBuffer:
    """Host memory for a copy of what a rank saves; kept from save to save, since pinning it takes seconds."""

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._unpin: weakref.finalize[..., HostBuffer] | None = None
        self._preparing: threading.Thread | None = None

    def prepare(self, size: int, device: int) -> None:
        """Pins `size` bytes for copies from a GPU, in the background: the first save then need not wait for it."""

        def reserve() -> None:
            torch.cuda.set_device(device)  # each thread has its own, and begins with the first
            self._reserve(size, pinned=True)

        self._preparing = threading.Thread(target=reserve, name="checkpoint-memory", daemon=True)
        self._preparing.start()

    def copy(self, buckets: list[Bucket]) -> list[Bucket]:
        """`buckets` with their tensors copied here, so that training may change the originals."""
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None
        tensors = [tensor for _, _, (_, pairs) in buckets for _, tensor in pairs]
        self._reserve(sum(map(_room, tensors)), pinned=any(tensor.is_cuda for tensor in tensors))
        copies, offset = [], 0
        for tensor in tensors:
            copy = self._view(tensor, offset)
            copy.copy_(tensor.detach(), non_blocking=True)
            copies.append(copy)
            offset += _room(tensor)
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
        # Not for loader processes that are forked later: the kernel would copy pinned pages for each of them.
        for advice in (mmap.MADV_DONTFORK, mmap.MADV_HUGEPAGE):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._memory.madvise(advice)
        if pinned:
            self._pin(len(self._memory))

    def _pin(self, size: int) -> None:
        """Pins the memory, until it is released or the buffer is deleted. A refusal only makes copies slower."""
        # torch's own allocator of pinned memory rounds sizes up to a power of two
        address, runtime = self._address(), torch.cuda.cudart()
        if int(runtime.cudaHostRegister(address, size, 0)) == 0:
            # CUDA keeps the registration of unmapped memory, and refuses new memory at the same address
            self._unpin = weakref.finalize(self, runtime.cudaHostUnregister, address)
            self._unpin.atexit = False
        else:
            # the next kernel of this thread would raise the error of the refusal, which that clears
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
        """A tensor whose storage is its own: torch.save writes whole storages."""
        if like.numel() == 0:
            return torch.empty(like.shape, dtype=like.dtype)
        assert self._memory is not None
        flat = torch.frombuffer(self._memory, dtype=like.dtype, count=like.numel(), offset=offset)
        return flat.view(like.shape)


def _room(tensor: torch.Tensor) -> int:
    size = tensor.numel() * tensor.element_size()
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Written:
    """What a rank wrote."""

    files: dict[str, dict[str, Any]]
    """By name: size and SHA-256, as the record holds them."""
    results: list[WriteResult]
    """Where each tensor lies, for Core's index."""
    seconds: float


class Writing:
    """The background write of one rank's files: done, or failed, when `is_done`."""

    def __init__(self, buckets: list[Bucket], unchecked: Collection[str] = ()) -> None:
        """Tensors but those named in `unchecked` must be finite: else `error` is a NotFiniteError."""
        self._buckets, self._unchecked = buckets, unchecked
        self._streams: list[_HashedFile] = []
        self._outcome: Written | None = None
        self.error: BaseException | None = None
        # A daemon: a rank that fails or is told to leave does not wait for storage that hangs.
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to wait for."""
        return not self._thread.is_alive()

    @property
    def bytes(self) -> int:
        """What was handed to the storage so far."""
        return sum(stream.size for stream in self._streams)

    def wait(self, seconds: float | None = None) -> Written | None:
        """What was written, once it is on disk; None when it is not after `seconds`, or `error` says why not."""
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
        except BaseException as error:  # whatever it is, the step loop must hear of it
            self.error = error

    def discard(self) -> None:
        """Gives back the room of what is written, when it is no use: a full disk takes no word of why the run ends."""
        for path, _, _ in self._buckets:
            with contextlib.suppress(OSError):
                Path(path).unlink(missing_ok=True)

    def _write_file(self, bucket: Bucket) -> tuple[str, dict[str, Any], list[WriteResult]]:
        path, name, (objects, tensors) = bucket
        try:
            with Path(path).open("xb") as file:  # in a directory that others of the group may write to
                stream = _HashedFile(file)
                self._streams.append(stream)
                results = []
                for item, data in (*objects, *tensors):
                    self._check(item.index.fqn, data)
                    results.append(_write_item(stream, name, item, data))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            error.filename = path
            raise
        return name, stream.entry(), results

    def _check(self, name: str, data: Any) -> None:
        # Here, and not before the copy: training does not wait for it.
        if isinstance(data, torch.Tensor) and name not in self._unchecked and not_finite(data):
            count = data.numel() - int(data.isfinite().sum())
            raise NotFiniteError(f"{count:,} of {data.numel():,} numbers of {name} are not finite")


def _write_item(stream: _HashedFile, name: str, item: WriteItem, data: Any) -> WriteResult:
    """One object or tensor, in the form that torch.distributed.checkpoint reads."""
    offset = stream.size
    if isinstance(data, torch.Tensor):
        try:
            torch.save(data, stream)
        except RuntimeError as error:  # which torch makes of the storage's
            if stream.refused is None:
                raise
            raise stream.refused from error
    else:
        stream.write(data.getbuffer())  # Core has serialised it
    length = stream.size - offset
    return WriteResult(item.index, length, _StorageInfo(name, offset, length))


class _HashedFile:
    """A file that is written front to back, and hashed on the way: what is recorded is what was meant."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._sha256, self.size = file, hashlib.sha256(), 0
        self._synced = 0
        self.refused: OSError | None = None
        """The first error of the storage."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            self._file.write(data)
            if self.size - self._synced >= SYNC_EVERY:
                self._file.flush()
                os.fdatasync(self._file.fileno())
                self._synced = self.size
        except OSError as error:
            self.refused = self.refused or error
            raise
        self._sha256.update(data)
        self.size += len(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def entry(self) -> dict[str, Any]:
        return {"bytes": self.size, "sha256": self._sha256.hexdigest()}
