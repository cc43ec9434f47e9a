"""Expands the words of a script whose values are known without running it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from hpcgen.check.lint.arithmetic import Refused, value_of
from hpcgen.check.lint.syntax import Node, names_in
from hpcgen.check.lint.template import BRACES, MASK, parts
from hpcgen.check.lint.words import (
    MAX_LENGTH,
    MAX_WORDS,
    UNKNOWN,
    Budget,
    Piece,
    Ranges,
    Variable,
    Word,
    bounded,
    pieces_of,
    unknown_of,
    unknown_ranges,
    weak_pieces,
)

BLANKS = " \t\n"
"""Characters that split words, unless a script sets IFS."""

EXPANDED = re.compile(r"[*?]|(?<!=)\[|\{.*(,|\.\.).*\}|^~")
"""Unquoted text that the shell expands: patterns, braces and tildes. No file has a name like key=[a,b]."""

_PLAIN = re.compile(r"[\w./:,@%+=-]+", re.ASCII)

PATTERN = re.compile(r"[*?]|(?<!=)\[[^]]+\]")
"""Text that the shell replaces by the names of files, even if it comes from a variable without quotes."""

LAYERS = re.compile(r"\\?\[[01](,[01])*\](\*\d+)?(\+\[[01](,[01])*\](\*\d+)?)*")
"""Lists such as [0]*3+[1]*58, which scripts give to --moe-layer-freq without quotes. They are patterns, but the shell
keeps those that match no file."""


_JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")


@dataclass
class Expander:
    """Expands words with the variables known at the current statement."""

    source: bytes
    variables: dict[str, Variable]
    line_offset: int = 0
    """Added to line numbers, for text within a word of another script."""
    offset: int | None = None
    """Offset of the command that contains the text, if it is within a word of another script."""
    on_one_line: bool = False
    """True if the line number of all text is 1, because variables added lines that the file does not have."""
    budget: Budget = field(default_factory=Budget)
    """Budget shared by all texts of a script."""
    on_default: Callable[[str, Variable], None] = lambda name, variable: None
    """Called for ${NAME:=value}."""
    doubts: Ranges = ()
    """Ranges of bytes in `source` that come from code that may not run."""
    expanded: Ranges = ()
    """Ranges of bytes in `source` that a different shell has expanded: "$x" in `bash -c "echo $x"`."""
    trusts_defaults: bool = False
    """True if conditions use the default in ${NAME:-value}, which the job's environment can override."""
    places: re.Pattern[str] = BRACES
    """Placeholders of a template, which are masked in the tree but not in `source`."""
    _used: list[str] = field(default_factory=list)
    _certain: bool = True
    """True if every number in the last arithmetic expression is certain."""
    _assumed: bool = False
    _splits: bool = True
    """True if ${name[@]} in the word yields several words."""

    def text_of(self, node: Node) -> str:
        """The source text of a node."""
        return self.source[node["Pos"]["Offset"] : node["End"]["Offset"]].decode(errors="replace")

    def line_of(self, node: Node) -> int:
        """The line of the file where a node begins."""
        return self.line_at(node["Pos"]["Line"])

    def line_at(self, line: int) -> int:
        """The line of the file for a line of this text."""
        return self.line_offset + (1 if self.on_one_line else line)

    def offset_of(self, node: Node) -> int:
        """The offset in the script of a node, or of the command whose text contains it."""
        return int(node["Pos"]["Offset"]) if self.offset is None else self.offset

    def plain(self, word: Node) -> str:
        """A literal word without quotes; any other word as written."""
        text = ""
        for part in word.get("Parts", []):
            pieces = part.get("Parts", []) if part["Type"] == "DblQuoted" else [part]
            if any(piece["Type"] not in ("Lit", "SglQuoted") for piece in pieces):
                return self.text_of(word)
            text += "".join(piece.get("Value", "") for piece in pieces)
        return text

    def fields(self, node: Node) -> tuple[Word, ...]:
        """The words to which one word of a command expands: none, one, or several."""
        parts = node.get("Parts", [])
        if len(parts) == 1 and not self.doubts and _is_plain(parts[0]):
            # most words are this simple
            text, source = parts[0]["Value"], self.text_of(node)
            return (Word(text=text, known=True, line=self.line_of(node), source=source),)
        items = self._array_words(node)
        if items is not None:
            return items
        pieces = self._begin(node)
        groups = [_without_patterns(group) for group in _split(pieces)]
        if len(groups) > 1 and not self.budget.allows("" for _ in groups):
            groups = [[Piece(self.text_of(node), known=False)]]
        return tuple(self._word(node, group) for group in groups)

    def single(self, node: Node) -> Word:
        """The word of an assignment or redirection, which is not split."""
        return self._word(node, self._begin(node, splits=False))

    def here_document(self, redirection: Node) -> tuple[str, Ranges | None]:
        """The text of a <<EOF as written, and where bash expands it; None if its delimiter is quoted."""
        body = redirection["Hdoc"]
        text = self.text_of(body).rpartition("\n")[0]
        delimiter = redirection["Word"].get("Parts", [])
        is_quoted = any(part["Type"] != "Lit" or "\\" in part["Value"] for part in delimiter)
        return (text, None) if is_quoted else _unescaped_here(text)

    def scalar(self, node: Node) -> Variable:
        """The value of a variable after an assignment of this word."""
        pieces = tuple(replace(piece, quoted=False) for piece in self._begin(node, splits=False))
        return Variable(pieces=bounded(pieces), assumed=self._assumed)

    def arithmetic(self, node: Node) -> int | None:
        """The value of an arithmetic expression of known numbers; None if one is unknown."""
        try:
            return value_of(node, self._number)
        except Refused:
            return None

    def certain_arithmetic(self, node: Node) -> int | None:
        """The value of an arithmetic expression of numbers that can decide a condition; None otherwise."""
        self._certain, self._assumed = True, False
        value = self.arithmetic(node)
        return value if self._certain and (self.trusts_defaults or not self._assumed) else None

    def decides(self, word: Word) -> bool:
        """True if a condition on this word can be resolved."""
        return word.known and word.certain and (self.trusts_defaults or not word.assumed)

    def _begin(self, node: Node, *, splits: bool = True) -> list[Piece]:
        self._used, self._assumed, self._splits = [], False, splits
        pieces = _bounded_list(self._parts(node.get("Parts", []), quoted=False))
        return list(weak_pieces(pieces)) if self._is_uncertain(node) else pieces

    def _is_uncertain(self, node: Node) -> bool:
        start, end = node["Pos"]["Offset"], node["End"]["Offset"]
        return any(first < end and start < last for first, last in self.doubts)

    def _word(self, node: Node, pieces: Iterable[Piece]) -> Word:
        pieces = list(pieces)
        ends = list(itertools.accumulate((len(piece.text) for piece in pieces), initial=0))
        placed = list(zip(pieces, itertools.pairwise(ends), strict=True))
        return Word(
            text="".join(piece.text for piece in pieces),
            known=all(piece.known for piece in pieces),
            line=self.line_of(node),
            source=self.text_of(node),
            variables=tuple(dict.fromkeys(self._used)),
            certain=all(piece.certain for piece in pieces),
            assumed=self._assumed,
            doubts=tuple(place for piece, place in placed if not piece.certain),
            unknowns=unknown_of(pieces),
            exclusive=any(piece.exclusive for piece in pieces),
        )

    def _array_words(self, node: Node) -> tuple[Word, ...] | None:
        """The words of "${name[@]}" if the script sets the array; None otherwise."""
        parts = node.get("Parts", [])
        quoted = len(parts) == 1 and parts[0]["Type"] == "DblQuoted"
        if quoted:
            parts = parts[0].get("Parts", [])
        if len(parts) != 1 or not _is_all_items(parts[0]):
            return None
        if quoted and "*" in self.text_of(parts[0]["Index"]):
            return None  # one word
        variable = self.variables.get(parts[0]["Param"]["Value"])
        if variable is None or variable.items is None:
            return None
        if not self.budget.allows(item.text for item in variable.items):
            return None
        items = variable.items if quoted else tuple(_resplit(variable.items))
        if self._is_uncertain(node):
            items = tuple(replace(item, certain=False) for item in items)
        return items[:MAX_WORDS]

    def _parts(self, parts: list[Node], *, quoted: bool) -> Iterator[Piece]:
        is_list = LAYERS.fullmatch("".join(part["Value"] if part["Type"] == "Lit" else "$" for part in parts))
        for previous, part in zip([{}, *parts], parts, strict=False):
            kind = part["Type"]
            if kind == "Lit":
                before = "=" if previous.get("Value", "").endswith("=") else ""  # shfmt splits key=[a,b]
                is_plain = quoted or is_list is not None or not EXPANDED.search(before + part["Value"])
                for literal, is_text in self._unmasked(part):
                    text = _unescape(literal, quoted=quoted)
                    yield Piece(text, known=is_plain and is_text, quoted=quoted or "\\" in literal)
            elif kind == "SglQuoted":
                for text, is_text in self._unmasked(part):
                    is_text = is_text and not self._was_expanded(part)
                    # _ansi_c does not decode these escapes
                    known = is_text and not (part.get("Dollar") and re.search(r"\\[xuUc0-7]", text))
                    yield Piece(_ansi_c(text) if part.get("Dollar") else text, known=known, quoted=True)
            elif kind == "DblQuoted":
                yield Piece("", quoted=True)  # "" alone is a word too
                yield from self._parts(part.get("Parts", []), quoted=True)
            elif self._was_expanded(part):
                # another shell has put its own value here
                self._used += names_in(part)
                yield Piece(self.text_of(part), known=False, quoted=quoted)
            elif kind == "ParamExp":
                yield from self._parameter(part, quoted=quoted)
            elif kind == "ArithmExp" and (value := self._arithmetic(part.get("X"))) is not None:
                yield Piece(str(value), quoted=quoted, certain=self._certain)
            else:
                self._used += names_in(part)
                yield Piece(self.text_of(part), known=False, quoted=quoted)

    def has_run(self, substitution: Node) -> bool:
        """True if the shell that expanded the text has already run this $( )."""
        start = substitution["Pos"]["Offset"]
        return any(first <= start < last for first, last in self.expanded)

    def _was_expanded(self, part: Node) -> bool:
        """True if a different shell has expanded something in a part, so that only a run can tell its text."""
        start, end = part["Pos"]["Offset"], part["End"]["Offset"]
        return any(
            re.search(rb"[$`]", self.source[max(first, start) : min(last, end)])
            for first, last in self.expanded
        )

    def _unmasked(self, part: Node) -> list[tuple[str, bool]]:
        """The pieces of a part's text, each with True if it is known. Placeholders are unknown."""
        value = part.get("Value", "")
        return parts(value, self.text_of(part), self.places) if MASK.search(value) else [(value, True)]

    def _arithmetic(self, node: Node) -> int | None:
        self._certain = True
        return self.arithmetic(node)

    def _parameter(self, part: Node, *, quoted: bool) -> Iterator[Piece]:
        name = part["Param"]["Value"] if part.get("Param") else ""
        self._used.append(name)
        variable = self.variables.get(name)
        plain = not (part.keys() & {"Excl", "Length", "Width", "Slice", "Repl", "Names"})
        operator = part.get("Exp", {}).get("Op", "")
        unknown = Piece(self.text_of(part), known=False, quoted=quoted)
        if _is_all_items(part) and variable is not None and variable.items is not None:
            if not self.budget.allows(item.text for item in variable.items):
                yield unknown
                return
            yield from self._joined(part, variable.items, quoted=quoted)
        elif (replaced := self._replaced(part, variable)) is not None:
            yield from (replace(piece, quoted=quoted) for piece in replaced)
        elif not plain or (part.get("Index") and not _is_all_items(part)):
            self._used += names_in(part)
            yield unknown
        elif operator in ("", ":?", "?"):  # with ?, an unset variable ends the script
            yield from self._value(variable, unknown, quoted=quoted)
        elif operator in (":-", "-", ":=", "="):
            if variable is not None and any(piece.text for piece in variable.first):
                yield from self._value(variable, unknown, quoted=quoted)
                return
            if name in _JOB_IDS or (self.trusts_defaults and name.startswith("SLURM_")):
                yield unknown  # Slurm sets it in every job
                return
            default = part["Exp"].get("Word") or {}
            pieces = bounded(tuple(self._parts(default.get("Parts", []), quoted=quoted)))
            if operator in (":=", "="):
                self.on_default(name, Variable(pieces=pieces, assumed=True))
            self._assumed = True  # the shell that submits the job may export another value
            yield from pieces
        else:
            self._used += names_in(part)
            yield unknown

    def _replaced(self, part: Node, variable: Variable | None) -> tuple[Piece, ...] | None:
        """The value of ${name/a/b} or ${name//a/b} if name is known, and a and b are plain text."""
        change = part.get("Repl")
        others = part.keys() & {"Excl", "Length", "Width", "Slice", "Names", "Index", "Exp"}
        if not change or others or variable is None or variable.items is not None:
            return None
        old, new = (self._plain_text(change.get(side)) for side in ("Orig", "With"))
        if not old or new is None or not all(piece.known for piece in variable.first):
            return None
        text = "".join(piece.text for piece in variable.first)
        self._assumed = self._assumed or variable.assumed
        certain = all(piece.certain for piece in variable.first)
        return (Piece(text.replace(old, new, -1 if change.get("All") else 1), certain=certain),)

    def _plain_text(self, node: Node) -> str | None:
        """The text of a word of letters, digits and _.,:-; None for other words."""
        text = self.text_of(node) if node else ""
        return text if re.fullmatch(r"[\w.,:-]*", text, re.ASCII) else None

    def _joined(self, part: Node, items: tuple[Word, ...], *, quoted: bool) -> Iterator[Piece]:
        """The pieces of an array within a longer word: one string for ${name[*]}, several words for ${name[@]}."""
        is_text = not self._splits or len(items) < 2 or (quoted and "*" in self.text_of(part["Index"]))
        self._assumed = self._assumed or any(item.assumed for item in items)
        length = 0
        for index, item in enumerate(items):
            length += len(item.text) + 1
            if length > MAX_LENGTH:
                yield Piece("...", known=False)
                return
            if index:
                yield Piece(" ", known=is_text, quoted=quoted, certain=item.certain)
            yield from (
                replace(piece, known=is_text and piece.known, quoted=quoted) for piece in pieces_of(item)
            )

    def _value(self, variable: Variable | None, unknown: Piece, *, quoted: bool) -> Iterator[Piece]:
        if variable is None or not self.budget.allows(piece.text for piece in variable.first):
            yield unknown
            return
        self._assumed = self._assumed or variable.assumed
        for piece in variable.first:
            yield replace(piece, quoted=quoted)

    def _number(self, node: Node) -> int | None:
        """The value of a word in an arithmetic expression: a number, or a variable with or without `$`."""
        pieces = tuple(self._parts(node.get("Parts", []), quoted=True))
        text = "".join(piece.text for piece in pieces).strip()
        if re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII):
            self._used.append(text)
            variable = self.variables.get(text)
            pieces = tuple(self._value(variable, Piece(text, known=False), quoted=True))
            text = "".join(piece.text for piece in pieces).strip()
        self._certain = self._certain and all(piece.certain for piece in pieces)
        if all(piece.known for piece in pieces) and re.fullmatch(r"\d{1,15}", text, re.ASCII):
            return int(text)
        return None


class AsWritten(Expander):
    """Leaves words as written, for a reader that needs no values."""

    def fields(self, node: Node) -> tuple[Word, ...]:
        """The word as written."""
        return (self.single(node),)

    def single(self, node: Node) -> Word:
        """The word as written."""
        text = self.text_of(node)
        return Word(text=text, known=False, line=self.line_of(node), source=text)

    def scalar(self, node: Node) -> Variable:
        """An unknown value."""
        return Variable(pieces=(Piece(self.text_of(node), known=False),))

    def arithmetic(self, node: Node) -> int | None:
        """No number, because no variable is known."""
        return None


def _is_plain(part: Node) -> bool:
    """True if a part of a word is text in which nothing is expanded."""
    text = part.get("Value", "")
    return part["Type"] == "Lit" and _PLAIN.fullmatch(text) is not None and not MASK.search(text)


def _is_all_items(part: Node) -> bool:
    """True if a part is ${name[@]} or ${name[*]} without any operator."""
    if part["Type"] != "ParamExp" or not part.get("Index") or not part.get("Param"):
        return False
    if part.keys() & {"Excl", "Length", "Width", "Slice", "Repl", "Exp", "Names"}:
        return False
    literals = [inner.get("Value") for inner in part["Index"].get("Parts", [])]
    return literals in (["@"], ["*"])


def _bounded_list(pieces: Iterable[Piece]) -> list[Piece]:
    return list(bounded(tuple(pieces)))


def _split(pieces: list[Piece]) -> list[list[Piece]]:
    """Splits words at blanks that are neither quoted nor in unknown text."""
    groups: list[list[Piece]] = []
    open_group = False
    for piece in pieces:
        is_unsplit = piece.quoted or not piece.known
        for text in [piece.text] if is_unsplit else re.split(f"([{BLANKS}]+)", piece.text):
            if not is_unsplit and not text.strip(BLANKS):
                open_group = open_group and not text
            elif open_group:
                groups[-1].append(replace(piece, text=text))
            else:
                groups.append([replace(piece, text=text)])
                open_group = True
    return groups


def _without_patterns(pieces: list[Piece]) -> list[Piece]:
    """A word whose patterns are unknown, because the shell replaces them by files."""
    if LAYERS.fullmatch("".join(piece.text for piece in pieces).strip("()")):
        return pieces
    return [
        replace(piece, known=piece.known and (piece.quoted or not PATTERN.search(piece.text)))
        for piece in pieces
    ]


def _resplit(items: Iterable[Word]) -> Iterator[Word]:
    """The words of an unquoted array expansion, which are split at blanks."""
    for item in items:
        pattern = rf"(?:\$\([^)]*\)|[^{BLANKS}])+" if not item.known else f"[^{BLANKS}]+"
        for found in re.finditer(pattern, item.text):
            inside = [
                (max(first, found.start()) - found.start(), min(last, found.end()) - found.start())
                for first, last in unknown_ranges(item)
                if first < found.end() and found.start() < last
            ]
            text = found[0]
            is_item = text == item.text
            yield replace(
                item,
                text=text,
                known=item.known or not (inside if item.unknowns else UNKNOWN.search(text)),
                unknowns=tuple(inside),
                doubts=item.doubts if is_item else (),
                source=item.source if is_item else text,
            )


def _unescape(text: str, *, quoted: bool) -> str:
    if "\\" not in text:
        return text
    text = text.replace("\\\n", "")
    return re.sub(r'\\([$`"\\])' if quoted else r"\\(.)", r"\1", text, flags=re.DOTALL)


def _unescaped_here(text: str) -> tuple[str, Ranges]:
    """The text of a here-document without the backslashes that bash removes, and where bash expands it."""
    found = ""
    expanded: list[tuple[int, int]] = []
    for part in re.findall(r"\\[$`\\\n]|[$`]|[^\\$`]+|\\", text):
        if part in ("$", "`"):
            expanded.append((len(found), len(found) + 1))
        found += part[1:] if len(part) == 2 and part[0] == "\\" else part
    return found, tuple(expanded)


_ANSI_C = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b", "f": "\f", "v": "\v"}


def _ansi_c(text: str) -> str:
    """The text of $'...' with one-letter escapes replaced."""
    return re.sub(r"\\(.)", lambda found: _ANSI_C.get(found[1], found[1]), text, flags=re.DOTALL)
