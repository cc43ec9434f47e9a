"""TensorBoard's event files."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.metrics.console import Log

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter

CLOSE_S = 5.0
"""A storage that hangs does not keep a run from ending."""

UNBOUNDED = 0
"""The library's queue of events. At its own size, 10, a step waits as soon as the storage has hung for ten."""


class TensorBoard:
    """This life's event file."""

    def __init__(self, writer: FileWriter, log: Log) -> None:
        self._writer: FileWriter | None = writer
        self._log = log

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Records numbers under their names. A thread writes them.

        In one event: SummaryWriter.add_scalar makes one of each number, which takes 1.3 ms of a step in place of 0.2.
        """
        from tensorboard.compat.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        try:
            if self._writer is not None:
                self._writer.add_summary(Summary(value=numbers), iteration)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is left, for a limited time."""
        if self._writer is not None:
            # The library's own close waits for as long as the storage hangs.
            thread = threading.Thread(target=self._close, args=(self._writer,), daemon=True)
            self._writer = None
            thread.start()
            thread.join(CLOSE_S)
            if thread.is_alive():
                self._log.line(
                    f"TensorBoard: the last points may be missing: not written within {CLOSE_S:g} s"
                )

    def _close(self, writer: FileWriter) -> None:
        try:
            writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._log.line(f"no TensorBoard files from here on, training goes on: {error}")


def open_tensorboard(directory: Path, iteration: int, log: Log) -> TensorBoard | None:
    """A new event file for the steps after `iteration`; None, with a line in the log, where there can be none.

    Earlier files stay. TensorBoard forgets what they hold of later steps when it reads where this one starts.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter
    except ImportError as error:
        log.line(f"no TensorBoard files: {error}; install tensorboard, or set logging.tensorboard = false")
        return None
    try:
        writer = FileWriter(str(directory), max_queue=UNBOUNDED)
        writer.add_event(Event(step=iteration + 1, file_version="brain.Event:2"))
        writer.add_event(Event(step=iteration + 1, session_log=SessionLog(status=SessionLog.START)))
    except OSError as error:
        log.line(f"no TensorBoard files, training goes on: {error}")
        return None
    return TensorBoard(writer, log)
