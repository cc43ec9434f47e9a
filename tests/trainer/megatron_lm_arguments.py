"""Parses and checks arguments with Megatron-LM's own code, on a machine without GPUs.

usage: python tests/trainer/megatron_lm_arguments.py CHECKOUT < ARGUMENTS

CHECKOUT is Megatron-LM's source; megatron.core is the installed one, so the versions should be the same. A line of
ARGUMENTS is a JSON object of names and values of parsed arguments, with world_size. For each, a line of the output
is a JSON string: why validate_args refuses them, or "".
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def main(checkout: Path) -> None:
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    # Last, so that megatron.core is the installed one: both are parts of the namespace package megatron.
    sys.path += [str(checkout)]
    sys.path.insert(0, str(ROOT))
    from tests.trainer.megatron_lm_driver import import_with_fake_triton, stand_in_for_gpus
    from trainer.distributed import device

    device.stand_in_for_cuda()
    import_with_fake_triton("megatron.core.transformer.custom_layers.batch_invariant_kernels")
    stand_in_for_gpus()
    for line in sys.stdin:
        with contextlib.redirect_stdout(sys.stderr):
            refusal = refused(json.loads(line))
        print(json.dumps(refusal), flush=True)


def refused(wanted: dict[str, Any]) -> str:
    """Why Megatron-LM refuses these arguments."""
    from megatron.training import arguments

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(wanted.pop("world_size"))}
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    sys.argv = ["pretrain_gpt.py", *options(parser, wanted)]
    try:
        arguments.validate_args(arguments.parse_args())
    except (AssertionError, ValueError, RuntimeError, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def options(parser: argparse.ArgumentParser, wanted: Mapping[str, Any]) -> Iterator[str]:
    """The options that set these values, where they are not the defaults."""
    for action in parser._actions:
        value = wanted.get(action.dest, action.default)
        if value is None or value == action.default or not action.option_strings:
            continue
        if action.nargs == 0:
            if value == action.const:
                yield action.option_strings[0]
        elif isinstance(value, list | tuple) and action.nargs in ("*", "+"):
            yield from (action.option_strings[0], *map(str, value))
        else:
            text = "".join(json.dumps(value).split()) if isinstance(value, list | tuple) else str(value)
            yield from (action.option_strings[0], text)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
