"""Suffixes of the files of a corpus."""

from __future__ import annotations

PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".jsonl.zst", ".jsonl.gz", PARQUET)
"""Suffixes of the files that are included by default, without patterns."""
MORE_SUFFIXES = (".json", ".json.zst", ".json.gz")
"""Suffixes that need a pattern: in some corpora (C4, Dolma) these files are JSON Lines, elsewhere one JSON document."""


def extracted_name(name: str) -> str:
    """Removes .zst or .gz from a file name. Replaces .parquet by .jsonl."""
    if name.endswith(PARQUET):
        return name.removesuffix(PARQUET) + ".jsonl"
    return name.removesuffix(".zst") if name.endswith(".zst") else name.removesuffix(".gz")
