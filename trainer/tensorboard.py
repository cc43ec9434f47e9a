"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trainer.logging import Log

if TYPE_CHECKING:
    from torch.utils.tensorboard import FileWriter


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
        """Writes what is left."""
        try:
            if self._writer is not None:
                self._writer.close()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._writer = None
        self._log.line(f"no TensorBoard files from here on, training goes on: {error}")


def open_tensorboard(directory: Path, iteration: int, log: Log) -> TensorBoard | None:
    """A new event file for the steps after `iteration`; None, with a line in the log, without the library.

    Earlier files stay. TensorBoard forgets what they hold of later steps when it reads where this one starts.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from torch.utils.tensorboard import FileWriter
    except ImportError as error:
        log.line(f"no TensorBoard files: {error}; install tensorboard, or set logging.tensorboard = false")
        return None
    writer = FileWriter(str(directory))
    writer.add_event(Event(step=iteration + 1, file_version="brain.Event:2"))
    writer.add_event(Event(step=iteration + 1, session_log=SessionLog(status=SessionLog.START)))
    return TensorBoard(writer, log)
