"""Formatting of numbers, lists and names for people, and escaping of untrusted text."""

from __future__ import annotations

from trainer.contract.spelling import did_you_mean, misspelled, nearest, short_for
from trainer.contract.wording import counted, duration, few, one_of, ranges

__all__ = [
    "counted",
    "did_you_mean",
    "duration",
    "few",
    "harmless",
    "misspelled",
    "nearest",
    "one_of",
    "ranges",
    "scaled",
    "short_for",
    "size_text",
]


def scaled(number: float) -> str:
    """A number of at most four digits with a decimal prefix: 999, 12.3 k, 4.5 M."""
    prefix = ""
    for prefix in ("", "k", "M", "G", "T", "P"):
        if number < 999.95 or prefix == "P":
            break
        number /= 1000
    return f"{number:.1f} {prefix}" if prefix else f"{number:.0f}"


def size_text(num_bytes: float) -> str:
    """A number of bytes with a decimal prefix: 0 B, 15.7 MB, 2.7 TB."""
    number, _, prefix = scaled(num_bytes).partition(" ")
    return f"{number} {prefix}B"


def printable(text: str) -> str:
    """Untrusted text with a question mark in place of each non-printable character."""
    return "".join(character if character.isprintable() else "?" for character in text)


def harmless(text: str, keep: str = "") -> str:
    """Escapes characters of untrusted text that could control the terminal or forge a line.

    These are control characters, line breaks, and marks that change the direction of text, except those in `keep`.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else ascii(character)[1:-1]
        for character in text
    )
