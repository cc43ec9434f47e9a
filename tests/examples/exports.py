"""Pairs as hpcgen exports them, the data of the programs in examples."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from hpcgen.cli.main import cli


def run_hpcgen(*words: object) -> None:
    done = CliRunner().invoke(cli, [*map(str, words)])
    assert done.exit_code == 0, done.output


def export_pair(documents: Path, model: Path, directory: Path, *options: str) -> Path:
    """The documents as hpcgen exports them for other programs."""
    tokenizer = ("--tokenizer", model / "tokenizer.json", "--eod-token", "<|end|>")
    run_hpcgen("data", "tokenize", documents, "--output-prefix", directory / "pair", *tokenizer, *options)
    run_hpcgen("data", "export", directory / "pair", "--output", directory / "export")
    return directory / "export"
