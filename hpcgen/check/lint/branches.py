"""Merges the values of variables after branches that may or may not run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpcgen.check.lint.words import Piece, Variable, Word, bounded, weak_pieces


def merged(before: Variable | None, ends: Sequence[Variable | None]) -> Variable | None:
    """The value of a variable after branches. None: it is not set.

    Args:
        before: its value before the branches.
        ends: its value at the end of each branch, at least one.
    """
    first = ends[0]
    if all(end is first or (first is not None and _is_alike(end, first)) for end in ends[1:]):
        return first
    return _union(before, ends)


def weak(variable: Variable) -> Variable:
    """The variable with an uncertain value."""
    if not any(part.certain for part in variable.items or variable.pieces or ()) and variable.first:
        return variable
    if variable.items is not None:
        items = tuple(replace(item, certain=False) for item in variable.items)
        return replace(variable, items=items)
    return replace(variable, pieces=weak_pieces(variable.pieces or (Piece(""),)))


def _is_alike(one: Variable | None, other: Variable) -> bool:
    if one is None or (one.items is None) != (other.items is None):
        return False
    if one.items is not None and other.items is not None:
        return [_content(word) for word in one.items] == [_content(word) for word in other.items]
    return one.pieces == other.pieces


def _content(word: Word) -> tuple[str, bool, bool]:
    return word.text, word.known, word.certain


def _union(before: Variable | None, values: Sequence[Variable | None]) -> Variable:
    """The union of a variable's values in several branches. None: the branch leaves the variable unset.

    Parts that all branches share are certain. The words of every branch are kept, so that no option is lost.
    """
    present = [value for value in values if value is not None]
    assumed = any(value.assumed for value in present)
    lists = [value.items for value in present if value.items is not None]
    if len(lists) == len(values):  # an array in every branch
        return Variable(items=tuple(_united(lists)), assumed=assumed)
    texts = [_text(value) for value in present]
    # without options, a rule can only doubt the value: any branch may win, so the last one stands for all
    if not any(re.search(r"(^|\s)--?[A-Za-z]", text) for text in texts):
        known = {text for value, text in zip(present, texts, strict=True) if text and _is_known(value)}
        return _exclusive(weak(present[-1]), len(known) > 1)
    base = "" if before is None else _text(before)
    own = {text.replace(base, "", 1).strip() for text in texts} - {""}
    pieces: list[Piece] = []
    # ARGS="$ARGS --more" in every branch: what the variable had before stays certain
    if base.strip() and len(present) == len(values) and all(base in text for text in texts):
        assert before is not None
        starts = [text.index(base) for text in texts]
        for value, start in zip(present, starts, strict=True):
            pieces += weak_pieces(_cut(value.first, 0, start))
        pieces += before.first
        for value, start, text in zip(present, starts, texts, strict=True):
            pieces += weak_pieces(_cut(value.first, start + len(base), len(text)))
    else:
        for value in present:
            pieces += (*weak_pieces(value.first), Piece(" ", certain=False))
    return _exclusive(Variable(pieces=bounded(tuple(pieces)), assumed=assumed), len(own) > 1)


def _exclusive(variable: Variable, is_exclusive: bool) -> Variable:
    """The variable. If `is_exclusive`, at most one of its uncertain pieces is right."""
    if not is_exclusive:
        return variable
    pieces = (replace(piece, exclusive=piece.exclusive or not piece.certain) for piece in variable.first)
    return Variable(pieces=tuple(pieces), assumed=variable.assumed)


def _is_known(variable: Variable) -> bool:
    return all(piece.known for piece in variable.first)


def _united(lists: Sequence[tuple[Word, ...]]) -> Iterator[Word]:
    shared = 0
    for words in zip(*lists, strict=False):
        if len({(word.text, word.known) for word in words}) > 1:
            break
        yield replace(words[0], certain=all(word.certain for word in words))
        shared += 1
    rests = {tuple(word.text for word in items[shared:]): items[shared:] for items in lists}
    is_exclusive = len(rests.keys() - {()}) > 1
    for rest in rests.values():
        for item in rest:
            yield replace(item, certain=False, exclusive=item.exclusive or is_exclusive)


def _cut(pieces: Sequence[Piece], start: int, end: int) -> Iterator[Piece]:
    """The pieces of a text from `start` to `end`."""
    at = 0
    for piece in pieces:
        low, high = max(start - at, 0), min(end - at, len(piece.text))
        if low < high:
            yield replace(piece, text=piece.text[low:high])
        at += len(piece.text)


def _text(variable: Variable) -> str:
    return "".join(piece.text for piece in variable.first)
