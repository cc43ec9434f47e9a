"""A limit on the memory of this process while chat templates, which are programs of strangers, run outside of a job."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAX_BYTES = 4 * 2**30
"""Memory that a rendering may ask for (bytes). Usual ones need less than a megabyte."""
_SIZE = Path("/proc/self/statm")
"""The memory of this process in pages. The first number is all of its address space (proc(5))."""


@contextmanager
def limited_memory() -> Iterator[None]:
    """Lets the system refuse more than MAX_BYTES of new memory, so that Python raises MemoryError.

    The limit is that of the entire process, so it is for commands on a login node, not for tasks with many threads,
    whose memory Slurm limits. Does nothing where Linux does not say how large the process is.
    """
    if not _SIZE.exists():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(_SIZE.read_text().split()[0]) * resource.getpagesize() + MAX_BYTES
    limits = [value for value in (soft, hard, limit) if value != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
