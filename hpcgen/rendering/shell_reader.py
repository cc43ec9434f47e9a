"""Reads the shell text of a template far enough to know where a `{{ }}` stands: between words, within quotes,
in a comment, on a #SBATCH line.

It follows bash's quoting, not its grammar, and stops with `ShellError` wherever it could be wrong.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass

# What the reader can be inside of, innermost last: the token that opened it. "" is the script itself; "(" and
# "$(" are again code. The groups of here-documents are "<<", of comments "#" and "#SBATCH".
_CODE = ("", "(", "$(")
_EXPANSIONS = r"\$\(\(|\$\(|\$\{|`"
_PLAIN_IN_CODE = r"[^\\$()'\"`#<>\n\s;&|]+"
_HERE_DOCUMENT = r"<<-?[ \t]*(?:'[\w.]+'|\"[\w.]+\"|\\?[\w.]+)?"
_CODE_TOKEN = re.compile(
    rf"\\|{_EXPANSIONS}|\(\(|\$?['\"]|<<<|{_HERE_DOCUMENT}|#(?:SBATCH|PBS|BSUB)?|\$[$!?#@*-]|[()\n]|[^\S\n]+|[;&|<>]|{_PLAIN_IN_CODE}|\$"
)
_TOKENS = {
    **dict.fromkeys(_CODE, _CODE_TOKEN),
    "'": re.compile(r"['\n]|[^'\n]+"),
    "$'": re.compile(r"[\\'\n]|[^\\'\n]+"),
    '"': re.compile(rf"\\|{_EXPANSIONS}|[\"\n]|[^\\$`\"\n]+|\$"),
    "`": re.compile(r"[\\`\n]|[^\\`\n]+"),
    "${": re.compile(rf"\\|{_EXPANSIONS}|['\"}}\n]|[^\\$`'\"}}\n]+|\$"),
    "((": re.compile(rf"\\|{_EXPANSIONS}|['\"()\n]|[^\\$`'\"()\n]+|\$"),
    **dict.fromkeys(("#", "#SBATCH", "<<"), re.compile(r"\n|[^\n]+")),
}
_CLOSES = {"'": "'", "$'": "'", '"': '"', "`": "`", "${": "}", "((": ")", "(": ")", "$(": ")"}
_OPENS_IN_QUOTES = {"$(": ("$(",), "$((": ("((", "(("), "${": ("${",), "`": ("`",)}
_OPENS_ANYWHERE = {**_OPENS_IN_QUOTES, "'": ("'",), '"': ('"',)}
_OPENS_IN_CODE = {**_OPENS_ANYWHERE, "(": ("(",), "((": ("((", "(("), "$'": ("$'",), '$"': ('"',)}
_OPENS = {
    **dict.fromkeys(_CODE, _OPENS_IN_CODE),
    '"': _OPENS_IN_QUOTES,
    "${": _OPENS_ANYWHERE,
    "((": {**_OPENS_ANYWHERE, "(": ("((",)},
}

# What precedes the next character, as far as it matters to it.
LINE_START, WORD_START, IN_WORD, UNKNOWN = "\n", " ", "x", "?"
_BACKSLASH, _DOLLAR, _VALUE, _HEREDOC = "\\", "$", "v", "h"
_UNFINISHED = (_BACKSLASH, _DOLLAR, _HEREDOC)

# A value's mark in `line`, and the commands that evaluate their argument again, where quoting does not hold.
_MARK = "\x00"
_COMMAND = r"(?<![\w./$-])"
_EVALUATED = re.compile(
    rf"""{_COMMAND}(?:eval|let|trap)\s[^;&|]*{_MARK}
    |\b(?:ba|da|z|k)?sh\s+-\w*c\s+(?!["']|\$[\w{{])[^;&|]*{_MARK}
    |(?:\[|\btest)\s.*(?:{_MARK}\S*\s+-(?:eq|ne|lt|le|gt|ge)\s|-(?:eq|ne|lt|le|gt|ge|v)\s+\S*{_MARK})
    |{_COMMAND}(?:unset|read|mapfile|readarray|declare|typeset|local|readonly|export)\s(?:[^;&|]*\s)?[^\s=]*{_MARK}
    |{_COMMAND}(?:declare|typeset|local)\s+-\w*i\w*\s[^;&|]*{_MARK}
    |{_COMMAND}printf\s+-v\s+\S*{_MARK}
    |[<>]&\s*[^\s;&|]*{_MARK}""",
    re.VERBOSE,
)


class ShellError(Exception):
    """The template's shell text, or a value's place in it, is not one that hpcgen can vouch for."""


@dataclass
class ShellReader:
    """The state of bash's lexer after the text so far.

    `last` says what precedes the next character (one of the marks above); `line` is the present line, with a
    mark for each value; `here_documents` are the delimiters of those whose text is to come or is being read,
    with a tab before it for `<<-`, which allows tabs there.
    """

    nesting: tuple[str, ...] = ()
    last: str = LINE_START
    line: str = ""
    here_documents: tuple[str, ...] = ()

    @property
    def inside(self) -> str:
        """The token that opened the innermost thing that is open; "" in the script itself."""
        return self.nesting[-1] if self.nesting else ""

    @property
    def in_code(self) -> bool:
        """Whether a command's words stand here."""
        return self.inside in _CODE

    @property
    def at_line_start(self) -> bool:
        """Whether a line of code begins here."""
        return self.in_code and self.last == LINE_START

    def copy(self) -> ShellReader:
        """The same state, to go on from in another branch."""
        return copy.copy(self)

    def feed(self, text: str) -> None:
        """Read shell text that the template writes as it is."""
        position = 0
        while position < len(text):
            if self.last == _BACKSLASH:
                token = text[position]
                # A continued line goes on as before, which may be between words or not.
                self.last = UNKNOWN if token == "\n" else IN_WORD
                self.line += " " if token == "\n" else f"\\{token}"
            else:
                match = _TOKENS[self.inside].match(text, position)
                assert match, f"no token for {text[position]!r} inside {self.inside!r}"
                token = match.group()
                self._take(token)
            position += len(token)

    def value(self, filter_name: str) -> None:
        """Read a `{{ }}` with this filter; "" is a quoted word, "markup" a macro's text, "block" a block."""
        self._require_place(filter_name)
        starts_word = self.last in (LINE_START, WORD_START)
        harmless = filter_name in ("integer", "variable") or not self.in_code
        self.line += "0" if harmless else _MARK
        if filter_name == "heredoc":
            self.last = _HEREDOC
        elif filter_name == "block":
            self.line, self.last = "", LINE_START
        else:
            self.last = _VALUE if starts_word and filter_name in ("", "integer") else UNKNOWN

    def join(self, other: ShellReader) -> ShellReader:
        """The state where two branches meet; they must agree on the quoting."""
        if (self.nesting, self.here_documents) != (other.nesting, other.here_documents):
            raise ShellError("its branches end in different quoting; close what each of them opens")
        if self.last != other.last and (self.last in _UNFINISHED or other.last in _UNFINISHED):
            raise ShellError("one of its branches ends in the middle of a token; write the token whole")
        if (self.last, self.line) == (other.last, other.line):
            return self
        self._require_not_evaluated()
        other._require_not_evaluated()
        joined = max(self, other, key=lambda reader: reader.line.count(_MARK)).copy()
        joined.last = self.last if self.last == other.last else UNKNOWN
        if not joined.in_code:
            joined.line += " #"  # no value may follow at once, nor is this the end of a here-document
        return joined

    def finish(self) -> None:
        """End the text of a macro, a block or a template, which must leave nothing open."""
        if self.nesting or self.here_documents:
            opened = self.inside or "<<"
            raise ShellError(f"{opened} is still open at the end of the text; close it in the same text")
        if self.last in _UNFINISHED:
            raise ShellError("the text ends in the middle of a token; end it with a newline")
        self._require_not_evaluated()

    def _take(self, token: str) -> None:
        inside = self.inside
        if token == "\n":
            self._end_line()
            return
        if self.in_code:
            self._require_clear(token)
        if token == _BACKSLASH:
            self.last = _BACKSLASH
            return
        if inside in _CLOSES and token == _CLOSES[inside]:
            self.nesting = self.nesting[:-1]
            self.last = UNKNOWN if inside == "(" else IN_WORD
        elif token in _OPENS.get(inside, {}):
            self._open(token)
        elif self.in_code and token[0] == "#" and self.last in (LINE_START, WORD_START):
            directive = token != "#" and self.last == LINE_START
            self.nesting += ("#SBATCH" if directive else "#",)
        elif self.in_code and token.startswith("<<") and token != "<<<":
            self._announce_here_document(token)
        else:
            self.last = _precedes(token)
        self.line += token

    def _require_clear(self, token: str) -> None:
        """Refuse code whose meaning depends on what a value or a branch before it wrote."""
        if token[0] == "#" and self.last in (UNKNOWN, _VALUE):
            raise ShellError("this # may or may not begin a comment; put a blank or a newline before it")
        if self.last == _HEREDOC:
            raise ShellError("text after a here-document on its line; end the line after | heredoc }}")
        if self.last == _VALUE and token.startswith(("=", "+=", "[")):
            raise ShellError("a variable's name needs its filter: {{ name | variable }}=")
        if self.last == _VALUE and token[0] in "<>":
            raise ShellError("a number before < or > is a file descriptor; put a blank between }} and it")
        if '"' in self.nesting and token.isspace() and re.search(r"(?:^|[\s;&|(])case$", self.line):
            raise ShellError('a case within "$( )" cannot be followed; put it into a function')

    def _open(self, token: str) -> None:
        if token == "'" and self.inside == "${" and '"' in self.nesting:
            raise ShellError('a \' within "${ }" cannot be followed; put the text into a variable')
        self.nesting += _OPENS[self.inside][token]
        self.last = WORD_START

    def _announce_here_document(self, token: str) -> None:
        delimiter = token.lstrip("<-").strip(" \t\\'\"")
        if not delimiter:
            raise ShellError("the delimiter after << must be a plain word in the template's text")
        self.here_documents += (("\t" if token.startswith("<<-") else "") + delimiter,)
        self.last = WORD_START

    def _end_line(self) -> None:
        if self.inside == "<<":
            self._end_here_document_line()
        else:
            if self.inside in ("#", "#SBATCH"):
                self.nesting = self.nesting[:-1]
            self._require_not_evaluated()
            if self.here_documents and self.in_code:
                self.nesting += ("<<",)
        self.line, self.last = "", LINE_START

    def _end_here_document_line(self) -> None:
        delimiter = self.here_documents[0]
        line = "\t" + self.line.lstrip("\t") if delimiter.startswith("\t") else self.line
        if line == delimiter:
            self.here_documents = self.here_documents[1:]
            if not self.here_documents:
                self.nesting = self.nesting[:-1]

    def _require_not_evaluated(self) -> None:
        if _EVALUATED.search(self.line):
            raise ShellError(
                "bash evaluates this value a second time, and would run commands in it; "
                "use | integer or | variable, or pass it in a shell variable"
            )

    def _require_place(self, filter_name: str) -> None:
        if self.inside == "<<":
            raise ShellError("no {{ }} within a here-document of the template; use {{ text | heredoc }}")
        if self.inside == "#SBATCH":
            self._require_place_in_directive(filter_name)
        elif self.inside == "#":
            self._require_place_in_comment(filter_name)
        elif filter_name in ("comment", "directive"):
            place = "a comment" if filter_name == "comment" else "a #SBATCH line"
            raise ShellError(f"| {filter_name} is for {place}, and this is code; leave it out")
        elif filter_name not in ("integer", "variable"):
            self._require_place_for_word(filter_name)

    def _require_place_in_directive(self, filter_name: str) -> None:
        if filter_name not in ("directive", "integer"):
            raise ShellError("a value on a #SBATCH line needs | directive")
        if not re.search(r"\s--\S*$", self.line):
            raise ShellError(
                "a value on a #SBATCH line that could be an option of its own; write --option={{ }}"
            )
        if re.search(r"[\"'\\]", self.line):
            raise ShellError("no quotes or backslashes on a #SBATCH line with a value; | directive quotes it")

    def _require_place_in_comment(self, filter_name: str) -> None:
        if filter_name not in ("comment", "integer", "variable"):
            raise ShellError("a value in a comment needs | comment")
        if self.line.endswith("#") or self.line.startswith("#!"):
            raise ShellError("a value right after # could make the comment a directive; put a blank between")

    def _require_place_for_word(self, filter_name: str) -> None:
        if "((" in self.nesting or re.search(rf"[\w{_MARK}]\[[^\]]*$", self.line):
            raise ShellError("a value in (( )) or a subscript is evaluated as an expression; use | integer")
        if not self.in_code:
            opened = f"{self.inside} quotes" if self.inside != "${" else "${ }"
            raise ShellError(
                f"a value within {opened}; it brings its own quotes, so write it outside of them"
            )
        if self.last in (_BACKSLASH, _DOLLAR):
            raise ShellError(f"a value right after {self.last} has other quoting rules; write it apart")
        if filter_name == "block" and not self.at_line_start:
            raise ShellError("a block holds whole lines of code; write it on a line of its own")
        if filter_name == "heredoc" and (self.nesting or self.here_documents or self.line[-1:] != " "):
            raise ShellError("| heredoc stands at the end of a command, after a blank, and outside of ( )")


def _precedes(token: str) -> str:
    """What the next character finds before it, after this token."""
    if token == _DOLLAR:
        return token
    if token[-1].isspace() or token[-1] in ";&|<>":
        return WORD_START
    return UNKNOWN if token == ")" else IN_WORD
