"""Computes what small programs print: expr, cut, tail, awk and others that scripts use for ports and host names."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from hpcgen.check.lint.arithmetic import Refused, divided, remainder


class Unknown(Exception):
    """Only a run can tell what is printed."""


@dataclass(frozen=True)
class Call:
    """A call of a program."""

    arguments: Sequence[str]
    given: str
    """Its standard input."""
    greatest: bool
    """True if a random choice is the last one instead of the first."""
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def lines(self) -> list[str]:
        """The lines of standard input."""
        return self.given.removesuffix("\n").split("\n")

    def option(self, *names: str) -> str | None:
        """The value of an option such as -f1 or -f 1."""
        for index, text in enumerate(self.arguments):
            for name in names:
                if text == name:
                    return self.arguments[index + 1] if index + 1 < len(self.arguments) else ""
                if text.startswith(f"{name}=" if name.startswith("--") else name):
                    return text.removeprefix(name).removeprefix("=")
        return None


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: divided, ast.Mod: remainder,
}  # fmt: skip


def calculated(expression: str) -> int:
    """The value of an expression of decimal numbers, as expr, bc, awk and Python compute it."""
    if not re.fullmatch(r"[\d\s+*/%()-]{1,200}", expression, re.ASCII):
        raise Unknown
    try:
        return _calculated(ast.parse(re.sub(r"\b0+(?=\d)", "", expression).strip(), mode="eval").body)
    except SyntaxError:
        raise Unknown from None


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_calculated(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise Unknown


_MAX_MATCHED = 100
"""Maximum length of a text that a regular expression is matched with."""
_MAX_CHOICES = 3
"""Maximum number of repetitions and alternatives in a regular expression. Matching can need a power of it."""


def compiled(pattern: str, *texts: str) -> re.Pattern[str]:
    """A regular expression for some texts.

    Raises:
        Unknown: it is not one of Python's, or matching could take long.
    """
    if any(len(text) > _MAX_MATCHED for text in texts):
        raise Unknown
    if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+?{|]", pattern)) > _MAX_CHOICES:
        raise Unknown
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error:
        raise Unknown from None


def _echo(call: Call) -> str:
    words = list(call.arguments)
    flags = words.pop(0) if words and re.fullmatch("-[neE]+", words[0]) else ""
    if "e" in flags and any("\\" in word for word in words):
        raise Unknown
    return " ".join(words) + ("" if "n" in flags else "\n")


def _printf(call: Call) -> str:
    if not call.arguments:
        raise Unknown
    rest = list(call.arguments[1:])

    def value(found: re.Match[str]) -> str:
        text, width = rest.pop(0) if rest else "", found[2]
        is_number = found[3] != "s"
        if len(width) > 3 or (is_number and not re.fullmatch(r"0|[1-9]\d*", text, re.ASCII)):
            raise Unknown
        return text.rjust(int(width or 0), "0" if found[1] and is_number else " ")

    directive = r"%(0?)(\d*)([sdiu])"
    if rest and "%" in re.sub(directive, "", call.arguments[0]):
        raise Unknown
    text = re.sub(directive, value, call.arguments[0])
    if rest:
        raise Unknown  # printf repeats the format
    return text.replace("\\n", "\n")


def _expr(call: Call) -> str:
    for text in call.arguments:
        if not re.fullmatch(r"-?\d+|[+*/%()-]", text, re.ASCII):
            raise Unknown
    return f"{calculated(' '.join(call.arguments))}\n"


def _ranges(text: str) -> Callable[[int], bool]:
    """True for the positions in a list such as 1-4,7-."""
    ranges = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{0,9})(-?)(\d{0,9})", part, re.ASCII)
        if not found or not part.strip("-"):
            raise Unknown
        first = int(found[1] or 1)
        ranges.append((first, int(found[3]) if found[3] else 10**9 if found[2] else first))
    return lambda at: any(first <= at <= last for first, last in ranges)


def _cut(call: Call) -> str:
    if "--complement" in call.arguments:
        raise Unknown
    characters, fields = call.option("-c", "--characters", "-b", "--bytes"), call.option("-f", "--fields")
    if characters:
        chosen = _ranges(characters)
        lines = ["".join(letter for at, letter in enumerate(line, 1) if chosen(at)) for line in call.lines]
    elif fields:
        chosen, separator = _ranges(fields), call.option("-d", "--delimiter") or "\t"
        lines = [
            separator.join(part for at, part in enumerate(line.split(separator), 1) if chosen(at))
            if separator in line
            else line
            for line in call.lines
        ]
    else:
        raise Unknown
    return "\n".join(lines) + "\n"


def _amount(call: Call) -> tuple[str, str]:
    """The unit ("c" or "n") and the count of head and tail."""
    for name in ("c", "n"):
        if (count := call.option(f"-{name}", "--bytes" if name == "c" else "--lines")) is not None:
            break
    else:
        name, count = "n", next((text[1:] for text in call.arguments if re.fullmatch(r"-\d+", text)), "10")
    if not re.fullmatch(r"[+-]?\d{1,9}", count, re.ASCII):
        raise Unknown
    if _ELLIPSIS in call.lines and count.strip("+-") != "1":
        raise Unknown
    return name, count


def _head(call: Call) -> str:
    unit, count = _amount(call)
    if unit == "c":
        return call.given[: int(count)]
    return "\n".join(call.lines[: int(count)]) + "\n"


def _tail(call: Call) -> str:
    unit, count = _amount(call)
    items: Sequence[str] = call.given if unit == "c" else call.lines
    number = abs(int(count))
    kept = items[max(number - 1, 0) :] if count.startswith("+") else items[max(len(items) - number, 0) :]
    return "".join(kept) if unit == "c" else "\n".join(kept) + "\n"


_CLASSES = {"[:digit:]": "0-9", "[:alpha:]": "A-Za-z", "[:space:]": " \n\t", "[:blank:]": " \t"}


def _set(text: str) -> str:
    """The characters of a set of tr."""
    for name, characters in _CLASSES.items():
        text = text.replace(name, characters)
    text = text.replace("\\n", "\n").replace("\\t", "\t").replace("\\", "")
    if not text.isascii():
        raise Unknown
    return re.sub(r"(.)-(.)", lambda found: "".join(map(chr, range(ord(found[1]), ord(found[2]) + 1))), text)


def _tr(call: Call) -> str:
    flags = "".join(text[1:] for text in call.arguments if re.fullmatch("-[cCds]+", text))
    sets = [_set(text) for text in call.arguments if not re.fullmatch("-[cCds]+", text)]
    if "s" in flags or not sets:
        raise Unknown
    if "d" in flags:
        keeps = "c" in flags.lower()
        return "".join(letter for letter in call.given if (letter in sets[0]) == keeps)
    if flags or len(sets) != 2 or not sets[1]:
        raise Unknown
    return call.given.translate(
        {ord(old): sets[1][min(at, len(sets[1]) - 1)] for at, old in enumerate(sets[0])}
    )


def _sed(call: Call) -> str:
    texts = [text for text in call.arguments if not re.fullmatch("-[eEr]+", text)]
    extended = any(re.fullmatch("-[eEr]*[Er][eEr]*", text) for text in call.arguments)
    if not texts or any(text.startswith("-") for text in texts):
        raise Unknown
    lines = call.lines
    for text in texts:
        for command in text.split(";"):
            found = re.fullmatch(r"\s*s([/|,#:@])((?:(?!\1).)*)\1((?:(?!\1).)*)\1(g?)\s*", command)
            if not found:
                raise Unknown
            pattern = compiled(_from_posix(found[2], extended=extended), *lines)
            if re.search(r"&|\\[^n\d]|\\\d\d", found[3]) or _last_group(found[3]) > pattern.groups:
                raise Unknown
            new = re.sub(r"\\n", "\n", found[3])
            lines = [pattern.sub(new, line, count=0 if found[4] else 1) for line in lines]
    return "\n".join(lines) + "\n"


def _last_group(replacement: str) -> int:
    return max(map(int, re.findall(r"\\(\d)", replacement)), default=0)


def _grep(call: Call) -> str:
    flags = "".join(text[1:] for text in call.arguments if re.fullmatch("-[oEPe]+", text))
    texts = [text for text in call.arguments if not re.fullmatch("-[oEPe]+", text)]
    if "o" not in flags or len(texts) != 1 or "P" in flags:
        raise Unknown
    pattern = compiled(_from_posix(texts[0], extended="E" in flags), *call.lines)
    return "".join(f"{found[0]}\n" for line in call.lines for found in pattern.finditer(line) if found[0])


def _from_posix(pattern: str, *, extended: bool) -> str:
    """Converts a basic or extended POSIX regular expression to Python's syntax."""
    found, at = "", 0
    while at < len(pattern):
        bracket = re.match(r"\[(\^?)(\]?[^\]]*)\]", pattern[at:])
        if bracket:
            inner = bracket[2].replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
            found, at = f"{found}[{bracket[1]}{inner}]", at + bracket.end()
        elif pattern[at] == "\\" and at + 1 < len(pattern):
            letter = pattern[at + 1]
            found, at = found + (letter if letter in "(){}+?|" and not extended else f"\\{letter}"), at + 2
        else:
            letter = pattern[at]
            found, at = found + (f"\\{letter}" if letter in "(){}+?|" and not extended else letter), at + 1
    return found


_AWK = re.compile(r"\s*(BEGIN|NR\s*==?\s*1)?\s*\{\s*print\s*\(?(.*?)\)?;?\s*(?:exit;?)?\s*\}\s*")


def _awk(call: Call) -> str:
    separator = call.option("-F")
    given = dict(
        text.split("=", 1) for text in call.arguments if re.fullmatch(r"[A-Za-z]\w*=\d+", text, re.ASCII)
    )
    others = {separator, *(f"{name}={value}" for name, value in given.items())}
    texts = [text for text in call.arguments if not text.startswith("-") and text not in others]
    program = _AWK.fullmatch(texts[0]) if texts else None
    if not program:
        raise Unknown
    lines = [""] if program[1] == "BEGIN" else call.lines[:1] if program[1] else call.lines
    return "".join(f"{_printed_by_awk(_with_values(program[2], given), line, separator)}\n" for line in lines)


def _with_values(expression: str, values: Mapping[str, str]) -> str:
    """An expression of awk with the variables of -v."""
    return re.sub(r"(?<![$\w])[A-Za-z]\w*", lambda found: values.get(found[0], found[0]), expression)


def _printed_by_awk(expression: str, line: str, separator: str | None) -> str:
    is_pattern = separator is not None and len(separator) > 1
    fields = compiled(separator or "", line).split(line) if is_pattern else line.split(separator or None)
    values = {"0": line, "NF": (fields or [""])[-1], **{str(at): value for at, value in enumerate(fields, 1)}}

    def value(found: re.Match[str]) -> str:
        return values.get(found[1], "")

    if re.fullmatch(r"\$(\d+|NF)", expression):
        return re.sub(r"\$(\d+|NF)", value, expression)
    if found := re.fullmatch(r"substr\(\$0,\s*([1-9]\d{0,8})(?:,\s*(\d+))?\)?", expression):
        start = int(found[1]) - 1
        return line[start:][: int(found[2])] if found[2] else line[start:]
    if "/" in expression:
        raise Unknown  # a fraction
    return str(calculated(re.sub(r"\$(\d+|NF)", value, expression)))


_READ_BY_PYTHON = r"""(?:os\.)?(?:environ(?:\.get\(|\[)|getenv\()\s*["'](\w+)["']\s*[\])]"""
"""A variable that a Python program reads."""


def _python(call: Call) -> str:
    program = call.option("-c") or ""
    found = re.fullmatch(r"\s*(?:(?:import|from)\s[^;]*;\s*)*print\((.*)\)\s*;?\s*", program)
    if not found:
        raise Unknown
    drawn = re.fullmatch(r"(?:random\.)?rand(?:int|range)\((\d+),\s*(\d+)\)", found[1])
    if drawn:
        last = int(drawn[2]) - ("range" in found[1])
        return f"{last if call.greatest else drawn[1]}\n"
    read = re.sub(_READ_BY_PYTHON, lambda name: f"'{call.environment.get(name[1], '?')}'", found[1])
    expression = re.sub(r"\bint\(\s*([\"']?)(\d+)\1\s*\)", lambda number: str(int(number[2])), read)
    if literal := re.search(r"(?<![\w.])0+[1-9]\d*", expression):
        raise Refused(f"Python refuses the number {literal[0]}")
    if re.search(r"(?<!/)/(?!/)|-.*(//|%)", expression):
        raise Unknown  # a fraction, or Python rounds differently than bash
    return f"{calculated(expression.replace('//', '/'))}\n"


def _bc(call: Call) -> str:
    if call.arguments:
        raise Unknown  # -l computes fractions
    return f"{calculated(call.given.strip().rstrip(';'))}\n"


_MAX_NUMBERS = 100
_ELLIPSIS = "..."
"""Replaces all but the first and the last of more than _MAX_NUMBERS lines."""


def _seq(call: Call) -> str:
    if not call.arguments or not all(re.fullmatch(r"\d{1,9}", text, re.ASCII) for text in call.arguments):
        raise Unknown
    numbers = [int(text) for text in call.arguments]
    first, step, last = {1: (1, 1, *numbers), 2: (numbers[0], 1, numbers[-1]), 3: tuple(numbers)}.get(
        len(numbers), (0, 0, 0)
    )
    if step == 0:
        raise Unknown
    found = range(first, last + 1, step)
    texts = found if len(found) <= _MAX_NUMBERS else (found[0], _ELLIPSIS, found[-1])
    return "".join(f"{text}\n" for text in texts)


def _shuf(call: Call) -> str:
    drawn = re.fullmatch(r"(\d+)-(\d+)", call.option("-i", "--input-range") or "", re.ASCII)
    lines = [drawn[1], drawn[2]] if drawn else call.lines
    return (lines[-1] if call.greatest else lines[0]) + "\n"


def _first(call: Call) -> str:
    """The text of the first argument, such as the file of comm."""
    texts = [text for text in call.arguments if not text.startswith("-")]
    return f"{texts[0]}\n" if texts else call.given


FILTERS: Mapping[str, Callable[[Call], str]] = {
    "echo": _echo, "printf": _printf, "expr": _expr, "cut": _cut, "head": _head, "tail": _tail, "tr": _tr,
    "sed": _sed, "awk": _awk, "gawk": _awk, "mawk": _awk, "python": _python, "python3": _python, "bc": _bc,
    "seq": _seq, "shuf": _shuf, "grep": _grep, "egrep": _grep, "comm": _first, "cat": _first,
    "sort": lambda call: call.given, "uniq": lambda call: call.given,
    "rev": lambda call: "\n".join(line[::-1] for line in call.lines) + "\n",
}  # fmt: skip
"""Name of a program -> what it prints."""


def counts_characters(name: str, arguments: Sequence[str]) -> bool:
    """True if a program cuts a text by the number of its characters."""
    text = " ".join(arguments)
    return (name in ("cut", "head", "tail") and bool(re.search(r"(^|\s)-[bc]", text))) or "substr" in text
