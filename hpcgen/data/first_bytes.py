"""Recognizes files by their first bytes."""

from __future__ import annotations

import re

from trainer.contract.files import git_lfs

_MAGIC = {
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),
    ".gz": re.compile(rb"\x1f\x8b"),
    ".parquet": re.compile(rb"PAR1"),
}
"""First bytes of files that are not text (zstd: a frame, or a skippable one)."""
_PAGE = re.compile(rb"\s*<(!doctype|html|head|body|\?xml)\b", re.IGNORECASE)
WEB_PAGE = "a web page"
POINTER = "a Git LFS pointer, not the data that it points to"
HEAD_BYTES = 64
"""Bytes that tell what a file is."""


def binary_suffix(head: bytes) -> str | None:
    """Suffix for content that starts with `head`: .zst, .gz or .parquet; None if it is none of these."""
    return next((suffix for suffix, magic in _MAGIC.items() if magic.match(head)), None)


def stand_in(head: bytes) -> tuple[str, str] | None:
    """Describes a file that stands in for data of any type, and says what to do. None for other files."""
    if head.startswith(git_lfs.START):
        return POINTER, "fetch it with git lfs pull, and run hpcgen data plan again"
    if _PAGE.match(head):
        begin = str(head[:40].lstrip(), "utf-8", "replace")
        return f"{WEB_PAGE} (it starts with {begin!r})", "download the file again"
    return None


def unexpected_content(name: str, head: bytes, content_type: str = "") -> str | None:
    """Describes content that starts with `head`, if it contradicts `name`; None if it does not.

    The server's Content-Type counts only if the first bytes are inconclusive: many servers send text/html for any file.
    """
    begins = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    is_page = content_type.startswith("text/html") and begins[:1] != b"{" and not name.endswith(tuple(_MAGIC))
    if is_page or begins[:1] == b"<":
        return WEB_PAGE
    if begins.startswith(git_lfs.START):
        return POINTER
    if not head:
        return "empty"
    found = binary_suffix(head)
    named = next((suffix for suffix in _MAGIC if name.endswith(suffix)), None)
    if found == named:
        return None
    if found is not None:
        return f"{found} data, but the name does not end in {found}"
    return f"not {named} data (it starts with {head[:4].hex(' ')})"
