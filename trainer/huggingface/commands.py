"""The commands of `python -m trainer.huggingface`, given their arguments. Imports torch, which takes seconds."""

from __future__ import annotations

import argparse
import sys

from trainer.huggingface.adapter_exporting import export_adapter
from trainer.huggingface.adapter_importing import import_adapter
from trainer.huggingface.averaging import average, write_moving_average
from trainer.huggingface.exporting import Options, export
from trainer.huggingface.importing import import_model
from trainer.inference.checkpoint import find_checkpoint


def _export(arguments: argparse.Namespace) -> None:
    options = Options(
        family=arguments.family,
        dtype=arguments.dtype,
        vocab_size=arguments.vocab_size,
        tokenizer=arguments.tokenizer,
        eos_token=arguments.eos_token,
        chat_template=arguments.chat_template,
        chat_template_name=arguments.chat_template_name,
        base_model=arguments.base_model,
        check=arguments.check,
    )
    write = export_adapter if arguments.adapter else export
    write(find_checkpoint(arguments.source).path, arguments.to, options, _report)


def _import(arguments: argparse.Namespace) -> None:
    if arguments.base is None:
        import_model(arguments.source, arguments.to, _report)
    else:
        import_adapter(arguments.source, find_checkpoint(arguments.base).path, arguments.to, _report)


def _average(arguments: argparse.Namespace) -> None:
    if arguments.ema:
        write_moving_average(arguments.source, arguments.to, _report)
    else:
        average(arguments.source, arguments.last, arguments.to, _report)


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


COMMANDS = {"export": _export, "import": _import, "average": _average}
"""Names of commands -> their functions."""
