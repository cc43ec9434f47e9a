"""A chat, read from a JSON object: messages, a prompt and its completion (the forms of TRL), or conversations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from trainer.chats.errors import BadChatError

Message: TypeAlias = dict[str, Any]

ASSISTANT = "assistant"
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython")
"""Roles of messages. Templates print other roles as they are, or leave the message out."""
MESSAGES, PROMPT, COMPLETION = "messages", "prompt", "completion"
CONVERSATIONS = "conversations"
"""Key of a chat whose messages have `from` and `value`, as in the dumps of ShareGPT."""
SPEAKERS = {"human": "user", "gpt": ASSISTANT, **{role: role for role in ("user", ASSISTANT, "system")}}
"""Values of `from`, and their roles."""
REASONING = "reasoning_content"
"""Key of an assistant's reasoning in a `Message`."""
REASONING_KEYS = (REASONING, "thinking", "reasoning")
"""Keys of an assistant's reasoning. Templates read the first two."""
_SHOWN = 60


@dataclass(frozen=True)
class Chat:
    """A chat for a template."""

    messages: list[Message]
    num_prompt_messages: int = 0
    """Number of messages at the beginning whose answers are not learned: those of the prompt."""
    tools: list[Any] | None = None
    """JSON schemas of the functions that the assistant may call."""
    documents: list[Any] | None = None
    """Documents for a template of retrieval-augmented generation."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template (chat_template_kwargs)."""


@dataclass(frozen=True)
class Completion:
    """A prompt and its completion as plain text, which no template renders."""

    prompt: str
    completion: str


def read_chat(document: Mapping[str, Any]) -> Chat | Completion:
    """Reads the chat in a JSON object.

    Keys without a value (null) count as missing, because tables fill them in. Arguments of tool calls that are JSON
    text, as in OpenAI's API, become objects, as in vLLM.

    Raises:
        BadChatError: the object has no chat, or a message is incomplete.
    """
    if (messages := _all_messages(document)) is not None:
        return _chat(document, messages, 0)
    prompt, completion = document.get(PROMPT), document.get(COMPLETION)
    if prompt is None or completion is None:
        raise BadChatError(
            "no chat",
            f"missing key 'messages', 'conversations', or 'prompt' and 'completion' ({_keys(document)})",
        )
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion.strip():
            raise BadChatError("empty answer", "'completion' has no text")
        return Completion(prompt, completion)
    if isinstance(prompt, list) and isinstance(completion, list):
        asked = _messages(prompt, PROMPT)
        return _chat(document, [*asked, *_messages(completion, COMPLETION)], len(asked))
    raise BadChatError(
        "prompt and completion differ in type",
        "'prompt' and 'completion' must be two strings or two lists of messages, got "
        f"{_shown(prompt)} and {_shown(completion)}",
    )


def read_prompt(document: Mapping[str, Any]) -> Chat:
    """Reads the messages of a JSON object that a model is to answer.

    Raises:
        BadChatError: the object has no messages, a message is incomplete, or the last one is an answer.
    """
    if document.get(MESSAGES) is None:
        raise BadChatError("no chat", f"missing key 'messages' ({_keys(document)})")
    messages = _messages(document[MESSAGES], MESSAGES)
    if messages[-1]["role"] == ASSISTANT:
        raise BadChatError("nothing to answer", f"the last message has the role {ASSISTANT!r}")
    return _with_context(document, messages, len(messages))


def _all_messages(document: Mapping[str, Any]) -> list[Message] | None:
    """The messages of a chat that is not divided into a prompt and its completion; None if the object has none."""
    if document.get(MESSAGES) is not None:
        return _messages(document[MESSAGES], MESSAGES)
    if document.get(CONVERSATIONS) is None:
        return None
    turns = document[CONVERSATIONS]
    if isinstance(turns, list):
        turns = [_with_role(turn, f"{CONVERSATIONS}[{index}]") for index, turn in enumerate(turns)]
    messages = _messages(turns, CONVERSATIONS)
    system = document.get("system")  # some datasets have the message of the system next to the turns
    if system and messages[0]["role"] != "system":
        return [*_messages([{"role": "system", "content": system}], "system"), *messages]
    return messages


def _with_role(turn: Any, name: str) -> Any:
    """A turn with `from` and `value` as a message. Anything else is returned unchanged."""
    if not isinstance(turn, dict) or turn.get("from") is None:
        return turn
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker not in SPEAKERS:
        raise BadChatError(
            "unknown speaker",
            f"{name} is from {_shown(speaker)}; the names are {', '.join(SPEAKERS)}. Write chats with tools as "
            "'messages' with role, content and tool_calls",
        )
    others = {key: item for key, item in turn.items() if key not in ("from", "value")}
    return {**others, "role": SPEAKERS[speaker], "content": turn.get("value")}


def _keys(document: Mapping[str, Any]) -> str:
    keys = ", ".join(repr(key[:_SHOWN]) for key in list(document)[:8]) or "none"
    return f"the keys are {keys}"


def _chat(document: Mapping[str, Any], messages: list[Message], num_prompt_messages: int) -> Chat:
    answers = [message for message in messages[num_prompt_messages:] if message["role"] == ASSISTANT]
    if not answers:
        raise BadChatError("no answer", f"no message has the role {ASSISTANT!r}")
    for message in answers:
        if not any((message.get("content", "").strip(), message.get("tool_calls"), _reasoning(message))):
            raise BadChatError("empty answer", f"message {messages.index(message)} is an answer without text")
    return _with_context(document, messages, num_prompt_messages)


def _with_context(document: Mapping[str, Any], messages: list[Message], num_prompt_messages: int) -> Chat:
    """The messages with what is next to them in the object."""
    variables = document.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise BadChatError("chat_template_kwargs is not an object", f"got {_shown(variables)}")
    return Chat(
        messages,
        num_prompt_messages,
        _list(document, "tools"),
        _list(document, "documents"),
        variables,
    )


def _list(document: Mapping[str, Any], key: str) -> list[Any] | None:
    """The list under `key`, which may be JSON text, since tables have no type for schemas. None if it is missing."""
    value = document.get(key)
    if isinstance(value, str):
        value = _parsed(value)
    if value is None or value == []:
        return None
    if not isinstance(value, list):
        raise BadChatError(f"{key!r} is not a list", f"{key!r} must be a list, got {_shown(value)}")
    return value


def _messages(value: Any, key: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise BadChatError(
            f"{key!r} is not a list of messages", f"{key!r} must be a list of messages, got {_shown(value)}"
        )
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(value)]


def _message(value: Any, name: str) -> Message:
    if not isinstance(value, dict):
        raise BadChatError("a message is not an object", f"{name} must be an object, got {_shown(value)}")
    message = {key: item for key, item in value.items() if item is not None}
    role = message.get("role")
    if role not in ROLES:
        problem = f"has the role {_shown(role)}" if role else "has no role"
        raise BadChatError("unknown role", f"{name} {problem}; the roles are {', '.join(ROLES)}")
    if "tool_calls" in message:
        message["tool_calls"] = list(_tool_calls(message["tool_calls"], name))
        if not message["tool_calls"]:
            del message["tool_calls"]
    if role == ASSISTANT and ("tool_calls" in message or _reasoning(message)):
        message.setdefault("content", "")  # Jinja would print "None"
    content = message.get("content")
    if not isinstance(content, str):
        problem = f"must be text, got {_shown(content)}" if "content" in message else "is missing"
        raise BadChatError("content is not text", f"{name}.content {problem}")
    reasoning = _reasoning(message)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, REASONING: reasoning}
    return message


def _reasoning(message: Message) -> Any:
    return next((message[key] for key in REASONING_KEYS if message.get(key)), None)


def _tool_calls(calls: Any, name: str) -> Iterator[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise BadChatError(
            "tool_calls is not a list", f"{name}.tool_calls must be a list of objects, got {_shown(calls)}"
        )
    for call in calls:
        is_nested = call.get("function") is not None
        function = call["function"] if is_nested else call
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadChatError(
                "a tool call names no function",
                f"{name}: a tool call must be an object with the name and the arguments of a function, or have it as "
                f"'function', got {_shown(call)}",
            )
        function = _with_arguments(function, name)
        yield {**call, "function": function} if is_nested else function


def _with_arguments(function: dict[str, Any], name: str) -> dict[str, Any]:
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return function
    parsed = _parsed(arguments) if arguments.strip() else {}
    if not isinstance(parsed, dict):
        raise BadChatError(
            "arguments of a tool call are not an object",
            f"{name}: the arguments of a tool call must be a JSON object, got {_shown(arguments)}",
        )
    return {**function, "arguments": parsed}


def _parsed(text: str) -> Any:
    """The value of JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def without_nulls(value: Any) -> Any:
    """Drops null from all objects in `value`. In tables, objects of one column have the keys of all of them."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def roles(messages: Sequence[Message]) -> str:
    """The roles of `messages` in order, for error messages."""
    return ", ".join(str(message["role"]) for message in messages)
