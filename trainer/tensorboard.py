"""TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.logging import Log


class TensorBoard:
    """This life's event file."""

    def __init__(self, writer: Any, log: Log) -> None:
        """`writer` is torch's SummaryWriter."""
        self._writer, self._log = writer, log

    def scalars(self, iteration: int, values: dict[str, float]) -> None:
        """Records numbers under their names. A thread writes them."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, iteration)
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is None:
            return
        try:
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
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        log.line(f"no TensorBoard files: {error}; install tensorboard, or set logging.tensorboard = false")
        return None
    return TensorBoard(SummaryWriter(directory, purge_step=iteration + 1), log)
