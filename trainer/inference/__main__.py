"""`python -m trainer.inference`: continues prompts from a file or a terminal.

With several ranks (torchrun, srun), every rank runs the same command. Rank 0 reads the prompts and writes the results.
Ranks beyond TP x PP hold further replicas of the model, which share the prompts of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from trainer.chats.prompts import ChatOptions, Texts, texts_of
from trainer.contract.errors import Exit, ReportedByRank0Error, TrainerError
from trainer.contract.files.run_directory import publish
from trainer.contract.prompts import Prompt, parse_prompts
from trainer.contract.wording import counted
from trainer.distributed.rendezvous import Ranks, find_ranks
from trainer.faults.stopping import announce, leave
from trainer.inference.checkpoint import find_checkpoint
from trainer.inference.generation import Completion, Options, generate
from trainer.inference.start import prepare_device
from trainer.inference.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from trainer.inference.model import Model

T = TypeVar("T")

WAIT_S = 24 * 3600
"""Time that replicas wait for each other."""

BROKEN_PIPE = 141
"""Exit status if the reader of the results has gone, as of a process that SIGPIPE ends."""


def main() -> int:
    """Parse the arguments and generate. Returns the exit status."""
    arguments = _parser().parse_args()
    try:
        ranks = find_ranks(os.environ)
        with _same_on_all_ranks():
            found = _early_texts(arguments, ranks)
        model, tokenizer = _load(arguments, ranks)
        with _same_on_all_ranks():
            if arguments.prompts is None:
                _converse(model, tokenizer, arguments, ranks)
            else:
                _answer(model, tokenizer, found, arguments, ranks)
        if ranks.world_size > 1:
            from trainer.distributed import groups

            groups.finalize()
    except TrainerError as error:
        announce(error, None)
        leave(error.exit_code)
    except ReportedByRank0Error:
        leave(Exit.FAULT)
    except KeyboardInterrupt:
        leave(130)
    except BrokenPipeError:
        os._exit(BROKEN_PIPE)  # flushing would fail again
    return Exit.DONE


def _load(arguments: argparse.Namespace, ranks: Ranks) -> tuple[Model, Tokenizer]:
    with _same_on_all_ranks():
        _options(arguments)  # refuse wrong options before the weights are read
        found = find_checkpoint(arguments.checkpoint)
        tokenizer = load_tokenizer(arguments.tokenizer, arguments.eod_token)
        pipeline = arguments.pipeline_model_parallel_size
        tensor = arguments.tensor_model_parallel_size or max(1, ranks.world_size // pipeline)
        if ranks.world_size % (tensor * pipeline):
            raise TrainerError(
                f"TP x PP = {tensor} x {pipeline} = {tensor * pipeline}, but the number of ranks is {ranks.world_size} "
                f"(from {ranks.source}). Launch a multiple of {tensor * pipeline} ranks, or set "
                "--tensor-model-parallel-size and --pipeline-model-parallel-size to fit"
            )
        if arguments.prompts is None and ranks.world_size != tensor * pipeline:
            raise TrainerError("several replicas of a model need a file with prompts. Name it with --prompts")
    gc.disable()  # imported objects are never garbage, and scanning them takes a fifth of the import time
    device = prepare_device(arguments.device)
    from trainer.inference.loading import load  # imports megatron.core: after `prepare_device`

    gc.freeze()
    gc.enable()
    model = load(
        found,
        ranks,
        device=device,
        precision=arguments.precision,
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        vocab_size=tokenizer.size,
    )
    with _same_on_all_ranks():
        tokenizer.check_fits(model.vocab_size)
    if model.why_slow and ranks.rank == 0:
        print(model.why_slow, file=sys.stderr)
    return model, tokenizer


@contextlib.contextmanager
def _same_on_all_ranks() -> Iterator[None]:
    """Mark errors that every rank raises, so that only rank 0 reports them."""
    try:
        yield
    except TrainerError as error:
        raise error.on_all_ranks() from error


def _options(arguments: argparse.Namespace, ends: tuple[str, ...] = ()) -> Options:
    """The options for generation. Each of `ends` ends an answer in a chat."""
    values = {field.name: getattr(arguments, field.name) for field in dataclasses.fields(Options)}
    return Options(**values | {"stop": (*arguments.stop, *ends)})


def _answer(
    model: Model, tokenizer: Tokenizer, found: Texts | None, arguments: argparse.Namespace, ranks: Ranks
) -> None:
    """Continue the prompts of a file. `found` are those that have been read early."""
    found = _from_rank_0(lambda: found or _texts(arguments), ranks)
    prompts, options = found.texts, _options(arguments, found.ends)
    # A terminal shows a single text while it is generated.
    is_shown = len(prompts) == 1 and not arguments.json and not arguments.output and sys.stdout.isatty()
    started, num_tokens, lines = time.monotonic(), 0, []
    on_text = _print if is_shown and ranks.rank == 0 else None
    completions = generate(model, tokenizer, prompts, options, on_text)
    if model.replica[1] > 1:
        completions = _from_replicas(model, completions)
    for completion in completions:
        num_tokens += len(completion.tokens)
        if arguments.output is not None:
            lines.append(_json(completion))
        elif ranks.rank == 0:
            _show(completion, arguments.json, with_prompt=len(prompts) > 1, is_shown=is_shown)
    if ranks.rank != 0:
        return
    if arguments.output is not None:
        _write(arguments.output, "".join(lines))
    if arguments.json or arguments.output is not None or len(prompts) > 1:
        seconds = time.monotonic() - started
        print(
            f"{counted(len(prompts), 'prompt')}, {counted(num_tokens, 'new token')} in {seconds:.1f} s "
            f"({num_tokens / max(seconds, 1e-9):,.0f} tokens/s)",
            file=sys.stderr,
        )


def _from_replicas(model: Model, completions: Iterator[Completion]) -> Iterator[Completion]:
    """The completions of all replicas in the order of the prompts, on rank 0."""
    from trainer.distributed import groups

    groups.set_group_timeouts(WAIT_S)  # the first replica to finish waits for the last one
    replica, num_replicas = model.replica
    own = [(replica + index * num_replicas, completion) for index, completion in enumerate(completions)]
    return (completion for _, completion in groups.gathered(own if model.reports else []))


def _write(path: Path, text: str) -> None:
    """Write the results at once, so that a file that exists is complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        publish(path, text)
    except OSError as error:
        raise TrainerError(f"{path} cannot be written: {error.strerror}", retry=True) from error
    print(f"texts: {path}", file=sys.stderr)


def _converse(model: Model, tokenizer: Tokenizer, arguments: argparse.Namespace, ranks: Ranks) -> None:
    """Continue lines typed on a terminal, until its end. In a chat, a line is the user's next message."""
    messages: list[dict[str, str]] = []
    while (line := _from_rank_0(_read_line, ranks)) is not None:
        asked = [*messages, {"role": "user", "content": line}]
        prompt: Prompt = {"messages": asked} if arguments.chat else line
        on_text = _print if ranks.rank == 0 else None
        try:
            found = _from_rank_0(lambda prompt=prompt: _as_texts([prompt], arguments), ranks)  # type: ignore[misc]
            options = _options(arguments, found.ends)
            for completion in generate(model, tokenizer, found.texts, options, on_text):
                _print("\n" if ranks.rank == 0 else "")
                messages = [*asked, {"role": "assistant", "content": completion.text}]
        except TrainerError as error:  # a prompt that is too long
            restart = ". The chat begins again with the next line" if messages else ""
            _print(f"{error}{restart}\n" if ranks.rank == 0 else "")
            messages = []
    _print("\n" if ranks.rank == 0 else "")


def _from_rank_0(function: Callable[[], T], ranks: Ranks) -> T:
    """The result of `function` on rank 0, on every rank."""
    if ranks.world_size == 1:
        return function()
    from trainer.distributed.groups import from_rank_0

    return from_rank_0(function)


def _read_line() -> str | None:
    try:
        return input("> ")
    except EOFError:
        return None


def _show(completion: Completion, as_json: bool, *, with_prompt: bool, is_shown: bool) -> None:
    if as_json:
        print(_json(completion), end="", flush=True)
    elif is_shown:
        _print("\n")
    else:
        _print(f"{completion.prompt}{completion.text}\n\n" if with_prompt else f"{completion.text}\n")


def _json(completion: Completion) -> str:
    return json.dumps(dataclasses.asdict(completion), ensure_ascii=False) + "\n"


def _print(text: str) -> None:
    """Print text at once. On a terminal, control characters are replaced: a model may write any byte."""
    if sys.stdout.isatty():
        text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _early_texts(arguments: argparse.Namespace, ranks: Ranks) -> Texts | None:
    """The prompts before the weights are read, so that mistakes in them cost no time. None if only rank 0 has them."""
    if arguments.prompts is None or (arguments.prompts == "-" and ranks.world_size > 1):
        return None
    return _texts(arguments)


def _texts(arguments: argparse.Namespace) -> Texts:
    """The prompts as texts.

    Raises:
        TrainerError: the file cannot be used, or a chat cannot be rendered.
    """
    return _as_texts(_read_prompts(arguments.prompts), arguments)


def _as_texts(prompts: Sequence[Prompt], arguments: argparse.Namespace) -> Texts:
    options = ChatOptions(arguments.chat_template, arguments.chat_template_name, arguments.chat_date)
    return texts_of(prompts, arguments.tokenizer, options)


def _read_prompts(path: str) -> list[Prompt]:
    """The prompts of a JSON Lines file; "-" is standard input.

    Raises:
        TrainerError: the file cannot be read, or lines have no prompt.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
    except OSError as error:
        raise TrainerError(f"{error.strerror}. Name a JSON Lines file with prompts", where=path) from error
    return parse_prompts(path, data)


def _parser() -> argparse.ArgumentParser:
    defaults = Options()
    parser = argparse.ArgumentParser(
        prog="python -m trainer.inference", description="Continues prompts with a trained model."
    )
    parser.add_argument(
        "checkpoint", type=Path, help="an iter_... directory, or a directory of checkpoints or of a run"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSON Lines with prompts; - is standard input")
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="gpt2|bytes|PATH",
        help="tokenizer by name, a tokenizer.json, or a directory with tokenizer files",
    )
    parser.add_argument("--eod-token", metavar="TOKEN", help="token at the end of a document")
    parser.add_argument(
        "--chat", action="store_true", help="without --prompts: each line is a message of the user in a chat"
    )
    parser.add_argument("--chat-template", metavar="FILE", help="default: the tokenizer's")
    parser.add_argument("--chat-template-name", metavar="NAME", help="one of several templates")
    parser.add_argument(
        "--chat-date", metavar="YYYY-MM-DD", help="date for templates that write today's date"
    )
    parser.add_argument("--json", action="store_true", help="write JSON Lines")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="write JSON Lines into this file, once all texts are done"
    )
    parser.add_argument("--max-new-tokens", type=int, metavar="N", default=defaults.max_new_tokens)
    parser.add_argument("--temperature", type=float, metavar="T", default=defaults.temperature)
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--repetition-penalty", type=float, metavar="F", default=defaults.repetition_penalty)
    parser.add_argument("--stop", action="append", metavar="STRING", default=[])
    parser.add_argument("--seed", type=int, metavar="N", default=defaults.seed)
    parser.add_argument("--batch-size", type=int, metavar="N", default=defaults.batch_size)
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: a GPU if there is one")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: as in training")
    parser.add_argument(
        "--tensor-model-parallel-size", type=int, metavar="N", help="default: ranks / pipeline stages"
    )
    parser.add_argument("--pipeline-model-parallel-size", type=int, metavar="N", default=1)
    return parser


# Nothing may run at import, since spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
