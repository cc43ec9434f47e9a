"""Names of code directories: hpcgen-VERSION-HASH for x86_64, hpcgen-VERSION-aarch64-HASH for Arm."""

from __future__ import annotations

import re


def directory_name(version: str, architecture: str, digest: str) -> str:
    """The name of a code directory for an instruction set."""
    machine = "" if architecture == "x86_64" else f"{architecture}-"
    return f"hpcgen-{version}-{machine}{digest}"


def architecture_of(path: str) -> str | None:
    """The instruction set that a code directory was installed for, from its name; None for other directories."""
    found = re.fullmatch(r"hpcgen-.+?-(?:(aarch64)-)?[0-9a-f]{12}", path.rstrip("/").rpartition("/")[2])
    return (found[1] or "x86_64") if found else None
