"""Chat templates: Jinja programs from strangers, run in a sandbox with the variables and functions of transformers."""

from __future__ import annotations

import dataclasses
import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from trainer.chats.chat import ASSISTANT, Chat, Message
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.contract.problem import FilePlace

OLDEST_JINJA = (3, 1, 6)
"""Earlier versions have known ways out of the sandbox."""
_LONGEST_PRODUCT = 1_000_000
_BEGIN, _END = "\udc02", "\udc03"
"""Marks of a generation block in what a template renders. A valid text has no surrogates."""


class ChatTemplate:
    """A compiled chat template."""

    def __init__(
        self,
        name: str,
        source: str,
        *,
        special_tokens: Mapping[str, Any],
        added_tokens: Sequence[str],
        date: datetime.date | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Compiles the template `source`, which is from the file `name`.

        `special_tokens` are the variables bos_token, eos_token and so on. `date` is what `strftime_now` returns. By
        default, a template that asks for it is refused: the same chat would be other text on another day. `variables`
        are further variables of every chat.

        Raises:
            ChatTemplateError: the template is not valid Jinja.
        """
        _require_jinja()
        self.name, self.source = name, source
        self.added_tokens = tuple(token for token in added_tokens if token.strip())
        """Tokens of the vocabulary that are always a token of their own, such as those that end a turn."""
        self.names_tools = re.search(r"\btools\b", source) is not None
        """False if the template certainly leaves out the schemas of functions."""
        self.variables = {**special_tokens, **(variables or {})}
        """Variables of every chat."""
        environment = _environment(self._formatted(date))
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid Jinja: {error.message}", where=FilePlace(name, error.lineno)
            ) from error
        except (RecursionError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {error!r}", where=name) from error
        self.marks_answers = environment.extensions[_Generation.identifier].is_used  # type: ignore[attr-defined]
        """True if the template has {% generation %} blocks, which tell what the assistant writes."""

    def render(
        self, chat: Chat, num_messages: int | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Renders the first messages of a chat. Default: all.

        Raises:
            BadChatError: the template refuses the chat.
            ChatTemplateError: the template does what the sandbox forbids, or asks for the date.
        """
        messages = chat.messages[:num_messages]
        return _without_marks(self._render(chat, messages, add_generation_prompt))[0]

    def render_marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Renders a chat. Returns the text, and begin and end of each generation block in characters.

        Raises:
            BadChatError: the template refuses the chat.
            ChatTemplateError: the template does what the sandbox forbids, or asks for the date.
        """
        return _without_marks(self._render(chat, chat.messages, False))

    def ends_of_turn(self, chat: Chat | None = None) -> tuple[str, ...]:
        """The tokens that end an answer to `chat`: a text, and with tools or variables a call. Default: any short chat.

        Empty if the template writes no token after them, or refuses short chats.
        """
        chat = chat or Chat([])
        question, answer = {"role": "user", "content": "Hello"}, {"role": ASSISTANT, "content": "Goodbye"}
        text = self._text_or_none(dataclasses.replace(chat, messages=[question, answer]))
        rests = [text.rpartition(answer["content"])[2].lstrip()] if text else []
        ends = [max(filter(rest.startswith, self.added_tokens), key=len, default=None) for rest in rests]
        if chat.tools or chat.variables:  # variables may offer built-in tools
            function = {"name": "hello", "arguments": {"to": "all"}}
            calling = {
                **answer,
                "content": "",
                "tool_calls": [{"id": "call00000", "type": "function", "function": function}],
            }
            text = self._text_or_none(dataclasses.replace(chat, messages=[question, calling])) or ""
            ends.append(max(filter(text.rstrip().endswith, self.added_tokens), key=len, default=None))
        return tuple(dict.fromkeys(end for end in ends if end is not None))

    def _text_or_none(self, chat: Chat) -> str | None:
        try:
            return self.render(chat)
        except BadChatError:
            return None

    def _render(self, chat: Chat, messages: list[Message], add_generation_prompt: bool) -> str:
        variables = {**self.variables, **chat.variables}
        try:
            return self._template.render(
                **variables
                | {
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": chat.documents,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except ChatTemplateError:
            raise
        except SecurityError as error:
            raise ChatTemplateError(
                f"the chat template does what the sandbox forbids: {error}", where=self.name
            ) from error
        except Exception as error:  # a template can raise whatever Python's operators do
            reason = (
                str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
            )
            raise BadChatError("the chat template refuses it", f"the chat template says: {reason}") from error

    def _formatted(self, date: datetime.date | None) -> Callable[[str], str]:
        def strftime_now(format: str) -> str:
            if date is None:
                raise ChatTemplateError(
                    "the chat template writes today's date (strftime_now), so the same chat would be other tokens "
                    "tomorrow. Choose the date that it writes: data.corpus.chat.date (--chat-date)",
                    where=self.name,
                )
            return date.strftime(format)

        return strftime_now


def _require_jinja() -> None:
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < OLDEST_JINJA:
        wanted = ".".join(map(str, OLDEST_JINJA))
        raise ChatTemplateError(
            f"Jinja {jinja2.__version__} has known ways out of its sandbox, and chat templates are programs of "
            f"strangers. Install jinja2>={wanted}"
        )


class _Generation(Extension):
    """The tag {% generation %}, which surrounds what the assistant writes."""

    tags = {"generation"}  # noqa: RUF012  # Jinja's own type

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.is_used = False

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """Parses a block."""
        self.is_used = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _without_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Removes the marks of generation blocks. Returns the positions of blocks that are not in another block."""
    if _BEGIN not in text:
        return text, []
    parts, blocks = list[str](), list[tuple[int, int]]()
    position = depth = begin = 0
    rest = text
    while rest:
        at = min((found for mark in (_BEGIN, _END) if (found := rest.find(mark)) >= 0), default=len(rest))
        parts.append(rest[:at])
        position += at
        mark, rest = rest[at : at + 1], rest[at + 1 :]
        if mark == _BEGIN:
            begin = position if not depth else begin
            depth += 1
        elif mark == _END:
            depth -= 1
            if not depth and position > begin:
                blocks.append((begin, position))
    return "".join(parts), blocks


def _environment(strftime_now: Callable[[str], str]) -> ImmutableSandboxedEnvironment:
    """Environment with the settings of transformers' apply_chat_template."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = strftime_now
    environment.globals["dict"] = _Dictionary()
    environment.globals["namespace"] = _Namespace
    return environment


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox without products and powers that fill the memory. Jinja itself limits `range`."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Computes a product or a power.

        Raises:
            SecurityError: it would be longer than _LONGEST_PRODUCT items, or have more bits.
        """
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else 0
        else:
            bits = max(
                (
                    len(items) * count
                    for items, count in ((left, right), (right, left))
                    if _can_repeat(items, count)
                ),
                default=0,
            )
        if bits > _LONGEST_PRODUCT:
            raise SecurityError(f"a result of {operator} would have {bits:,} items")
        return super().call_binop(context, operator, left, right)


def _can_repeat(items: Any, count: Any) -> bool:
    return isinstance(items, (str, list, tuple)) and isinstance(count, int)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text. Jinja's own filter escapes the characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Dictionary:
    """Makes dictionaries, as the type `dict`, whose attributes a template must not reach."""

    def __call__(self, *arguments: Any, **items: Any) -> dict[Any, Any]:
        return dict(*arguments, **items)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """A dictionary with the same value for several keys."""
        return dict.fromkeys(*arguments)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without underscored names, which would reach Python's internals."""

    def __init__(*arguments: Any, **items: Any) -> None:  # a template may name an item "self"
        self, *values = arguments
        names = dict(*values, **items)
        for name in names:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the underscored name {name!r}")
