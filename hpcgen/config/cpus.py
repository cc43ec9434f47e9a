"""CPU sets as lists (0-47), as Slurm's masks (0xfff) and as the kernel's words (0000ffff,ffffffff)."""

from __future__ import annotations

import re

from hpcgen import text

WORD_BITS = 32
MAX_WORDS_LENGTH = 2048
"""Maximum length of a mask in the kernel's words, enough for 7,000 CPUs."""


def listed(cpus: str) -> int:
    """The mask of a list such as "0-3,8", where bit i is CPU i. A descending range is empty."""
    mask = 0
    for part in cpus.split(","):
        first, _, last = part.partition("-")
        for cpu in range(int(first), int(last or first) + 1):
            mask |= 1 << cpu
    return mask


def ranges(mask: int) -> str:
    """The list of a mask: "0-3" for 0b1111, and "" for an empty mask."""
    return text.ranges(cpu for cpu in range(mask.bit_length()) if mask >> cpu & 1)


def named(mask: int) -> str:
    """The CPUs of a mask, for messages: "CPU 3", "CPUs 0-3"."""
    return f"CPU{'' if mask.bit_count() == 1 else 's'} {ranges(mask)}"


def words(mask: int, num_cpus: int) -> str:
    """A mask for `num_cpus` CPUs in the format of sysfs and NCCL, highest word first."""
    count = -(-num_cpus // WORD_BITS)
    return ",".join(f"{mask >> WORD_BITS * index & 0xFFFFFFFF:08x}" for index in reversed(range(count)))


def from_words(words: str) -> int:
    """The mask given in the kernel's words.

    Raises:
        ValueError: the text is not a mask.
    """
    if len(words) > MAX_WORDS_LENGTH or not re.fullmatch(r"[0-9a-f]{1,8}(,[0-9a-f]{1,8})*", words):
        raise ValueError(f"not a mask of CPUs: {words[:40]!r}")
    mask = 0
    for word in words.split(","):
        mask = mask << WORD_BITS | int(word, 16)
    return mask
