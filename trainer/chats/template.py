"""Chat templates: Jinja programs from strangers, run in a sandbox with the variables and functions of transformers."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension

from trainer.chats.chat import ASSISTANT, Chat, Message
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.chats.sandbox import ExhaustedError, Sandbox
from trainer.contract.problem import FilePlace
from trainer.contract.wording import counted

OLDEST_JINJA = (3, 1, 6)
"""Earlier versions have known ways out of the sandbox."""
_BEGIN, _END = "\udc02", "\udc03"
"""Marks of a generation block in what a template renders. A valid text has no surrogates."""
_MARKS = re.compile(f"([{_BEGIN}{_END}])")


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
        self._sandbox = Sandbox(_Generation, self._formatted(date))
        try:
            self._template = self._sandbox.compiled(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template is not valid Jinja: {error.message}", where=FilePlace(name, error.lineno)
            ) from error
        except Exception as error:  # Python's compiler has limits too, such as 100 levels of indentation
            raise ChatTemplateError(f"the chat template cannot be compiled: {error!r}", where=name) from error
        self.marks_answers = self._sandbox.extensions[_Generation.identifier].is_used  # type: ignore[attr-defined]
        """True if the template has {% generation %} blocks, which tell what the assistant writes."""

    def render(
        self, chat: Chat, num_messages: int | None = None, *, add_generation_prompt: bool = False
    ) -> str:
        """Renders the first messages of a chat. Default: all.

        Raises:
            BadChatError: the template refuses the chat.
            ChatTemplateError: the template does what the sandbox forbids, takes too long, or asks for the date.
        """
        messages = chat.messages[:num_messages]
        return _without_marks(self._render(chat, messages, add_generation_prompt))[0]

    def render_marked(self, chat: Chat) -> tuple[str, list[tuple[int, int]]]:
        """Renders a chat. Returns the text, and begin and end of each generation block in characters.

        Raises:
            BadChatError: the template refuses the chat.
            ChatTemplateError: the template does what the sandbox forbids, takes too long, or asks for the date.
        """
        return _without_marks(self._render(chat, chat.messages, False))

    def ends_of_turn(self, chat: Chat | None = None) -> tuple[str, ...]:
        """The tokens that end an answer to `chat`, which is a text or, with tools or variables, a call. Default: any
        short chat.

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
            return self._sandbox.rendered(
                self._template,
                variables
                | {
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": chat.documents,
                    "add_generation_prompt": add_generation_prompt,
                },
            )
        except ChatTemplateError:
            raise
        except ExhaustedError as error:
            raise ChatTemplateError(
                f"the chat template {error} with a chat of {counted(len(messages), 'message')}. Usual templates take "
                "less than a millisecond. Use another one",
                where=self.name,
            ) from error
        except MemoryError as error:
            raise ChatTemplateError(
                f"the chat template asks for too much memory with a chat of {counted(len(messages), 'message')}. Usual "
                "templates take less than a megabyte. Use another one",
                where=self.name,
            ) from error
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
    """Removes the marks of generation blocks. Returns the positions of blocks that are not in another block.

    Raises:
        BadChatError: the text has a surrogate, which no tokenizer encodes.
    """
    parts, blocks = list[str](), list[tuple[int, int]]()
    position = depth = begin = 0
    for part in _MARKS.split(text):
        if part == _BEGIN:
            begin = position if not depth else begin
            depth += 1
        elif part == _END:
            depth -= 1
            if not depth and position > begin:
                blocks.append((begin, position))
        else:
            parts.append(part)
            position += len(part)
    text = "".join(parts)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(text[error.start]):04X}"
        raise BadChatError(
            "the chat template writes what is no character",
            f"the chat template writes {found}, which is half of a surrogate pair",
        ) from error
    return text, blocks
