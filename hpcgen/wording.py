"""Counts and lists in sentences, and text from files on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.contract.wording import counted as counted


def few(texts: Sequence[str], shown: int = 3) -> str:
    """The first of many texts: "a, b, c and 12 more"."""
    rest = len(texts) - shown
    return ", ".join(texts[:shown]) + (f" and {rest:,} more" if rest > 0 else "")


def harmless(text: str, keep: str = "") -> str:
    """Text from a file with every character spelled out that could steer the reader's terminal or forge a line.

    These are control characters, line breaks, and marks that change the direction of text; those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )
