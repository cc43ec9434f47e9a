"""Chat templates of real models: the answers that they show, by hand, and what they render, as transformers does."""

from __future__ import annotations

import copy
import datetime
import io
import json
import re
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jinja2
import pytest

from tests.data.chat_corpora import (
    CHATML,
    MARKED_CHATML,
    MISTRAL,
    SPECIAL_TOKENS,
    TOOLS,
    chat,
    model_template,
    tool_chat,
    write_tokenizer,
)
from trainer.chats.answers import render_answers
from trainer.chats.chat import Chat, read_chat
from trainer.chats.errors import BadChatError, ChatTemplateError
from trainer.chats.files import load_template
from trainer.chats.memory import limited_memory
from trainer.chats.prompts import ChatOptions, texts_of
from trainer.chats.template import ChatTemplate
from trainer.contract.errors import TrainerError

ONE = chat("Hi", "Hello!")
DEVELOPER = {"messages": [{"role": "developer", "content": "Be brief."}, *ONE["messages"]]}
TWO = chat("Hi", "Hello!", "2+2?", "4", system="Be brief.")
VARIABLES = {"bos_token": "<bos>", "eos_token": "<eos>"}

ZEPHYR = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|user|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'system' %}{{ '<|system|>\n' + m.content + eos_token }}\n"
    "{% elif m.role == 'assistant' %}{{ '<|assistant|>\n' + m.content + eos_token }}\n{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}{% endfor %}"
)
"""Traits of Zephyr's template: the generation prompt lacks the newline that begins the answer."""


SPEAKING = tool_chat()
SPEAKING["messages"][1]["content"] = "Let me look."
SCHEMAS = "{{ tools | tojson }}"
QUOTING = {
    "messages": [
        {"role": "user", "content": "Rain in Oslo?"},
        {"role": "tool", "name": "rain", "content": "yes"},
        {"role": "assistant", "content": "It says yes."},
    ]
}
"""The answer quotes what the template may leave out."""
REASONED = {
    "messages": [
        ONE["messages"][0],
        {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
    ]
}
USER_MARKED = MARKED_CHATML.replace("role == 'assistant'", "role == 'user'")
_CALL = "{{ message.tool_calls[0].function.name }}"
TOOLS_OR_TEXT = SCHEMAS + CHATML.replace(
    "{{ message.content }}", f"{{{{ message.content or {_CALL[3:-3]} }}}}"
)
"""Leaves out calls next to a text, as DeepSeek-R1's template does."""
CALLS_ONLY = SCHEMAS + CHATML.replace(
    "{{ message.content }}",
    f"{{% if message.tool_calls %}}{_CALL}{{% else %}}{{{{ message.content }}}}{{% endif %}}",
)
"""Leaves out the text next to calls."""


def calling(function: Any) -> dict[str, Any]:
    """A document in which the assistant calls `function`."""
    answer = {"role": "assistant", "content": "Let me look.", "tool_calls": [{"function": function}]}
    return {"messages": [{"role": "user", "content": "Hi"}, answer]}


def template(source: str, *, date: datetime.date | None = None, name: str = "a.jinja") -> ChatTemplate:
    return ChatTemplate(name, source, special_tokens=VARIABLES, added_tokens=SPECIAL_TOKENS, date=date)


def marked(source: str, document: dict[str, Any], **options: Any) -> str:
    """The rendered chat with its answers in brackets."""
    chat_of = read_chat(copy.deepcopy(document))
    assert isinstance(chat_of, Chat)
    text, spans = render_answers(template(source, **options), chat_of)
    for begin, end in reversed(spans):
        text = f"{text[:begin]}⟦{text[begin:end]}⟧{text[end:]}"
    return text


IM = "<|im_start|>"
HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"
TRUTH: list[tuple[str, dict[str, Any], str]] = [
    (
        "qwen2_5",
        TWO,
        f"{IM}system\nBe brief.<|im_end|>\n{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\n2+2?<|im_end|>\n{IM}assistant\n⟦4<|im_end|>⟧\n",
    ),
    (
        "qwen3",  # it writes an empty thinking block for the only answer
        ONE,
        f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦<think>\n\n</think>\n\nHello!<|im_end|>⟧\n",
    ),
    (
        "qwen3_training",  # generation blocks that include the newline after the turn
        TWO,
        f"{IM}system\nBe brief.<|im_end|>\n{IM}user\nHi<|im_end|>\n"
        f"{IM}assistant\n⟦<think>\n\n</think>\n\nHello!<|im_end|>\n⟧"
        f"{IM}user\n2+2?<|im_end|>\n{IM}assistant\n⟦<think>\n\n</think>\n\n4<|im_end|>\n⟧",
    ),
    (
        "llama3_1",
        TWO,
        f"<bos>{HEADER.format('system')}Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        f"Be brief.<|eot_id|>{HEADER.format('user')}Hi<|eot_id|>{HEADER.format('assistant')}⟦Hello!<|eot_id|>⟧"
        f"{HEADER.format('user')}2+2?<|eot_id|>{HEADER.format('assistant')}⟦4<|eot_id|>⟧",
    ),
    (
        "llama3",
        TWO,
        f"<bos>{HEADER.format('system')}Be brief.<|eot_id|>{HEADER.format('user')}Hi<|eot_id|>"
        f"{HEADER.format('assistant')}⟦Hello!<|eot_id|>⟧{HEADER.format('user')}2+2?<|eot_id|>"
        f"{HEADER.format('assistant')}⟦4<|eot_id|>⟧",
    ),
    (
        "gemma3",
        TWO,
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n⟦Hello!<end_of_turn>⟧\n"
        "<start_of_turn>user\n2+2?<end_of_turn>\n<start_of_turn>model\n⟦4<end_of_turn>⟧\n",
    ),
    ("phi3", ONE, "<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>\n<eos>⟧"),
    (
        "phi3_training",
        TWO,
        "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n⟦Hello!<|end|>\n⟧"
        "<|user|>\n2+2?<|end|>\n<|assistant|>\n⟦4<|end|>\n<eos>⟧",
    ),
    (
        "lfm2_v2",
        TWO,
        f"<bos>{IM}system\nBe brief.<|im_end|>\n{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
        f"{IM}user\n2+2?<|im_end|>\n{IM}assistant\n⟦4<|im_end|>⟧\n",
    ),
    (
        "deepseekv3_training",
        TWO,
        "<bos>Be brief.<｜User｜>Hi⟦<｜Assistant｜>Hello!<｜end▁of▁sentence｜>⟧"
        "<｜User｜>2+2?⟦<｜Assistant｜>4<｜end▁of▁sentence｜>⟧",
    ),
]


@pytest.mark.parametrize(("name", "document", "expected"), TRUTH, ids=[row[0] for row in TRUTH])
def test_answers_of_real_templates(name: str, document: dict[str, Any], expected: str) -> None:
    assert marked(model_template(name), document) == expected


def test_answers_of_templates_with_other_traits() -> None:
    assert marked(CHATML, TWO).count("⟧") == 2
    assert marked(MARKED_CHATML, ONE) == f"{IM}user\nHi<|im_end|>\n{IM}assistant\n⟦Hello!<|im_end|>⟧\n"
    assert marked(ZEPHYR, ONE) == "<|user|>\nHi<eos>\n<|assistant|>⟦\nHello!<eos>⟧\n"
    assert (
        marked(MISTRAL, TWO)
        == "<bos>[INST] Be brief.\n\nHi [/INST]⟦ Hello!<eos>⟧[INST] 2+2? [/INST]⟦ 4<eos>⟧"
    )


def test_the_long_preamble_of_a_template_is_not_learned() -> None:
    cohere = marked(model_template("cohere2"), TWO)
    assert [part.partition("⟧")[0] for part in cohere.split("⟦")[1:]] == [
        "Hello!<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
        "4<|END_RESPONSE|><|END_OF_TURN_TOKEN|>",
    ]
    gptoss = marked(model_template("gptoss"), ONE, date=datetime.date(2026, 1, 2))
    assert "\nCurrent date: 2026-01-02\n" in gptoss
    assert gptoss.endswith("<|start|>assistant⟦<|channel|>final<|message|>Hello!<|return|>⟧")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen2_5",
            [
                '<tool_call>\n{"name": "rain", "arguments": {"city": "Oslo"}}\n</tool_call><|im_end|>',
                "Yes.<|im_end|>",
            ],
        ),
        ("llama3_1", ['{"name": "rain", "parameters": {"city": "Oslo"}}<|eot_id|>', "Yes.<|eot_id|>"]),
        (
            "gptoss",
            [
                ' to=functions.rain<|channel|>commentary json<|message|>{"city": "Oslo"}<|call|>',
                "<|channel|>final<|message|>Yes.<|return|>",
            ],
        ),
        ("lfm2_v2", ["<|tool_call_start|>[rain(city='Oslo')]<|tool_call_end|><|im_end|>", "Yes.<|im_end|>"]),
    ],
)
def test_tool_calls_are_answers_and_results_are_not(name: str, expected: list[str]) -> None:
    text = marked(model_template(name), tool_chat(), date=datetime.date(2026, 1, 2))
    assert [part.partition("⟧")[0] for part in text.split("⟦")[1:]] == expected
    assert text.count("Rain in a city") == 1  # the schema is in the prompt


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "phi3", "deepseek_r1_distill", "deepseekv3", "glm4moe"])
def test_a_template_that_rewrites_earlier_turns_is_refused_by_name(name: str) -> None:
    with pytest.raises(ChatTemplateError, match=r"generation %") as caught:
        marked(model_template(name), TWO, date=datetime.date(2026, 1, 2), name=f"{name}.jinja")
    assert str(caught.value).startswith(f"{name}.jinja: ")


def documented(language: str) -> str:
    """The block of this language in the section about templates that rewrite earlier turns."""
    page = (Path(__file__).parents[2] / "docs/fine-tuning.md").read_text()
    section = page.partition("### Templates that rewrite earlier turns\n")[2].partition("\n## ")[0]
    return section.partition(f"```{language}\n")[2].partition("```")[0]


def with_documented_blocks(source: str) -> str:
    """The template after the documented changes."""
    for hunk in re.split(r"@@ .* @@\n", documented("diff"))[1:]:
        lines = hunk.splitlines(keepends=True)
        before, after = ("".join(line[1:] for line in lines if line[0] in signs) for signs in (" -", " +"))
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    return source


def test_the_documented_generation_blocks_mark_all_answers() -> None:
    source = with_documented_blocks(model_template("qwen3"))
    for document in (TWO, REASONED, tool_chat()):
        found, of_trl = marked(source, document), marked(model_template("qwen3_training"), document)
        assert found.count("⟦") == sum(message["role"] == "assistant" for message in document["messages"])
        assert found == of_trl.replace("\n⟧", "⟧\n")  # whose blocks have the newline after the turn
        assert (
            template(source)
            .render(Chat(document["messages"][:1]), add_generation_prompt=True)
            .endswith(found.partition("⟦")[0][-20:])
        )


@pytest.mark.parametrize("name", ["qwen3", "gptoss", "phi3"])
def test_one_line_per_answer_needs_no_other_template(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The documented program makes the lines."""
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**TWO, "id": 1}) + "\n"))
    exec(documented("py"), {})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [marked(model_template(name), line, date=datetime.date(2026, 1, 2)) for line in lines]
    assert [text.count("⟦") for text in found] == [1, 1]
    assert "Hello!" in found[0].partition("⟦")[2]
    assert "Hello!" in found[1].partition("⟦")[0]
    assert "4" in found[1].partition("⟦")[2]


@pytest.mark.parametrize(
    ("source", "document", "error", "reason"),
    [
        (CHATML.replace("<|im_end|>", ""), ONE, ChatTemplateError, "not a token that ends a turn"),
        (
            MARKED_CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"),
            ONE,
            ChatTemplateError,
            "move the token into the block",
        ),
        (MARKED_CHATML.replace("%}{{ message.content }}<|im", "%}<|im"), ONE, BadChatError, "writes only"),
        (MARKED_CHATML.replace("role == 'assistant'", "role == 'model'"), ONE, BadChatError, "marks no text"),
        (
            MARKED_CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}"),
            ONE,
            ChatTemplateError,
            "ends with 'Hello!', which is not a token that ends a turn",
        ),
        (USER_MARKED, TWO, ChatTemplateError, r"has the text of message 1 \(user\), 'Hi'"),
        (
            "{% for m in messages %}{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% endfor %}",
            ONE,
            ChatTemplateError,
            r"has the text of message 0 \(user\), 'Hi'",
        ),
        (model_template("llama3"), tool_chat(), BadChatError, "tools"),
        (CHATML + "{# tools #}", chat("Hi", "Hello!", tools=TOOLS), BadChatError, "tools"),
        (SCHEMAS + CHATML, SPEAKING, BadChatError, "does not write the call of 'rain' in message 1"),
        (CALLS_ONLY, tool_chat(), BadChatError, "the arguments of the call of 'rain' in message 1"),
        (
            CHATML.replace("{{ message.content }}", "{{ message.content if message.role != 'tool' }}"),
            QUOTING,
            BadChatError,
            "writes nothing of message 1, which has the role 'tool'",
        ),
        (TOOLS_OR_TEXT, SPEAKING, BadChatError, "does not write the call of 'rain' in message 1"),
        (CALLS_ONLY, SPEAKING, BadChatError, "writes nothing of message 1, which has the role 'assistant'"),
        (ZEPHYR, DEVELOPER, BadChatError, "writes nothing of message 0, which has the role 'developer'"),
        (model_template("gemma"), TWO, BadChatError, "System role not supported"),
        (MISTRAL, {"messages": ONE["messages"][::-1]}, BadChatError, "roles must alternate"),
        ("{{ messages[0].nothing.at_all }}", ONE, BadChatError, "has no attribute 'nothing'"),
        (
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            ONE,
            (ChatTemplateError, BadChatError),
            "unsafe|sandbox",
        ),
        ("{% set n = namespace() %}{% set n.__class__ = 1 %}", ONE, ChatTemplateError, "underscored"),
        ("{{ 'x' * 10000000000 }}" + CHATML, ONE, ChatTemplateError, "sandbox forbids: a result of"),
        ("{{ 10000000000 * [1] }}" + CHATML, ONE, ChatTemplateError, "sandbox forbids: a result of"),
        ("{{ 10 ** 10000000000 }}" + CHATML, ONE, ChatTemplateError, "sandbox forbids: a result of"),
        (CHATML, REASONED, BadChatError, "does not write the reasoning of message 1"),
        ("{{ strftime_now('%d') }}", ONE, ChatTemplateError, r"data\.corpus\.chat\.date"),
        ("{% if %}", ONE, ChatTemplateError, r"^a\.jinja:1: .*not valid Jinja"),
    ],
)
def test_refusals(source: str, document: dict[str, Any], error: Any, reason: str) -> None:
    with pytest.raises(error, match=reason):
        marked(source, document)


LOOP = "{{% for a in range(99999) %}}{{% for b in range(99999){} %}}{}{{% endfor %}}{{% endfor %}}"
ENDLESS = {
    "loops": LOOP.format("", ""),
    "loops that know their position": LOOP.format("", "{{ loop.index if loop.last }}"),
    "loops that leave everything out": LOOP.format(" if b < 0", ""),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "long lists": "{% for a in range(99999) %}{% set x = range(9999) | list | sort | sum %}{% endfor %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_takes_too_long_is_refused(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in a thread other than the first, where no signal arrives."""
    monkeypatch.setattr("trainer.chats.sandbox.MAX_CPU_S", 0.05)
    reason = r"^a\.jinja: .* is not done after 0\.05 s of CPU time with a chat of 2 messages\."
    with ThreadPoolExecutor(1) as threads, pytest.raises(ChatTemplateError, match=reason):
        threads.submit(marked, source + CHATML, ONE).result()
    assert marked(CHATML, ONE)  # the next one has its own time


GROW = "{{% set n = namespace(x='aa') %}}{{% for i in range(60) %}}{}{{% endfor %}}"
GROWING = {
    "concatenations": GROW.format("{% set n.x = n.x ~ n.x %}"),
    "blocks": GROW.format("{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"),
    "arguments": "{% macro f(x) %}{{ f(x=x ~ x) }}{% endmacro %}{{ f('a') }}",
    "one format": "{{ '%2000000000d' | format(1) }}",
    "lists in lists": GROW.format("{% set n.x = [n.x, n.x] %}") + "{{ n.x }}",
}


@pytest.mark.parametrize("source", GROWING.values(), ids=GROWING)
def test_a_template_that_fills_the_memory_is_refused_outside_of_jobs(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.chats.memory.MAX_BYTES", 2**26)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with (
        limited_memory(),
        pytest.raises(ChatTemplateError, match="asks for too much memory with a chat of 2"),
    ):
        marked(source + CHATML, ONE)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


BEYOND = {
    "{% set n = namespace(x=2 ** 400000) %}{% for i in range(9) %}{% set n.x = n.x * n.x %}{% endfor %}": "result of",
    "{{ 'a' * 2000000000 }}": "result of",
    "{% for i in [1] %}" * 101 + "{% endfor %}" * 101: "cannot be compiled: IndentationError",
    "{{ " + "9" * 5000 + " }}": "cannot be compiled: ValueError",
}


@pytest.mark.parametrize(("source", "reason"), BEYOND.items(), ids=range(len(BEYOND)))
def test_what_would_take_long_in_a_single_operation_or_cannot_be_compiled_is_refused(
    source: str, reason: str
) -> None:
    with pytest.raises(ChatTemplateError, match=reason):
        marked(source + CHATML, ONE)


def test_a_surrogate_is_no_character() -> None:
    with pytest.raises(BadChatError, match=r"writes U\+D800, which is half of a surrogate pair"):
        marked("{{ '\\ud800' }}" + CHATML, ONE)


def test_loops_of_any_kind_are_rendered() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem is defined }}{% endfor %}"
        "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ loop.last }}{% else %}none{% endfor %}"
        "{% for x in [[1, [2]], [3]] recursive %}{{ loop.depth }}{{ loop(x) if x is iterable else x }}{% endfor %}"
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in nothing %}{% else %}empty{% endfor %}"
        "{% set x | upper %}b{{ messages | length }}{% endset %}{{ x }}"
        "{% for c in 'de' %}{{ c }}{% break %}{% endfor %}"
    )
    found = template(source).render(Chat(ONE["messages"]))
    plain = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).from_string(source)
    assert found == plain.render(messages=ONE["messages"])
    assert found.endswith("a1emptyB2d")


def test_only_the_completion_of_a_conversation_is_learned() -> None:
    messages = TWO["messages"]
    document = {"prompt": messages[:4], "completion": messages[4:]}
    for source in (CHATML, MARKED_CHATML):
        assert marked(source, document).split("⟦")[1:] == ["4<|im_end|>⟧\n"]
        assert marked(source, document).replace("⟦", "").replace("⟧", "") == template(source).render(
            Chat(messages)
        )


def test_conversations_are_messages() -> None:
    turns = [("system", "Be brief."), ("human", "2 + 2?"), ("gpt", "4"), ("user", "3?"), ("assistant", "5")]
    conversation = [{"from": speaker, "value": text} for speaker, text in turns]
    roles = ("system", "user", "assistant", "user", "assistant")
    messages = [
        {"role": role, "content": text, "id": 7} for role, (_, text) in zip(roles, turns, strict=True)
    ]
    expected = marked(CHATML, {"messages": messages})
    assert expected.count("⟦") == 2
    assert marked(CHATML, {"conversations": [{**turn, "id": 7} for turn in conversation]}) == expected
    assert marked(CHATML, {"conversations": messages}) == expected
    beside = {"conversations": conversation[1:], "system": "Be brief."}
    assert marked(CHATML, beside) == expected
    assert marked(CHATML, {**beside, "conversations": conversation}) == expected
    assert marked(CHATML, {**beside, "system": ""}) == expected.partition("<|im_end|>\n")[2]


@pytest.mark.parametrize(
    ("document", "kind", "reason"),
    [
        ({"conversations": [{"from": "bot", "value": "a"}]}, "unknown speaker", '"bot"; the names are human'),
        ({"conversations": [{"from": ["human"], "value": "a"}]}, "unknown speaker", r"conversations\[0\] is"),
        ({"conversations": [{"from": "human", "value": "a"}]}, "no answer", "'assistant'"),
        (
            {"conversations": [{"from": "gpt"}]},
            "content is not text",
            r"conversations\[0\]\.content is missing",
        ),
        ({"conversations": "human: a"}, "'conversations' is not a list of messages", "human: a"),
        ({"conversations": ONE["messages"], "system": 3}, "content is not text", r"system\[0\]\.content"),
        ({"text": "a"}, "no chat", "the keys are 'text'"),
        ({"messages": []}, "'messages' is not a list of messages", "got \\[\\]"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no answer", "'assistant'"),
        ({"messages": [{"role": "human", "content": "a"}]}, "unknown role", '"human"; the roles are'),
        (chat("a", " \n"), "empty answer", "message 1"),
        ({"messages": [{"role": "user"}]}, "content is not text", r"messages\[0\]\.content is missing"),
        (chat("a", [{"type": "text", "text": "b"}]), "content is not text", "must be text"),  # type: ignore[arg-type]
        ({"prompt": "a", "completion": []}, "prompt and completion differ in type", "two strings"),
        ({"prompt": "a", "completion": " "}, "empty answer", "no text"),
        (calling("f"), "a tool call names no function", r'got \{"function": "f"\}'),
        (calling({"name": ["f"]}), "a tool call names no function", r"messages\[1\]: a tool call must"),
        (chat("a", "b", tools="not JSON"), "'tools' is not a list", 'got "not JSON"'),
    ],
)
def test_bad_chats(document: dict[str, Any], kind: str, reason: str) -> None:
    with pytest.raises(BadChatError, match=reason) as caught:
        read_chat(document)
    assert caught.value.kind == kind


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("qwen2_5", ["<|im_end|>"]),
        ("gemma3", ["<end_of_turn>"]),
        ("llama3_1", ["<|eot_id|>"]),
        ("gptoss", ["<|return|>"]),
        ("deepseekv3", ["<｜end▁of▁sentence｜>"]),
        ("glm4moe", []),
    ],
)
def test_the_token_that_ends_an_answer(name: str, tokens: list[str]) -> None:
    """Also for templates that are refused for training."""
    found = template(model_template(name), date=datetime.date(2026, 1, 2))
    assert found.ends_of_turn() == tuple(tokens)


@pytest.mark.parametrize(
    ("name", "variables", "tokens"),
    [
        ("gptoss", {}, ["<|return|>", "<|call|>"]),
        ("qwen2_5", {}, ["<|im_end|>"]),
        ("llama3_1", {"builtin_tools": ["brave_search"]}, ["<|eot_id|>", "<|eom_id|>"]),
    ],
)
def test_a_call_of_a_tool_may_end_with_a_token_of_its_own(
    name: str, variables: dict[str, Any], tokens: list[str]
) -> None:
    """It ends the answer too: the tokens that training learns at the ends of answers are those that end generation."""
    chat_of = read_chat(tool_chat() | {"chat_template_kwargs": variables})
    assert isinstance(chat_of, Chat)
    added = (*SPECIAL_TOKENS, "<|eom_id|>")
    today = datetime.date(2026, 1, 2)
    found = ChatTemplate(name, model_template(name), special_tokens=VARIABLES, added_tokens=added, date=today)
    assert found.ends_of_turn(chat_of) == tuple(tokens)
    text, spans = render_answers(found, chat_of)
    assert {next(filter(text[:end].endswith, tokens), None) for _, end in spans} == set(tokens)


def test_the_date_may_be_chosen() -> None:
    """Without it, even a template that could do without refuses, since its text depends on the day."""
    with pytest.raises(ChatTemplateError, match="today's date"):
        marked(model_template("llama3_2"), ONE)


def test_prompts_get_the_date_of_today(tmp_path: Path) -> None:
    """A corpus needs a date of its own, because it stays; a question is asked today."""
    file = write_tokenizer(tmp_path, "{{ strftime_now('%Y-%m-%d') }}" + CHATML)
    today = datetime.date.today().isoformat()
    for date in (None, "2026-01-02"):
        found = texts_of(
            [{"messages": [{"role": "user", "content": "Hi"}]}], str(file), ChatOptions(date=date)
        )
        assert found.texts == [f"{date or today}{IM}user\nHi<|im_end|>\n{IM}assistant\n"]


def test_prompts_of_which_the_template_leaves_out_a_part_are_refused(tmp_path: Path) -> None:
    file = write_tokenizer(tmp_path)
    prompt = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
    with pytest.raises(TrainerError, match="prompt 1: it has tools, which the chat template does not write"):
        texts_of([prompt], str(file), ChatOptions())


def test_the_prompt_that_a_template_never_ends_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.chats.sandbox.MAX_CPU_S", 0.05)
    source = "{% if messages[0].content == 'Hi' %}" + ENDLESS["loops"] + "{% endif %}" + CHATML
    prompts: list[Any] = [{"messages": [{"role": "user", "content": text}]} for text in ("Hello", "Hi")]
    with pytest.raises(ChatTemplateError, match=r"^prompt 2: .*_config\.json: .* is not done after"):
        texts_of(prompts, str(write_tokenizer(tmp_path, source)), ChatOptions())


def test_all_wrong_chats_are_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(TrainerError, match=r"^prompt 1: the last message has .*\nprompt 3: missing key"):
        texts_of([ONE, "Hi", {}], str(write_tokenizer(tmp_path)), ChatOptions())


def test_generation_blocks_in_others_are_part_of_them() -> None:
    nested = MARKED_CHATML.replace(
        "{{ message.content }}<|im_end|>{% endg",
        "{{ message.content }}{% generation %}<|im_end|>{% endgeneration %}{% endg",
    )
    assert marked(nested, TWO) == marked(MARKED_CHATML, TWO)


def test_files_of_a_tokenizer_that_win_over_others(tmp_path: Path) -> None:
    """chat_template.jinja over tokenizer_config.json, and its special tokens over special_tokens_map.json."""
    file = write_tokenizer(tmp_path, MARKED_CHATML)
    own = "{{ bos_token }}{{ sep_token }}"
    (tmp_path / "chat_template.jinja").write_text(own)
    tokens = {"bos_token": "<s>", "sep_token": {"content": "<eos>"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    found = load_template(file)
    assert found.source == own
    assert found.render(Chat(ONE["messages"])) == "<bos><eos>"
