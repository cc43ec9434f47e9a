"""Places of a template that whoever uses it fills in: {{ name }}, {% if %} and <name>.

Before a shell's parser reads the text, each is masked by a name of the same length, so that it is one word.
"""

from __future__ import annotations

import re

BRACES = re.compile(r"\{\{.*?\}\}|\{%.*?%\}")
"""Jinja's places, each on one line."""
ANGLES = re.compile(r"(?<!<)<[A-Za-z](?:[\w .-]*\w)?>")
ANY = re.compile(f"{BRACES.pattern}|{ANGLES.pattern}")
MASK = re.compile(r"_Z_*Z_")

_TAGS = re.compile(r"[ \t]*(?:(?:\{%.*?%\}|\{#.*?#\})[ \t]*)+")


def is_tag(line: str) -> bool:
    """Whether a line has nothing but tags such as {% if %}, which leave nothing behind."""
    return _TAGS.fullmatch(line) is not None


def masked(text: str, places: re.Pattern[str] = BRACES) -> str:
    """`text` with its places masked, in as many bytes; lines of tags become blank.

    A text that has names like the masks is left as it is.
    """
    if not places.search(text) or MASK.search(text):
        return text
    lines = (" " * len(line.encode(errors="replace")) if is_tag(line) else line for line in text.split("\n"))
    return places.sub(_mask, "\n".join(lines))


def unmasked(masked: bytes, text: str, places: re.Pattern[str] = BRACES) -> bytes:
    """`masked` with the places of `text`, which it was made from, put in again."""
    lines = (line for line in text.split("\n") if not is_tag(line))
    found = iter(places.findall("\n".join(lines)))
    return re.sub(
        MASK.pattern.encode(), lambda mask: next(found, mask[0].decode()).encode(errors="replace"), masked
    )


def parts(masked: str, original: str, places: re.Pattern[str]) -> list[tuple[str, bool]]:
    """A text in parts, those in which a place is masked as in `original`, and whether each is none of them."""
    found = iter(places.findall(original))
    split = re.split(f"({MASK.pattern})", masked)
    return [
        (next(found, part), False) if index % 2 else (part, True) for index, part in enumerate(split) if part
    ]


def _mask(place: re.Match[str]) -> str:
    return f"_Z{'_' * (len(place[0].encode(errors='replace')) - 4)}Z_"
