"""Refuses pairs that are not as the data stages of hpcgen recorded them."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.contract.config import ConfigError
from trainer.contract.resuming.recorded_pairs import record_problems


def require_as_recorded(prefixes: Iterable[str]) -> None:
    """Compare the .idx files and the loss masks of pairs with the records next to them. Pairs without one are skipped.

    Raises:
        ConfigError: a file has other content than its record says.
        OSError: a file cannot be read.
    """
    if problems := record_problems(prefixes):
        raise ConfigError(*problems)
