"""Heartbeat file: its age tells whether the run makes progress, without access to the job."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from pathlib import Path
from types import TracebackType

from trainer.contract.files.run_directory import publish
from trainer.contract.resuming.evidence import reached_iteration
from trainer.faults.watch import Beat, Phase, Watch

AT_MOST_EVERY_S = 10.0
"""Minimum time between two writes in the same phase (seconds)."""

LAST_WRITE_S = 5.0
"""Timeout of the last write, so that a hanging file system does not block a finished run (seconds)."""


class Heartbeat:
    """Context manager that writes the last beat of `watch` to a file: `time`, `iteration`, `phase`, `host`, `pid`.

    A separate thread writes the file, so that neither the loop nor the watch waits for a hanging file system. Until the
    attempt has found a checkpoint, the iteration is that of the previous attempt: if it finds none, this is evidence of
    earlier training (`trainer.contract.resuming.evidence`).
    """

    def __init__(self, path: Path, watch: Watch) -> None:
        self._path, self._watch = path, watch
        self._earlier = reached_iteration(path) if path.exists() else 0
        self._written: Beat | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._write_periodically, daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join(LAST_WRITE_S)
        if error is None and not self._thread.is_alive():
            self._write(self._watch.last)

    def _write_periodically(self) -> None:
        while not self._closed.wait(1.0):
            beat, written = self._watch.last, self._written
            if (
                written is None
                or beat.phase is not written.phase
                or beat.clock - written.clock >= AT_MOST_EVERY_S
            ):
                self._write(beat)

    def _write(self, beat: Beat) -> None:
        content = {
            "time": round(beat.time, 3),
            "iteration": self._earlier
            if beat.phase in (Phase.START, Phase.BUILD, Phase.LOAD)
            else beat.iteration,
            "phase": beat.phase.value,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with contextlib.suppress(OSError):  # a full disk is reported by saves; the next beat tries again
            publish(self._path, json.dumps(content) + "\n")
        self._written = beat
