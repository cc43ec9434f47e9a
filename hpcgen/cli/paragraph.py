"""Paragraphs with a label, whose text may come from logs and other files."""

from __future__ import annotations

import shutil
import sys
import textwrap

import click

from hpcgen.redaction import redact
from hpcgen.text import harmless

PIPE_WIDTH = 80


def safe(text: str) -> str:
    """Text of logs and other files for the terminal, without secrets."""
    return harmless(redact(text))


def print_paragraph(label: str, text: str, color: str | None = None) -> None:
    """Prints a paragraph. Paths are not broken, so that they can be copied."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    paragraph = textwrap.TextWrapper(width - len(label), break_long_words=False, break_on_hyphens=False)
    lines = paragraph.wrap(safe(text)) or [""]
    click.echo(click.style(label, fg=color, dim=color is None) + lines[0])
    for line in lines[1:]:
        click.echo(" " * len(label) + line)
