"""Runs the trainer's text generation in a process of its own, since hpcgen does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.tokenizer import TokenizerConfig
from hpcgen.errors import HpcgenError
from hpcgen.slurm.processes import end_with_parent, term_exits

MODULE = "trainer.inference"
PACKAGES = {"torch": "torch", "megatron": "megatron-core", "tokenizers": "tokenizers"}
"""Module -> package that installs it."""


def run_generation(arguments: Sequence[str]) -> int:
    """Runs `python -m trainer.inference ARGUMENTS` with this process's input and output. Returns its status.

    Raises:
        HpcgenError: packages that it needs are not installed.
    """
    if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
        needs = f"hpcgen generate needs {', '.join(missing)}"
        raise HpcgenError(f"{needs}. Install it with: pip install 'hpcgen[train,data]'")
    # A local folder named trainer must not be imported.
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", MODULE, *arguments]
    with term_exits(), subprocess.Popen(command, env=environment, preexec_fn=end_with_parent) as process:
        try:
            return process.wait()
        except BaseException:
            process.terminate()
            raise


@contextlib.contextmanager
def prompt_file(prompt: Mapping[str, Any]) -> Iterator[Path]:
    """A private file with one prompt. Other users can see the arguments of a process, but not this file."""
    with tempfile.TemporaryDirectory(prefix="hpcgen-prompt-") as directory:
        path = Path(directory, "prompt.jsonl")
        path.write_text(json.dumps(prompt) + "\n")
        yield path


@contextlib.contextmanager
def tokenizer_arguments(config: TokenizerConfig) -> Iterator[list[str]]:
    """Arguments that name the tokenizer of a run. Its files exist until the end of the block.

    Raises:
        HpcgenError: a key is missing, or a file is missing or invalid.
    """
    for problem in tokenizers.problems(config):
        raise HpcgenError(f"{problem.path} {problem.reason}", problem.hint)
    token = config.eod_token
    end = ["--eod-token", token] if token is not None else []
    if config.kind != "bytes":
        tokenizers.tokens(config)
    if config.kind == "huggingface":
        yield ["--tokenizer", str(Path(str(config.tokenizer_file)).absolute()), *end]
    elif config.vocab_file is None:
        yield ["--tokenizer", config.kind, *end]
    else:
        with tempfile.TemporaryDirectory(prefix="hpcgen-tokenizer-") as directory:
            for file, name in zip(tokenizers.gpt2_files(config), ("vocab.json", "merges.txt"), strict=True):
                Path(directory, name).symlink_to(file.absolute())
            yield ["--tokenizer", directory, *end]
