"""Values in messages."""

from __future__ import annotations

import json
import re

_OTHER_TYPE = re.compile(r"(?i:null|true|false|~|[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?)")
"""Texts that are of another type without quotes."""


def show(value: object) -> str:
    """A value as written in a run file, on one short line."""
    is_plain = (
        isinstance(value, str) and re.fullmatch(r"[\w./:@+,=-]+", value) and not _OTHER_TYPE.fullmatch(value)
    )
    text = str(value) if is_plain else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def is_private(path: str) -> bool:
    """Returns True for values that are never printed: environment variables and URLs may contain secrets."""
    return path.startswith(("environment", "data.corpus.source.url")) or path.endswith(".api_key")
