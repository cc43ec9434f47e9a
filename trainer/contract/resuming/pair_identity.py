"""Comparison of two identities of a tokenized pair: whether they describe the same documents. Reads no files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Identity = dict[str, Any]
"""Identity of a file: size (bytes), modified_ns, and sha256, which is None if it is not known."""

SECOND = 1_000_000_000
"""Nanoseconds."""


def is_same_pair(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two identities certainly describe the same documents. `provenance.examine` has hashed the files that this
    depends on.

    Pairs of documents of one length have the same .idx, so the .bin must be known too, by its hash or its time. In a
    run that begins, pairs may be known by their paths alone.
    """
    if "idx" not in one or "idx" not in other:
        return bool(one["prefix"] == other["prefix"])
    return compare(one, other) == "same"


def likeness(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """How certainly two identities describe the same documents: 0 if not, 1 if possibly, 2 if certainly. Hashes may
    be missing."""
    verdict = compare(one, other)
    return 0 if verdict == "other" else 2 if verdict == "same" else 1


def content_suffixes(pair: Mapping[str, Any]) -> list[str]:
    """Suffixes of the files of a pair that are not read at each start."""
    return [suffix for suffix in ("bin", "mask") if suffix in pair]


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Compare two identities of a pair: "same", "other", "hash" (files must be hashed) or "unknown" (no hash)."""
    if content_suffixes(before) != content_suffixes(now):
        return "other"
    verdicts = {compare_content(before[suffix], now[suffix]) for suffix in content_suffixes(now)}
    if differs(before["idx"], now["idx"]):
        return "other"
    return next(verdict for verdict in ("other", "unknown", "hash", "same") if verdict in verdicts)


def compare_content(before: Identity, now: Identity) -> str:
    """Compare two identities of a .bin or .mask. The words are those of `compare`."""
    if differs(before, now):
        return "other"
    if same_age(before, now) or (before["sha256"] and now["sha256"]):
        return "same"
    return "hash" if before["sha256"] else "unknown"


def differs(before: Identity, now: Identity) -> bool:
    """True if two identities of a file certainly have other content."""
    hashes = before["sha256"], now["sha256"]
    return bool(before["size"] != now["size"] or (all(hashes) and hashes[0] != hashes[1]))


def same_age(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if size and time are the same. Some archives keep only seconds; then fractions are ignored."""
    if one["size"] != other.get("size"):
        return False
    first, second = one["modified_ns"], other.get("modified_ns")
    if not isinstance(second, int):
        return False
    in_seconds = first // SECOND == second // SECOND and 0 in (first % SECOND, second % SECOND)
    return first == second or in_seconds
