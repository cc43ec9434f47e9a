"""`python -m trainer`: the command line around `trainer.train`."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
import traceback
from pathlib import Path

from trainer.contract import config as configuration
from trainer.contract.errors import Exit, TrainerError
from trainer.contract.run_directory import RunDirectory
from trainer.distributed import device
from trainer.faults.stopping import announce, is_another_s, leave
from trainer.metrics.console import quiet_libraries
from trainer.metrics.versions import print_versions


def main() -> int:
    """Reads the arguments and trains. Returns the exit status."""
    arguments = _parser().parse_args()
    quiet_libraries()
    gc.disable()  # what imports make stays, and to look through it again and again is a fifth of their time
    if arguments.versions:
        return print_versions()
    config = None
    try:
        config = configuration.read(arguments.config)
        device.prepare(config.device)
        if config.training.deterministic_mode:
            device.make_deterministic()
        from trainer.train import train  # imports megatron.core, which the stand-ins must precede

        gc.freeze()
        gc.enable()
        train(config, stop_file=arguments.stop_file, progress=arguments.progress)
    except (configuration.ConfigError, TrainerError) as error:
        announce(error, config and RunDirectory.of(config))
        leave(error.exit_code if isinstance(error, TrainerError) else Exit.REFUSED)
    except Exception as error:
        if not is_another_s(error):
            traceback.print_exc()
        leave(Exit.FAULT)
    finally:
        # Loader workers outlive SIGTERM, which is all that the interpreter would send them before it waits for them.
        for child in multiprocessing.active_children():
            child.kill()
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains a GPT with Megatron-Core.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", type=Path, metavar="FILE", help="the resolved configuration (JSON)")
    what.add_argument("--versions", action="store_true", help="print the versions of what is imported")
    parser.add_argument(
        "--stop-file",
        type=Path,
        metavar="FILE",
        help="when this file appears, save at the next step boundary and exit with status 0",
    )
    parser.add_argument("--progress", action="store_true", help="a progress bar, when stderr is a terminal")
    return parser


# Nothing may run at import: a process that is spawned would import this module again.
if __name__ == "__main__":
    sys.exit(main())
