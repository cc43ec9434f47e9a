"""`python -m trainer.huggingface`: the command line around export, import and averages."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import Any

from trainer.contract.errors import Exit, TrainerError
from trainer.distributed import device
from trainer.metrics.console import quiet_libraries


def main() -> int:
    """Parse the arguments and convert. Returns the exit status."""
    arguments = _parser().parse_args()
    signal.signal(signal.SIGTERM, _leave)
    quiet_libraries()
    device.hide_gpus()  # conversions compute on the CPU, and transformers asks for GPUs before they are compared
    try:
        # imports torch, which mistakes in the arguments do not need
        from trainer.huggingface.commands import COMMANDS

        COMMANDS[arguments.command](arguments)
    except TrainerError as error:
        print(error, file=sys.stderr)
        return Exit.REFUSED
    except OSError as error:
        if error.filename is None:
            raise  # a bug
        print(f"{error.filename} cannot be used ({error.strerror})", file=sys.stderr)
        return Exit.REFUSED
    except KeyboardInterrupt:
        return 130
    return Exit.DONE


def _leave(number: int, frame: Any) -> None:
    """End through `finally` clauses, which remove what is half-written."""
    raise SystemExit(Exit.TERMINATED)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.huggingface",
        description="Converts checkpoints to and from Hugging Face's format, and averages them.",
    )
    commands = parser.add_subparsers(required=True, dest="command", metavar="COMMAND")
    to_huggingface = commands.add_parser("export", help="write a checkpoint as a Hugging Face directory")
    to_huggingface.add_argument(
        "source",
        type=Path,
        metavar="CHECKPOINT",
        help="an iter_... directory, or a directory of checkpoints or of a run",
    )
    to_huggingface.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory")
    to_huggingface.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="default: the checkpoint's")
    to_huggingface.add_argument(
        "--family", metavar="NAME", help="default: the first that can express the model"
    )
    to_huggingface.add_argument(
        "--vocab-size", type=int, metavar="N", help="number of rows that are not padding"
    )
    to_huggingface.add_argument(
        "--tokenizer", type=Path, metavar="PATH", help="gpt2, a tokenizer.json, or a directory"
    )
    to_huggingface.add_argument(
        "--adapter", action="store_true", help="write the LoRA adapters for PEFT, without their base model"
    )
    to_huggingface.add_argument(
        "--base-model", metavar="NAME", help="with --adapter: the base model. Default: that of the import"
    )
    to_huggingface.add_argument("--eos-token", metavar="TOKEN", help="token at the end of a document")
    to_huggingface.add_argument(
        "--chat-template", type=Path, metavar="FILE", help="chat template, in place of the tokenizer's"
    )
    to_huggingface.add_argument(
        "--chat-template-name", metavar="NAME", help="one of the tokenizer's chat templates, as its default"
    )
    to_huggingface.add_argument(
        "--check", action="store_true", help="compare logits with those of transformers"
    )
    from_huggingface = commands.add_parser("import", help="write a Hugging Face directory as a checkpoint")
    from_huggingface.add_argument(
        "source", type=Path, metavar="HF_DIR", help="a directory with config.json, or with PEFT's adapters"
    )
    from_huggingface.add_argument(
        "--base", type=Path, metavar="CHECKPOINT", help="for adapters: the checkpoint of their base model"
    )
    from_huggingface.add_argument(
        "--to", type=Path, required=True, metavar="DIR", help="new directory of checkpoints"
    )
    mean = commands.add_parser("average", help="write an average of the weights of a run")
    mean.add_argument(
        "source", type=Path, metavar="RUN", help="the directory of a run, or of checkpoints of the trainer"
    )
    which = mean.add_mutually_exclusive_group(required=True)
    which.add_argument("--last", type=int, metavar="N", help="number of checkpoints")
    which.add_argument("--ema", action="store_true", help="the moving average in the newest checkpoint")
    mean.add_argument("--to", type=Path, required=True, metavar="DIR", help="new directory of checkpoints")
    return parser


# Nothing may run at import, since spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
