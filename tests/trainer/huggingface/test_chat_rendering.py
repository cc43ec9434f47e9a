"""Chat templates render here what they render in transformers."""

from __future__ import annotations

import copy
import datetime

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.data.chat_corpora import chat, model_template, model_templates, tool_chat
from tests.selection import select
from trainer.chats.chat import Chat, read_chat
from trainer.chats.errors import BadChatError
from trainer.chats.template import ChatTemplate

CAPTURES = ("diffusion_gemma_training",)
"""Templates that capture a message before they write it. transformers then counts from the wrong place."""
OFTEN = ("gptoss", "llama3_2", "qwen3_training", "gemma4_v5", "cohere2", "deepseekv3_training", "glm4moe")
VARIABLES = {"bos_token": "<bos>", "eos_token": "<eos>"}
DOCUMENTS = (
    chat("Hi", "Hello!"),
    chat("Hi", "Hello!", "2+2?", "4", system="Be brief."),
    chat("über <a&b>", "naïve 😀 'x' \"y\""),
    tool_chat(),
)


@pytest.mark.parametrize("name", select(model_templates(), OFTEN))
def test_rendering_is_that_of_transformers(name: str) -> None:
    """The text and the generation blocks are equal, or both refuse the chat."""
    source, today = model_template(name), datetime.datetime.now(tz=datetime.timezone.utc).astimezone().date()
    ours = ChatTemplate(name, source, special_tokens=VARIABLES, added_tokens=(), date=today)
    rendered = 0
    for document in DOCUMENTS:
        read = read_chat(copy.deepcopy(document))
        assert isinstance(read, Chat)
        try:
            texts, blocks = render_jinja_template(
                [copy.deepcopy(read.messages)],
                tools=read.tools,
                chat_template=source,
                return_assistant_tokens_mask=ours.marks_answers,
                **VARIABLES,
            )
        except Exception:  # whatever a template raises
            with pytest.raises(BadChatError):
                ours.render(read)
            continue
        text, spans = ours.render_marked(read)
        assert text == texts[0]
        if ours.marks_answers and name not in CAPTURES:
            assert spans == blocks[0]
        rendered += 1
    assert rendered or "llava" in name  # which renders only lists of parts
