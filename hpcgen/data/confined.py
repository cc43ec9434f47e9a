"""Runs a generator in a process of its own, whose memory the system limits.

It is used for libraries that decode files of unknown origin: a few hundred bytes can ask for many GB, and no setting of
the library limits this. A limit on this process itself would also hit its other threads.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from hpcgen.errors import HpcgenError

MAX_MEMORY = 512 * 1024 * 1024
"""Maximum bytes that the process allocates, in addition to the modules that it imports."""
_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # a local folder named like a library must not be imported
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # the other pools reserve more than they use
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


def confined(
    name: str,
    generator: Callable[..., Iterator[Any]],
    descriptor: int,
    *arguments: Any,
    max_memory: int = MAX_MEMORY,
) -> Iterator[Any]:
    """Yields what `generator(descriptor, *arguments)` yields in another process, which inherits the file descriptor.

    `generator` must be importable, and its items must be picklable. `name` is the file, for messages.

    Raises:
        HpcgenError: the generator raised it or MemoryError, or its process died.
    """
    ours, theirs = Pipe()
    command = [sys.executable, "-m", __name__, str(theirs.fileno())]
    with (
        ours,
        subprocess.Popen(
            command,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), descriptor),
            start_new_session=True,  # Ctrl-C reaches this process, which ends the other one
        ) as process,
    ):
        theirs.close()
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # it died, which recv notices
                ours.send((name, max_memory, generator, (descriptor, *arguments)))
            while (item := _received(ours, process, name)) is not None:
                yield item[0]
        finally:
            process.kill()


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether an allocation failed. Some libraries wrap it in an unrelated error."""
    return isinstance(error, MemoryError) or any(
        words in str(error) for words in ("alloc of size", "std::bad_alloc")
    )


def _received(ours: Connection, process: subprocess.Popen[bytes], name: str) -> tuple[Any] | None:
    """Returns the next item in a tuple; None at the end."""
    try:
        outcome: HpcgenError | str | tuple[Any] | None = ours.recv()
    except (EOFError, ConnectionResetError):
        status = process.wait()
        ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        raise HpcgenError(
            f"{name}: the process that reads it ended with {ended}",
            "the file is damaged, or the memory is too small for it; download it again, or write it with smaller parts",
        ) from None
    if isinstance(outcome, HpcgenError):
        raise outcome
    if isinstance(outcome, str):
        raise RuntimeError(f"a bug in the process that reads {name}:\n{outcome}")
    return outcome


def _serve(pipe: Connection) -> None:
    name, max_memory, generator, arguments = pipe.recv()  # imports the generator's module
    _limit_memory(max_memory)
    try:
        for item in generator(*arguments):
            pipe.send((item,))
    except HpcgenError as error:
        pipe.send(error)
    except MemoryError as error:
        pipe.send(
            HpcgenError(
                f"{error if error.args else f'{name}: reading it'} needs more than {max_memory >> 20:,} MiB of memory",
                "write the file again with shorter texts, smaller pages and fewer columns, or as JSON Lines",
            )
        )
    except (BrokenPipeError, ConnectionResetError):  # nobody reads any more
        return
    except Exception:
        pipe.send(traceback.format_exc())
    else:
        pipe.send(None)


def _limit_memory(max_memory: int) -> None:
    """Limits what this process may allocate from now on. A failed allocation raises MemoryError."""
    with suppress(OSError, ValueError):  # another system, or a lower limit already
        status = Path("/proc/self/status").read_text(encoding="ascii")
        allocated = int(status.partition("VmData:")[2].split()[0]) * 1024
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (allocated + max_memory, hard))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
