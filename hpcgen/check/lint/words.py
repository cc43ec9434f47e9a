"""Words and variables of a script, with what is known about their values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpcgen.check.lint.template import ANY

MAX_WORDS = 20_000
"""Maximum number of words in an expansion. Arrays that contain each other can double with every line."""
MAX_LENGTH = 100_000
MAX_EXPANDED = 2_000_000
"""Maximum number of characters that all variables of a script contribute to its words, plus PIECE_COST for each piece
and word. Beyond this limit, variables count as unknown. Hand-written scripts need about 1% of it."""
PIECE_COST = 20

Ranges = tuple[tuple[int, int], ...]
"""Parts of a text, as start and end."""

PLACEHOLDER = re.compile(
    r"your|xxx|<|\.\.\.|change[_-]?(me|this|it)|replace|example|dummy|none|null|todo|fixme|insert|enter[_-]|fill[_-]?in"
    r"|put[_-]|[_-]here|placeholder|disabled|offline|__\w+__|\{\{|\{%|(?P<same>\w)(?P=same){11}",
    re.IGNORECASE,
)
"""Text that users of a template replace."""

UNKNOWN = re.compile(rf"\$|{ANY.pattern}")
"""Parts that make a text unknown: an expansion, or a placeholder."""


@dataclass(frozen=True, kw_only=True)
class Word:
    """One word of a command, expanded as far as possible."""

    text: str
    """Without quotes, with the script's variables expanded. Unknown parts stay as written: "$HOME/x"."""
    known: bool
    """True if `text` is exactly what the command gets."""
    line: int
    """Line of the word, which can be in an array that the command uses."""
    source: str
    """The word as written in the script."""
    variables: tuple[str, ...] = ()
    """Names of the variables in the word as written."""
    certain: bool = True
    """False if the word comes from code that may not run, such as `args+=(--x)` within an `if`."""
    assumed: bool = False
    """True if the job's environment can override the text, as with ${NODES:-4}."""
    doubts: Ranges = ()
    """Ranges of `text`, as start and end, that come from code that may not run."""
    unknowns: Ranges = ()
    """Ranges of `text` with unknown values, which stay as written. If `bash -c` or `eval` reads the text again, a shell
    has already expanded them."""
    exclusive: bool = False
    """True if the word has a different known text in each branch of the script, so at most one of them applies."""

    @property
    def number(self) -> int | None:
        """The integer that the word certainly is; None if it is not one."""
        if self.known and self.certain and re.fullmatch(r"-?\d{1,15}", self.text, re.ASCII):
            return int(self.text)
        return None


def joined(words: Sequence[Word]) -> Word:
    """Words as one, with blanks between them."""
    starts = list(itertools.accumulate((len(word.text) + 1 for word in words), initial=0))
    placed = list(zip(starts, words, strict=False))
    doubts = tuple((start, start + len(word.text)) for start, word in placed if not word.certain)
    return replace(
        words[0],
        text=" ".join(word.text for word in words),
        known=all(word.known for word in words),
        source=" ".join(dict.fromkeys(word.source for word in words)),
        variables=tuple(dict.fromkeys(name for word in words for name in word.variables)),
        certain=not doubts,
        assumed=any(word.assumed for word in words),
        doubts=doubts,
        unknowns=tuple(
            (start + low, start + high) for start, word in placed for low, high in unknown_ranges(word)
        ),
        exclusive=any(word.exclusive for word in words),
    )


def unknown_ranges(word: Word) -> Ranges:
    """The ranges of a word's text that are as written in the script."""
    return () if word.known else word.unknowns or ((0, len(word.text)),)


@dataclass(frozen=True)
class Piece:
    """A part of a word. `quoted` text is not split at blanks."""

    text: str
    known: bool = True
    quoted: bool = False
    certain: bool = True
    exclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class Variable:
    """The current value of a variable: a string, or the words of an array."""

    pieces: tuple[Piece, ...] | None = None
    items: tuple[Word, ...] | None = None
    assumed: bool = False

    @property
    def first(self) -> tuple[Piece, ...]:
        """The value of $NAME, which is the first word of an array."""
        if self.items is not None:
            return pieces_of(self.items[0]) if self.items else ()
        return self.pieces or ()


@dataclass
class Budget:
    """Remaining part of MAX_EXPANDED for a script."""

    left: int = MAX_EXPANDED

    def allows(self, texts: Iterable[str]) -> bool:
        """Deducts the cost of these texts; False if it exceeds the budget."""
        if self.left >= 0:
            self.left -= sum(len(text) + PIECE_COST for text in texts)
        return self.left >= 0


def variable_of(text: str, *, assumed: bool = False) -> Variable:
    """A variable with this value."""
    return Variable(pieces=(Piece(text),), assumed=assumed)


def unknown_variable(name: str) -> Variable:
    """A variable that the script sets to an unknown value."""
    return Variable(pieces=(Piece(f"${name}", known=False),))


def appended(variable: Variable | None, more: Variable) -> Variable:
    """The variable after `name+=more`."""
    if variable is None:
        return more
    assumed = variable.assumed or more.assumed
    if more.items is not None:
        items = variable.items if variable.items is not None else ()
        return Variable(items=(*items, *more.items)[:MAX_WORDS], assumed=assumed)
    pieces = bounded((*variable.first, *more.first))
    if variable.items:  # a string is appended to the first word
        joined = _joined_word(variable.items[0], pieces)
        return Variable(items=(joined, *variable.items[1:]), assumed=assumed)
    return Variable(pieces=pieces, assumed=assumed)


def _joined_word(word: Word, pieces: tuple[Piece, ...]) -> Word:
    """`word` with the text of `pieces`."""
    return replace(
        word,
        text="".join(piece.text for piece in pieces),
        known=all(piece.known for piece in pieces),
        certain=all(piece.certain for piece in pieces),
        doubts=(),
        unknowns=unknown_of(pieces),
        exclusive=any(piece.exclusive for piece in pieces),
    )


def unknown_of(pieces: Sequence[Piece]) -> Ranges:
    """The ranges of the text of `pieces` that are unknown."""
    ends = [*itertools.accumulate((len(piece.text) for piece in pieces), initial=0)]
    return tuple(
        (start, end) for piece, start, end in zip(pieces, ends[:-1], ends[1:], strict=True) if not piece.known
    )


def weak_pieces(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """`pieces` marked as uncertain."""
    return tuple(replace(piece, certain=False) if piece.certain else piece for piece in pieces)


def pieces_of(word: Word) -> tuple[Piece, ...]:
    """The text of a word as pieces."""
    found, end = [], 0
    for first, last in (*unknown_ranges(word), (len(word.text), len(word.text))):
        found += [(word.text[end:first], True), (word.text[first:last], False)]
        end = last
    pieces = [
        Piece(text, known=known, certain=word.certain, exclusive=word.exclusive)
        for text, known in found
        if text
    ]
    return tuple(pieces) or (Piece("", certain=word.certain, exclusive=word.exclusive),)


def bounded(pieces: tuple[Piece, ...]) -> tuple[Piece, ...]:
    """`pieces`, or a single unknown piece if they are too long."""
    if len(pieces) > MAX_WORDS or sum(len(piece.text) for piece in pieces) > MAX_LENGTH:
        return (Piece("...", known=False),)
    return tuple(_merged(pieces))


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces with adjacent pieces of the same kind joined."""
    for _, group in itertools.groupby(
        pieces, key=lambda piece: (piece.known, piece.quoted, piece.certain, piece.exclusive)
    ):
        first, *others = group
        yield replace(first, text=first.text + "".join(piece.text for piece in others)) if others else first
