"""Values in messages."""

from __future__ import annotations

import json
import re

NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
"""A number as YAML reads it, if it has no quotes."""


def show(value: object) -> str:
    """A value as written in a run file, on one short line."""
    text = value if isinstance(value, str) and _is_plain(value) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _is_plain(text: str) -> bool:
    """Returns True if YAML reads the text as a text without quotes."""
    is_other_type = text.lower() in ("null", "true", "false") or NUMBER.fullmatch(text)
    return not is_other_type and re.fullmatch(r"[\w./:@+,=-]+", text) is not None


def is_private(path: str) -> bool:
    """Returns True for values that are never printed: variables, URLs and commands may contain secrets."""
    return path.startswith(("environment", "notify.command", "data.corpus.source.url")) or path.endswith(
        ".api_key"
    )
