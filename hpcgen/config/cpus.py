"""CPUs as people write them (0-47), as Slurm's masks (0xfff) and as the kernel's words (0000ffff,ffffffff)."""

from __future__ import annotations

import re

WORD_BITS = 32
MAX_WORDS_LENGTH = 2048
"""Of a mask in words; 7,000 CPUs."""


def listed(text: str) -> int:
    """The CPUs of a list such as "0-3,8" as a mask: bit i is CPU i. A range that runs backwards holds none."""
    mask = 0
    for part in text.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            mask |= 1 << cpu
    return mask


def ranges(mask: int) -> str:
    """The list of a mask: 0b1111 -> "0-3"; empty for none."""
    parts: list[str] = []
    cpu = 0
    while mask >> cpu:
        first = cpu
        while mask >> cpu & 1:
            cpu += 1
        if cpu > first:
            parts.append(str(first) if cpu == first + 1 else f"{first}-{cpu - 1}")
        cpu += 1
    return ",".join(parts)


def words(mask: int, num_cpus: int) -> str:
    """The mask of a machine of `num_cpus` CPUs as sysfs and NCCL write it, highest word first."""
    count = -(-num_cpus // WORD_BITS)
    return ",".join(f"{mask >> WORD_BITS * index & 0xFFFFFFFF:08x}" for index in reversed(range(count)))


def from_words(text: str) -> int:
    """The mask in the kernel's words.

    Raises:
        ValueError: it has another form.
    """
    if len(text) > MAX_WORDS_LENGTH or not re.fullmatch(r"[0-9a-f]{1,8}(,[0-9a-f]{1,8})*", text):
        raise ValueError(f"not a mask of CPUs: {text[:40]!r}")
    mask = 0
    for word in text.split(","):
        mask = mask << WORD_BITS | int(word, 16)
    return mask
