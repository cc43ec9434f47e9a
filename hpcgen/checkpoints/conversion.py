"""Runs the trainer's conversion from and to Hugging Face's format in another process, since hpcgen has no torch."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from hpcgen.config import tokenizer as tokenizers
from hpcgen.config.tokenizer import GPT2_FILES, TokenizerConfig, tokenizer_name, tokenizer_problems
from hpcgen.errors import HpcgenError
from hpcgen.slurm.processes import end_with_parent, term_exits
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.index_header import is_complete

MODULE = "trainer.huggingface"


def convert(arguments: list[str], on_line: Callable[[str], None]) -> int:
    """Runs `python -m trainer.huggingface ARGUMENTS` and passes each line of its output on. Returns its status.

    Raises:
        ModuleNotFoundError: torch or safetensors is not installed.
    """
    for module in ("safetensors", "torch"):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)
    # A local folder named trainer must not be imported.
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", MODULE, *arguments]
    with (
        term_exits(),
        subprocess.Popen(
            command,
            env=environment,
            preexec_fn=end_with_parent,
            text=True,
            errors="replace",
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                on_line(line.rstrip("\n"))
        except BaseException:
            process.terminate()  # it removes what is half-written
            raise
    return process.returncode


def require_tokenizer(checkpoint: Checkpoint, tokenizer: TokenizerConfig) -> None:
    """Checks that `tokenizer` made the pairs that a checkpoint was trained with.

    Pairs that no longer exist are skipped. Without the extra `data`, nothing is checked.

    Raises:
        HpcgenError: another tokenizer made one of them.
    """
    try:
        from hpcgen.data.pair_tokenizers import other_tokenizers  # needs the extra `data`
    except ModuleNotFoundError:
        return
    data = (checkpoint.record or {}).get("data") or {}
    prefixes = [Path(each["prefix"]) for name in ("datasets", "train") for each in data.get(name) or ()]
    there = list(filter(is_complete, prefixes))
    for prefix, difference in other_tokenizers(tokenizer, there, data.get("eod_id")).items():
        raise HpcgenError(
            f"{checkpoint.path} was trained with {prefix}, which was made with another tokenizer: "
            + difference.replace("data.tokenizer", "the one to export"),
            "name the tokenizer that made the pair",
        )


@contextlib.contextmanager
def tokenizer_arguments(config: TokenizerConfig) -> Iterator[list[str]]:
    """Arguments of an export for the tokenizer of a run. Its files exist until the end of the block.

    Raises:
        HpcgenError: a file is missing, or transformers has no such tokenizer.
    """
    if config.kind == "bytes":
        raise HpcgenError(
            "data.tokenizer.kind = bytes cannot be exported, because transformers has no such tokenizer",
            "leave out -c and --tokenizer to export only the model",
        )
    eod = tokenizers.eod_token(config)
    end = ("--eos-token", eod) if eod else ()
    if config.kind == "huggingface":
        tokenizers.tokens(config)
        yield ["--tokenizer", str(config.tokenizer_file), *end]
        return
    files = tokenizers.gpt2_files(config)
    for file in files:
        tokenizers.read_file(file)  # checks the hash of the shipped files
    if config.vocab_file is None or not any(tokenizer_problems(config, "")):
        yield ["--tokenizer", tokenizer_name(config), *end]
        return
    with tempfile.TemporaryDirectory(prefix="hpcgen-tokenizer-") as directory:
        for file, name in zip(files, GPT2_FILES, strict=True):
            shutil.copyfile(file, Path(directory, name))
        yield ["--tokenizer", directory, *end]
