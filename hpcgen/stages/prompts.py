"""The prompts of a run: the files that answering them needs, and their mistakes, found before a job is queued."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import tokenizer_name, tokenizer_problems
from hpcgen.errors import Problem
from hpcgen.planning.inputs import Input, chat_template_file, tokenizer_files
from hpcgen.planning.paths import chat_of
from trainer.contract.errors import TrainerError
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.prompts import Prompt, parse_prompts


def prompt_files(config: RunConfig, path: str) -> tuple[Input, ...]:
    """The file of the prompts, the tokenizer and the chat template."""
    return (Input(path), *tokenizer_files(config), *chat_template_file(config))


def prompt_problems(
    config: RunConfig, path: str, key: str, max_prompts: int | None = None
) -> Iterator[Problem]:
    """Yields the mistakes of the prompts in the file `path`, which `key` names. Missing files are not among them.

    Chats are rendered as in the job. By default, there may be any number of prompts.
    """
    yield from tokenizer_problems(config.data.tokenizer, key)
    try:
        prompts = parse_prompts(path, read_bytes(Path(path)))
        if any(not isinstance(prompt, str) for prompt in prompts) and _can_render(config):
            _render(prompts, config)
    except FileNotFoundError:
        return  # the inputs say so
    except TrainerError as error:
        yield Problem(key, f"cannot be used: {error}")
    except OSError as error:
        yield Problem(key, f"cannot be read: {error.strerror}")
    else:
        if max_prompts is not None and len(prompts) > max_prompts:
            reason = f"has {len(prompts)} prompts, and every evaluation would wait for their answers"
            yield Problem(key, reason, f"keep at most {max_prompts}")


def _can_render(config: RunConfig) -> bool:
    """Returns whether the files of the tokenizer and the template are there."""
    return all(Path(item.path).exists() for item in (*tokenizer_files(config), *chat_template_file(config)))


def _render(prompts: list[Prompt], config: RunConfig) -> None:
    """Renders chats as the trainer does.

    Raises:
        TrainerError: a chat or the template cannot be used.
    """
    # imports Jinja's sandbox, which few runs need
    from trainer.chats.memory import limited_memory
    from trainer.chats.prompts import ChatOptions, texts_of

    chat = chat_of(config)
    options = ChatOptions(chat.chat_template_file, chat.chat_template, chat.date)
    with limited_memory():
        texts_of(prompts, tokenizer_name(config.data.tokenizer), options)
