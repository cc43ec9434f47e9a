"""Parts of a chat that its template leaves out: messages, reasoning, calls of tools and their arguments, and the tools.

A template that ignores something renders the same text without it. So each part of a chat is changed a little, and the
text must change with it. Searching the text for the part is not enough: the name of a called function is also in the
schemas of the tools, and a tool's result often in the answer that follows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trainer.chats.chat import ASSISTANT, REASONING, REASONING_KEYS, Chat
from trainer.chats.errors import BadChatError

if TYPE_CHECKING:  # the template brings Jinja
    from trainer.chats.template import ChatTemplate

_DISTINCT = 20
"""Characters of a content from which on no template has it as a text of its own."""
_ADDED = "."


def require_tools(template: ChatTemplate, chat: Chat) -> None:
    """Refuses a chat whose tools the template leaves out.

    Raises:
        BadChatError: it does, or refuses the chat.
    """
    if not chat.tools:
        return
    more = dataclasses.replace(chat, tools=[*chat.tools, chat.tools[-1]])
    if not template.names_tools or template.render(chat) == template.render(more):
        raise BadChatError("tools are left out", "it has tools, which the chat template does not write")


def require_messages(
    template: ChatTemplate, chat: Chat, text: str, *, add_generation_prompt: bool = False
) -> None:
    """Refuses a chat of which `text`, what the template renders, lacks a part of a message.

    Raises:
        BadChatError: it lacks a content, a call of a tool, or the arguments of one.
    """

    def is_ignored(changed: Chat) -> bool:
        return _is_ignored(template, changed, text, add_generation_prompt=add_generation_prompt)

    contents = "\0".join(message["content"] for message in chat.messages)
    for index, message in enumerate(chat.messages):
        content = message["content"].strip()
        is_found = len(content) >= _DISTINCT and text.count(content) >= contents.count(content)
        if content and not is_found and is_ignored(with_longer_content(chat, index)):
            raise BadChatError(
                "the chat template leaves out a message",
                f"the chat template writes nothing of message {index}, which has the role {message['role']!r}",
            )
        for number, call in enumerate(message.get("tool_calls", ())):
            function = call.get("function") or call
            name, arguments = function["name"], function.get("arguments")
            if is_ignored(_with_function(chat, index, number, {"name": f"{name}{_ADDED}"})):
                raise BadChatError(
                    "the chat template leaves out a tool call",
                    f"the chat template does not write the call of {name!r} in message {index}",
                )
            if isinstance(arguments, dict) and is_ignored(
                _with_function(chat, index, number, {"arguments": {**arguments, _ADDED: _ADDED}})
            ):
                raise BadChatError(
                    "the chat template leaves out the arguments of a tool call",
                    f"the chat template does not write the arguments of the call of {name!r} in message {index}",
                )


def require_reasoning(template: ChatTemplate, chat: Chat, text: str) -> None:
    """Refuses a chat of which `text`, what the template renders, lacks the reasoning of the last answer.

    Templates leave out that of earlier answers on purpose.

    Raises:
        BadChatError: it lacks it.
    """
    index = max(index for index, message in enumerate(chat.messages) if message["role"] == ASSISTANT)
    message = chat.messages[index]
    reasoning = message.get(REASONING)
    if not isinstance(reasoning, str) or reasoning.strip() in text:
        return
    longer = {key: f"{reasoning}{_ADDED}" for key in REASONING_KEYS if key in message}
    if _is_ignored(template, _with_message(chat, index, longer), text):
        raise BadChatError(
            "the chat template leaves out the reasoning",
            f"the chat template does not write the reasoning of message {index}, the last answer. Remove it from the "
            "chat, or use a template that writes it",
        )


def _is_ignored(
    template: ChatTemplate, changed: Chat, text: str, *, add_generation_prompt: bool = False
) -> bool:
    """Returns whether the template renders the same text for a changed chat."""
    try:
        return template.render(changed, add_generation_prompt=add_generation_prompt) == text
    except BadChatError:
        return False  # the template reads what has changed


def with_longer_content(chat: Chat, index: int) -> Chat:
    """The chat with a longer content of a message."""
    return _with_message(chat, index, {"content": chat.messages[index]["content"] + _ADDED})


def _with_function(chat: Chat, index: int, number: int, values: Mapping[str, Any]) -> Chat:
    """The chat with `values` in the function of a tool call."""
    calls = list(chat.messages[index]["tool_calls"])
    call = calls[number]
    calls[number] = (
        {**call, "function": {**call["function"], **values}} if call.get("function") else {**call, **values}
    )
    return _with_message(chat, index, {"tool_calls": calls})


def _with_message(chat: Chat, index: int, values: Mapping[str, Any]) -> Chat:
    messages = list(chat.messages)
    messages[index] = {**messages[index], **values}
    return dataclasses.replace(chat, messages=messages)
