"""Computes what a word of a script becomes in a sample job: its ports, its hosts."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpcgen.check.lint.arithmetic import Refused, remainder, value_of
from hpcgen.check.lint.filters import FILTERS, Call, Unknown, compiled, counts_characters
from hpcgen.check.lint.script import Script
from hpcgen.check.lint.syntax import Node, ShellSyntaxError, parse
from hpcgen.check.lint.words import Word

MAX_RANDOM = 32767
"""The maximum value of $RANDOM (man bash)."""
MAX_DEPTH = 20
"""Maximum depth of variables that refer to each other."""
MAX_STEPS = 50_000
"""Maximum number of parts of words that a rule computes for its samples."""
MAX_TEXT = 10_000
"""Maximum number of characters of a computed text. No port or host is as long."""

_READ = r"(?:\bIFS=(\S+)\s+)?\b(?:read|mapfile|readarray)\s+"
"""The start of a command that reads variables, with their separators."""
_MAX_LINE = 1000
"""Maximum length of a line in which `read` and `for` are found."""


@dataclass
class Effort:
    """The steps that a rule has used for its samples. Variables that refer to each other can need exponential time."""

    steps: int = 0
    draws: int = 0
    """Number of random numbers drawn so far: $RANDOM, shuf."""

    def step(self) -> None:
        """Counts one step.

        Raises:
            Unknown: there were too many.
        """
        self.steps += 1
        if self.steps > MAX_STEPS:
            raise Unknown


@dataclass(frozen=True)
class Sample:
    """A job in which a script could run."""

    script: Script
    environment: Mapping[str, str]
    greatest: bool = False
    """True if random and unknown numbers have their maximum instead of their minimum."""
    is_cut_by_position: bool = True
    """False if the values in `environment` only show the form, so that characters cannot be counted."""
    depth: int = field(default=0, compare=False)
    effort: Effort = field(default_factory=Effort, compare=False)

    def text(self, source: str) -> str:
        """The text that the source of a word becomes.

        Raises:
            Unknown: only a run can tell.
            Refused: the shell stops with an error.
        """
        return self._parts(_parsed(source))

    def text_after_colon(self, source: str) -> str:
        """The text after the last colon of host:port, where the host may be unknown."""
        parts = list(_parsed(source))
        while parts and not (parts[-1]["Type"] == "Lit" and ":" in parts[-1]["Value"]):
            parts.pop()
        literal = parts[-1]["Value"].rpartition(":")[2] if parts else ""
        return literal + self._parts(_parsed(source)[len(parts) :])

    def text_before_colon(self, source: str) -> str:
        """The text before the first colon of host:port, where the port may be unknown."""
        found = ""
        for part in _parsed(source):
            if part["Type"] == "Lit" and ":" in part["Value"]:
                return found + str(part["Value"]).partition(":")[0]
            found += self._parts([part])
        return found

    # ---- words ----

    def _parts(self, parts: Sequence[Node], *, quoted: bool = True) -> str:
        text = "".join(self._part(part, quoted=quoted) for part in parts)
        if len(text) > MAX_TEXT:
            raise Unknown
        return text

    def _word(self, node: Node) -> str:
        return self._parts(node.get("Parts", []), quoted=False)

    def _part(self, part: Node, *, quoted: bool) -> str:
        self.effort.step()
        kind = part["Type"]
        if kind == "Lit":
            return re.sub(r"\\([$`\"\\])" if quoted else r"\\(.)", r"\1", part["Value"])
        if kind == "SglQuoted":
            return str(part.get("Value", ""))
        if kind == "DblQuoted":
            return self._parts(part.get("Parts", []))
        if kind == "ParamExp":
            return self._parameter(part)
        if kind == "ArithmExp":
            return str(self._number(part.get("X")))
        if kind in ("CmdSubst", "ProcSubst"):
            return self._output(part.get("Stmts", []), "").rstrip("\n")
        raise Unknown

    def _parameter(self, part: Node) -> str:
        name = part["Param"]["Value"] if part.get("Param") else ""
        if part.keys() & {"Excl", "Width", "Names"} or not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            raise Unknown
        if "Exp" in part and part["Exp"]["Op"] in (":-", "-", ":=", "="):
            if name not in self.environment:
                return self._word(part["Exp"].get("Word") or {})
            return self._value(name, part.get("Index"))
        value = self._value(name, part.get("Index"))
        if part.get("Length"):
            return str(len(value))
        if "Slice" in part:
            return self._slice(value, part["Slice"])
        if "Repl" in part:
            change = part["Repl"]
            return self._replaced(value, change.get("Orig"), change.get("With"), all=bool(change.get("All")))
        if "Exp" in part:
            return self._stripped(value, part["Exp"]["Op"], self._pattern(part["Exp"].get("Word")))
        return value

    def _value(self, name: str, index: Node | None) -> str:
        if name == "RANDOM":
            self.effort.draws += 1
            return str(MAX_RANDOM if self.greatest else 0)
        if name in self.environment and index is None:
            return self.environment[name]
        settings = self.script.assignments_by_name.get(name, ())
        if not settings:
            return self._read(name, 0 if index is None else self._number(index))
        if len(settings) != 1 or settings[0].append or settings[0].loop or self.depth > MAX_DEPTH:
            raise Unknown
        inner = replace(self, depth=self.depth + 1)
        if settings[0].items is not None:
            items = [text for word in settings[0].items for text in inner._fields(word)]
            at = 0 if index is None else self._number(index)
            if not -len(items) <= at < len(items):
                raise Unknown
            return items[at]
        if settings[0].value is None or index is not None:
            raise Unknown
        return inner.text(settings[0].value.text)

    def _read(self, name: str, index: int) -> str:
        """The value of a variable that `read` takes from a here-string, or its first one in a `for` loop."""
        loops, reads = _loops_and_reads(self.script.lines, name)
        if len(loops) + len(reads) != 1 or self.depth > MAX_DEPTH:
            raise Unknown
        inner = replace(self, depth=self.depth + 1)
        if loops:
            return [*inner.text(loops[0].strip('"')).split(), ""][0]
        separators, source = (text.strip("\"'") for text in reads[0])
        items = re.split(f"[{re.escape(separators)}]" if separators else r"\s+", inner.text(source))
        if not -len(items) <= index < len(items):
            raise Unknown
        return items[index]

    def _fields(self, word: Word) -> list[str]:
        text = self.text(word.text)
        return [text] if word.source.startswith('"') else text.split()

    def _slice(self, value: str, part: Node) -> str:
        self._counts_characters()
        start = self._number(part.get("Offset")) if part.get("Offset") else 0
        start = start + len(value) if start < 0 else start
        if not 0 <= start <= len(value):
            return ""
        length = self._number(part["Length"]) if part.get("Length") else len(value)
        return value[start : start + length] if length >= 0 else value[start:length]

    def _counts_characters(self) -> None:
        if not self.is_cut_by_position:
            raise Unknown

    def _pattern(self, node: Node | None) -> str:
        """A shell pattern as a regular expression."""
        return _expression(self._word(node) if node else "")

    def _stripped(self, value: str, operator: str, pattern: str) -> str:
        cuts = {
            "#": (range(len(value) + 1), True),
            "##": (range(len(value), -1, -1), True),
            "%": (range(len(value), -1, -1), False),
            "%%": (range(len(value) + 1), False),
        }
        if operator not in cuts:
            raise Unknown
        places, is_prefix = cuts[operator]
        for at in places:
            cut, kept = (value[:at], value[at:]) if is_prefix else (value[at:], value[:at])
            if compiled(pattern, cut).fullmatch(cut):
                return kept
        return value

    def _replaced(self, value: str, old: Node | None, new: Node | None, *, all: bool) -> str:
        pattern, text = self._pattern(old), self._word(new) if new else ""
        if not pattern or pattern.startswith(("/", "%", "#")):
            raise Unknown
        return compiled(pattern, value).sub(lambda found: text, value, count=0 if all else 1)

    # ---- arithmetic ----

    def _number(self, node: Node) -> int:
        self.effort.step()
        value = value_of(node, lambda word: self._integer(self._word(word)), {"%": self._remainder})
        if value is None:
            raise Unknown
        return value

    def _remainder(self, node: Node) -> int:
        divisor = self._number(node["Y"])
        draws = self.effort.draws
        try:
            value = self._number(node["X"])
        except Unknown:
            return abs(divisor) - 1 if self.greatest else 0
        if self.effort.draws > draws:
            return min(value, abs(divisor) - 1)  # the greatest number may have a small remainder
        return remainder(value, divisor)

    def _integer(self, text: str) -> int:
        """The value of a word in an arithmetic expression: a number in bash's notation, or a variable."""
        text = text.strip()
        if re.fullmatch(r"[A-Za-z_]\w*", text, re.ASCII):
            return self._integer(self._value(text, None))
        if not re.fullmatch(r"0[xX][\da-fA-F]+|\d+(#\w+)?|", text, re.ASCII):
            raise Unknown
        base, sharp, digits = text.partition("#")
        if not sharp:
            digits = text.lstrip("0") or "0"
            base = "8" if len(text) > 1 and text[0] == "0" else "10"
            base, digits = ("16", digits[1:]) if digits[0] in "xX" else (base, digits)
        try:
            return int(digits, int(base))
        except ValueError:
            raise Refused(f"bash takes {text} for an octal number, and stops") from None

    # ---- commands ----

    def _output(self, statements: Sequence[Node], given: str) -> str:
        if len(statements) != 1 or statements[0].get("Negated"):
            raise Unknown
        [statement] = statements
        command = statement.get("Cmd") or {}
        for redirection in statement.get("Redirs", []):
            if redirection["Op"] == "<<<":
                given = self._word(redirection["Word"]) + "\n"
            elif redirection["Op"] not in (">", ">>", ">&", "2>"):
                raise Unknown
        if command.get("Type") == "BinaryCmd" and command["Op"] == "|":
            return self._output([command["Y"]], self._output([command["X"]], given))
        if command.get("Type") != "CallExpr" or command.get("Assigns"):
            raise Unknown
        words = [self._word(argument) for argument in command.get("Args", [])]
        name = words[0].rpartition("/")[2] if words else ""
        if name not in FILTERS:
            raise Unknown
        if counts_characters(name, words[1:]):
            self._counts_characters()
        if name == "shuf" or "rand" in " ".join(words):
            self.effort.draws += 1
        return FILTERS[name](Call(words[1:], given, self.greatest, self.environment))


@functools.lru_cache(maxsize=64)
def _loops_and_reads(lines: Sequence[str], name: str) -> tuple[list[str], list[tuple[str, str]]]:
    """The lists of the loops over a variable, and separators and here-strings of the commands that read it."""
    text = "\n".join(line for line in lines if len(line) <= _MAX_LINE and not line.lstrip().startswith("#"))
    loops = re.findall(rf"\bfor\s+{name}\s+in\s+([^;\n]+?)\s*(?:;|\n)", text)
    reads = re.findall(rf"{_READ}[^\n<]*\b{name}\b[^\n<]*<<<\s*(\"[^\"\n]*\"|[^\s;]+)", text)
    return loops, reads


@functools.lru_cache(maxsize=512)
def _parsed(source: str) -> Sequence[Node]:
    """The parts of a word.

    Raises:
        Unknown: it cannot be parsed.
    """
    try:
        tree, _ = parse(f'x="{source}"\n')
        [part] = tree["Stmts"][0]["Cmd"]["Assigns"][0]["Value"]["Parts"]
    except (ShellSyntaxError, ValueError, KeyError, IndexError):
        raise Unknown from None
    return tuple(part.get("Parts", ()))


def _expression(pattern: str) -> str:
    """The regular expression of a shell pattern."""
    found = re.sub(r"[.^$+{}()|\\]", lambda match: f"\\{match[0]}", pattern)
    return (
        re.sub(r"(?<!\\)[*?]", lambda match: ".*" if match[0] == "*" else ".", found)
        .replace("[!", "[^")
        .replace("[\\^", "[^")
    )
