"""The answers of the assistant in a rendered chat, from the template's own marks or from rendered beginnings."""

from __future__ import annotations

from trainer.chats.chat import ASSISTANT, Chat, roles
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.chats.omissions import require_messages, require_reasoning, require_tools, with_longer_content
from trainer.chats.template import ChatTemplate

Span = tuple[int, int]
"""Begin and end (exclusive) in a text, in characters."""
_HINT = "Set data.corpus.chat.chat_template_file (--chat-template) to a template with {% generation %} blocks"
_CONTEXT = 30
_LONGEST_EMPTY = 100
"""Characters of an answer from which on it is not searched for special tokens."""


def render_answers(template: ChatTemplate, chat: Chat) -> tuple[str, list[Span]]:
    """Renders a chat. Returns the text and its answers in order, each with the token that ends it.

    If the template has generation blocks, these are the answers. Otherwise, an answer begins where the messages before
    it end with the generation prompt, and ends where the messages up to it end. Space after the token that ends the
    turn is not part of it.

    Raises:
        BadChatError: the template refuses the chat, or leaves out an answer, another message or the tools.
        ChatTemplateError: the template renders the beginning of a chat differently if more messages follow, an answer
            does not end with a token that ends it, or a generation block has what others than the assistant write.
    """
    require_tools(template, chat)
    text, spans = (_marked_answers if template.marks_answers else _derived_answers)(template, chat)
    _require_text(template, text, spans)
    require_messages(template, chat, text)
    require_reasoning(template, chat, text)
    return text, spans


def _derived_answers(template: ChatTemplate, chat: Chat) -> tuple[str, list[Span]]:
    text = template.render(chat)
    spans = []
    for index, message in enumerate(chat.messages):
        if message["role"] != ASSISTANT or index < chat.num_prompt_messages:
            continue
        begin = _beginning(template, chat, text, index, add_generation_prompt=True)
        end = _beginning(template, chat, text, index + 1) if index + 1 < len(chat.messages) else len(text)
        spans.append((begin, begin + _length_with_end(template, text[begin:end], index)))
    return text, spans


def _marked_answers(template: ChatTemplate, chat: Chat) -> tuple[str, list[Span]]:
    text, blocks = template.render_marked(chat)
    spans = _joined(blocks)
    _require_own_text(template, chat, [text[begin:end] for begin, end in blocks])
    if chat.num_prompt_messages:
        learned_from = _beginning(template, chat, text, chat.num_prompt_messages)
        spans = [span for span in spans if span[0] >= learned_from]
    num_answers = sum(message["role"] == ASSISTANT for message in chat.messages[chat.num_prompt_messages :])
    for number, (begin, end) in enumerate(spans, 1):
        # an answer may have several blocks, of which the last one ends it
        is_end = number == len(spans) or len(spans) <= num_answers
        following = next(filter(text[end:].lstrip().startswith, template.added_tokens), None)
        if (is_end or following) and not text[begin:end].rstrip().endswith(template.added_tokens):
            what = f"before the token {following!r}" if following else "which is not a token that ends a turn"
            remedy = (
                "move the token into the block" if following else "write such a token at the end of the block"
            )
            raise ChatTemplateError(
                f"a generation block of the chat template ends with {text[max(begin, end - _CONTEXT) : end]!r}, "
                f"{what}. A model would not learn to end its answer; {remedy}",
                where=template.name,
            )
    return text, spans


def _require_own_text(template: ChatTemplate, chat: Chat, blocks: list[str]) -> None:
    """Refuses generation blocks that have what others than the assistant write."""
    learned = "\0".join(blocks)
    for index, message in enumerate(chat.messages):
        content = message["content"].strip()
        if message["role"] == ASSISTANT or not content or content not in learned:
            continue
        try:
            text, spans = template.render_marked(with_longer_content(chat, index))
        except BadChatError:
            continue
        if [text[begin:end] for begin, end in spans] != blocks:  # it is no quotation in an answer
            raise ChatTemplateError(
                f"a generation block of the chat template has the text of message {index} ({message['role']}), "
                f"{content[:_CONTEXT]!r}. A model would learn to write it; move it out of the block",
                where=template.name,
            )


def _require_text(template: ChatTemplate, text: str, spans: list[Span]) -> None:
    """Refuses answers that consist of special tokens alone: the template has left out what the answer is."""
    if not spans:
        raise BadChatError("nothing is learned", "the chat template marks no text of this chat as an answer")
    for begin, end in spans:
        answer = text[begin:end]
        if len(answer) <= _LONGEST_EMPTY and not _body(answer, template.added_tokens):
            raise BadChatError(
                "the chat template leaves out an answer",
                f"the chat template writes only {answer!r} for an answer, so it does not support what the message has, "
                "such as tool_calls",
            )


def _body(answer: str, added_tokens: tuple[str, ...]) -> str:
    """Text of an answer without surrounding whitespace and added tokens."""
    for token in added_tokens:
        answer = answer.replace(token, "")
    return answer.strip()


def _joined(spans: list[Span]) -> list[Span]:
    """Joins spans without text between them."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((begin, end))
    return joined


def _beginning(
    template: ChatTemplate, chat: Chat, text: str, count: int, *, add_generation_prompt: bool = False
) -> int:
    """Length of the first `count` messages of a chat in `text`, the entire chat."""
    start = template.render(chat, count, add_generation_prompt=add_generation_prompt)
    if text.startswith(start):
        return len(start)
    same = next(index for index in range(len(start)) if text[index : index + 1] != start[index])
    what = "the generation prompt after " if add_generation_prompt else ""
    beginning = "the first message" if count == 1 else f"the first {count} messages"
    raise ChatTemplateError(
        f"this chat template does not show where answers begin and end: it renders {what}{beginning} of "
        f"a chat ({roles(chat.messages)}) as {_excerpt(start, same)}, but within the entire chat as "
        f"{_excerpt(text, same)}. {_HINT} around the answers",
        where=template.name,
    )


def _length_with_end(template: ChatTemplate, answer: str, index: int) -> int:
    """Length of an answer without the space after its last token."""
    stripped = answer.rstrip()
    if stripped.endswith(template.added_tokens):
        return len(stripped)
    raise ChatTemplateError(
        f"the chat template ends an answer (message {index}) with {stripped[-_CONTEXT:]!r}, which is not a token that "
        f"ends a turn. A model would not learn to end its answer. {_HINT} that include such a token",
        where=template.name,
    )


def _excerpt(text: str, at: int) -> str:
    begin, end = max(0, at - _CONTEXT), at + _CONTEXT
    return repr(f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}")
