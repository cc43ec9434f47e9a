"""Misspelled names: the known names that somebody probably meant, or none. hpcgen.text reexports these.

A wrong suggestion is worse than none. Names that only look alike, such as tail and train, are different words. Names
with different numbers are different things: 7b is not a misspelling of 175b.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from trainer.contract.wording import one_of

_WORD = re.compile(r"[^\W\d_]+|\d+(?:[.,]\d+)*")
_MOST_BEGINNINGS = 4
"""Maximum number of names with the same beginning to list. If there are more, none is listed."""
_LONGEST = 200
"""Longest name that is compared, in characters. No known name is as long."""


def nearest(name: str, known: Collection[str]) -> str | None:
    """The name in `known` that `name` misspells; None if there is none."""
    return next(iter(misspelled(name, known)), None)


def did_you_mean(name: str, known: Collection[str], most: int = 2) -> str:
    """A question that suggests up to `most` names of `known`, of which `name` may be a misspelling or a short form.
    Without such names, it suggests the names that begin with `name`, unless there are many. Empty if there is nothing
    to suggest.
    """
    if len(name) > _LONGEST:
        return ""
    meant = misspelled(name, known) or short_for(name, known)
    if 0 < len(meant) <= most:
        return f"did you mean {one_of(meant)}?"
    begun = [each for each in sorted(known) if _begins(name, each)]
    return f"names that begin with {name}: {', '.join(begun)}" if 0 < len(begun) <= _MOST_BEGINNINGS else ""


def misspelled(name: str, known: Collection[str]) -> list[str]:
    """The names in `known` that `name` most likely misspells, all equally likely.

    These are misspellings: upper case and other separators; one wrong, missing, additional or exchanged letter (two in
    long names); the words in a different order. A different word is not a misspelling: min_lr is not max_lr.
    """
    if len(name) > _LONGEST:
        return []
    found = [(cost, each) for each in sorted(known) if (cost := _cost(name, each)) is not None]
    most = max(1, min(found, default=(0, ""))[0])
    return [each for cost, each in found if cost <= most]


def short_for(name: str, known: Collection[str]) -> list[str]:
    """The names of `known` with words that `name` leaves out, abbreviates or writes in full.

    For example moe_z_loss_coeff for moe_z_loss, num_attention_heads for num_heads, and moe_layer_freq for
    moe_layer_frequency. A single word is not a short form, because many names contain it.
    """
    if len(name) > _LONGEST:
        return []
    return [each for each in sorted(known) if _is_short(_words(name), _words(each))]


def _cost(typed: str, right: str) -> int | None:
    """How unlikely `typed` is a misspelling of `right`, from 0; None if these are different names."""
    ours, theirs = _words(typed), _words(right)
    if _numbers(ours) != _numbers(theirs):
        return None
    written, wanted = _joined(ours), _joined(theirs)
    if written == wanted:
        return 0
    if sorted(ours) == sorted(theirs):
        return 1
    shorter = min(len(written), len(wanted))
    edits = _edits(written, wanted, most=2 if shorter >= 9 else 1 if len(written + wanted) >= 5 else 0)
    if edits is None or (shorter < 8 and not _is_slip(written, wanted)):
        return None
    return edits if len(ours) != len(theirs) or all(map(_is_same_word, ours, theirs)) else None


def _is_same_word(written: str, wanted: str) -> bool:
    """True if one word in a name can be a misspelling of another word. max cannot misspell min, and gpus cannot
    misspell cpus."""
    shorter = min(len(written), len(wanted))
    if shorter < 5 and written[0] != wanted[0] and sorted(written) != sorted(wanted):
        return False
    return _edits(written, wanted, most=2 if shorter >= 9 else 1) is not None


def _words(name: str) -> list[str]:
    """The words and numbers of a name in lower case: llama3-8b is llama, 3, 8, b."""
    return [word.replace(",", ".") for word in _WORD.findall(name.lower())]


def _numbers(words: list[str]) -> list[str]:
    return [word for word in words if word[0].isdigit()]


def _joined(words: list[str]) -> str:
    """The words without separators, except between numbers: 1-3b is not 13b."""
    text = ""
    for word in words:
        text += f"-{word}" if text and text[-1].isdigit() and word[0].isdigit() else word
    return text


def _is_slip(written: str, wanted: str) -> bool:
    """True if one edit of a short word is a typing error rather than another word.

    Many short words differ only in their first letter (gender, render), or in another letter (line, lint).
    """
    if sorted(written) == sorted(wanted):
        return True
    is_replaced = len(written) == len(wanted)
    return written[0] == wanted[0] and not (is_replaced and len(wanted) < 5)


def _is_short(ours: list[str], theirs: list[str]) -> bool:
    if len(ours) < 2 or _numbers(ours) != _numbers(theirs):
        return False
    if len(ours) == len(theirs):
        return all(map(_abbreviates, ours, theirs))
    lacks_inner = len(ours) == len(theirs) - 1 and any(
        ours == theirs[:i] + theirs[i + 1 :] for i in range(1, len(ours))
    )
    return lacks_inner or ours == theirs[: len(ours)]


def _abbreviates(a: str, b: str) -> bool:
    return a == b or (min(len(a), len(b)) >= 3 and (a.startswith(b) or b.startswith(a)))


def _begins(name: str, known: str) -> bool:
    """True if `known` begins with the words of `name`. The last word may be cut off, unless it is very short."""
    ours, theirs = _words(name), _words(known)
    if not ours or (len(_joined(ours)) < 4 and not _numbers(ours)) or len(ours) > len(theirs):
        return False
    last = theirs[len(ours) - 1]
    is_cut = not last[0].isdigit() and len(ours[-1]) >= 4 and last.startswith(ours[-1])
    return ours[:-1] == theirs[: len(ours) - 1] and (ours[-1] == last or is_cut)


def _edits(a: str, b: str, most: int) -> int | None:
    """The number of letters to replace, insert, remove or exchange with their neighbor, from `a` to `b`.

    None if it is more than `most`.
    """
    if abs(len(a) - len(b)) > most:
        return None
    before: list[int] = []
    row = list(range(len(b) + 1))
    for i, letter in enumerate(a, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(b, 1):
            cost = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                cost = min(cost, earlier[j - 2] + 1)
            row.append(cost)
        if min(row) > most:
            return None
    return row[-1] if row[-1] <= most else None
