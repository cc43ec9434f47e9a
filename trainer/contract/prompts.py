"""The prompts of a JSON Lines file: texts, and chats whose next answer is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from trainer.contract.config.choice import text_problem
from trainer.contract.errors import TrainerError
from trainer.contract.wording import counted

Prompt: TypeAlias = "str | dict[str, Any]"
"""A text to continue, or an object with `messages`, which a chat template makes into a text."""

MAX_MISTAKES = 10
"""Number of wrong lines of a file that are listed."""

EXAMPLE = '{"prompt": "Once upon a time"}'


def parse_prompts(path: str, data: bytes) -> list[Prompt]:
    """The prompts in the content of the file `path`.

    Raises:
        TrainerError: lines have no prompt. Lists the first MAX_MISTAKES of them.
    """
    prompts, mistakes = list[Prompt](), list[str]()
    for number, line in _lines(data):
        try:
            prompts.append(_prompt(line))
        except ValueError as error:
            mistakes.append(f"{path}:{number}: {error}")
    if mistakes:
        raise TrainerError(first_mistakes(mistakes))
    if not prompts:
        raise TrainerError(f"{path} has no prompts. Write lines such as {EXAMPLE}")
    return prompts


def first_mistakes(mistakes: Sequence[str]) -> str:
    """The first MAX_MISTAKES of `mistakes`, one per line of the file, and the number of the others."""
    left_out = len(mistakes) - MAX_MISTAKES
    rest = [f"and {counted(left_out, 'line')} more"] if left_out > 0 else []
    return "\n".join([*mistakes[:MAX_MISTAKES], *rest])


def _lines(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the content of each line that is not empty."""
    return ((number, line) for number, line in enumerate(data.split(b"\n"), 1) if line.strip())


def _prompt(line: bytes) -> Prompt:
    """The prompt in a line of JSON.

    Raises:
        ValueError: there is none.
    """
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 text ({error.reason} at byte {error.start} of the line)") from error
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    is_object = isinstance(document, dict)
    if is_object and isinstance(document.get("messages"), list) and "prompt" not in document:
        if problem := text_problem("the chat", json.dumps(document, ensure_ascii=False)):
            raise ValueError(str(problem))
        return dict(document)
    prompt = document.get("prompt") if is_object else None
    if not isinstance(prompt, str):
        raise ValueError(f"expected a line such as {EXAMPLE}, got {text:.60}")
    if problem := text_problem("the prompt", prompt):
        raise ValueError(str(problem))
    return prompt
