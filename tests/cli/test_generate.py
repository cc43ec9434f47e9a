"""hpcgen generate refuses what it cannot do before it starts the trainer."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from hpcgen.checkpoints import generation
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from tests.cli.command import hpcgen
from tests.recorded_run import start, step, write_checkpoint, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run", [start(), step(1)])
    write_checkpoint(run / "checkpoints", 100)
    return run


@pytest.fixture
def passed_on(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments for the trainer."""
    arguments: list[str] = []

    def record(given: list[str]) -> int:
        arguments.extend(given)
        if "--prompts" in given:
            arguments.append(Path(given[given.index("--prompts") + 1]).read_text())
        return 7

    monkeypatch.setattr("hpcgen.checkpoints.generation.run_generation", record)
    return arguments


def test_a_prompt_is_passed_in_a_file(run: Path, passed_on: list[str]) -> None:
    """Other users can see the arguments of a process."""
    secret = "a secret\n--device"
    done = hpcgen(
        *("generate", "--checkpoint", run, "--tokenizer", "bytes", "--prompt", secret),
        *("--stop", "--x", "--top-k", 3, "--temperature", 0.5),
    )
    assert done.status == 7
    checkpoint, *arguments, prompts = passed_on
    assert checkpoint == str(run / "checkpoints/iter_0000100")
    assert json.loads(prompts) == {"prompt": secret}
    file = arguments.pop()
    assert arguments == [
        *("--temperature", "0.5", "--top-k", "3", "--stop=--x", "--tokenizer", "bytes", "--prompts"),
    ]
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--prompt", "a\udcff"), "--prompt has U+DCFF at character 2, which is half of a surrogate pair"),
        (("--prompt", "a", "--stop", "\udcff"), "--stop has U+DCFF at character 1"),
        (("--prompt", "x", "--tokenizer", "gpt2"), "no checkpoint is named; use --checkpoint PATH, or -c"),
        (("--checkpoint", "run", "--prompt", "x"), "a checkpoint does not record its tokenizer; use -c"),
        (("--checkpoint", "run", "--tokenizer", "gpt2"), "no prompt, and standard input is not a terminal"),
        (("--checkpoint", "run", "--prompt", "x", "--prompts", "y"), "--prompt and --prompts both give"),
        (("--checkpoint", "none", "--prompt", "x", "--tokenizer", "gpt2"), "none: no such directory"),
        (("--set", "a=b", "--prompt", "x"), "--set requires a run file"),
        (
            ("--checkpoint", "run", "--chat", "--prompts", "y"),
            "--chat has no effect with --prompts; remove it",
        ),
    ],
)
def test_refusals(
    arguments: tuple[str, ...],
    message: str,
    run: Path,
    passed_on: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    done = hpcgen("generate", *arguments)
    assert (done.status, done.stdout, passed_on) == (2, "", [])
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1


def test_the_tokenizer_of_a_run_file(tmp_path: Path) -> None:
    vocabulary, merges = tmp_path / "a.json", tmp_path / "b.txt"
    vocabulary.write_text('{"a": 0, "<|endoftext|>": 1}')
    merges.write_text("#version: 0.2\n")
    config = TokenizerConfig(vocab_file=str(vocabulary), merges_file=str(merges))
    with generation.tokenizer_arguments(config) as arguments:
        assert arguments[0] == "--tokenizer"
        directory = Path(arguments[1])
        assert (directory / "vocab.json").read_text() == vocabulary.read_text()
        assert (directory / "merges.txt").read_text() == merges.read_text()
    assert not directory.exists()
    with generation.tokenizer_arguments(TokenizerConfig(kind="bytes")) as arguments:
        assert arguments == ["--tokenizer", "bytes"]
    with (
        pytest.raises(HpcgenError, match="cannot read the tokenizer file"),
        generation.tokenizer_arguments(TokenizerConfig(kind="huggingface", tokenizer_file="/none.json")),
    ):
        pass


def test_a_message_is_passed_with_the_chat_template_of_the_run(passed_on: list[str], tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text(
        "name: a\ncluster: local\npreset: tiny\npaths: {run_dir: run}\n"
        "data: {corpus: {directory: data, source: {directory: chats}, chat: {chat_template_file: own.jinja}}}\n"
    )
    write_checkpoint(tmp_path / "run/checkpoints", 100)
    assert hpcgen("generate", "-c", run, "--prompt", "Hi", "--chat").status == 7
    assert json.loads(passed_on[-1]) == {"messages": [{"role": "user", "content": "Hi"}]}
    assert f"--chat-template={tmp_path / 'own.jinja'}" in passed_on


def test_a_chat_is_typed(run: Path, passed_on: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    assert hpcgen("generate", "--checkpoint", run, "--tokenizer", "gpt2", "--chat").status == 7
    assert passed_on[-1] == "--chat"
