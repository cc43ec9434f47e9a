"""`python -m trainer`: the command line around `trainer.train`."""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import sys
from pathlib import Path

from trainer.contract import config as configuration
from trainer.contract.errors import Exit, ReportedByRank0Error, TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.distributed import device
from trainer.faults.stopping import announce, announce_traceback, leave
from trainer.metrics.console import quiet_libraries
from trainer.metrics.versions import print_versions


def main() -> int:
    """Parse the arguments and train. Returns the exit status."""
    arguments = _parser().parse_args()
    quiet_libraries()
    gc.disable()  # imported objects are never garbage, and scanning them takes a fifth of the import time
    if arguments.versions:
        return print_versions()
    config = None
    try:
        config = configuration.read(arguments.config)
        device.prepare(config.device)
        if config.training.deterministic_mode:
            device.make_deterministic()
        from trainer.train import train  # imports megatron.core, so it must come after `device.prepare`

        gc.freeze()
        gc.enable()
        train(config, stop_file=arguments.stop_file, progress=arguments.progress)
    except TrainerError as error:
        announce(error, config and RunDirectory.of(config))
        leave(error.exit_code)
    except ReportedByRank0Error:
        leave(Exit.FAULT)
    except Exception:
        announce_traceback()
        leave(Exit.FAULT)
    finally:
        # At exit the interpreter sends SIGTERM to loader workers, which ignore it, and then waits for them.
        for child in multiprocessing.active_children():
            child.kill()
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m trainer", description="Trains a GPT with Megatron-Core.")
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--config", type=Path, metavar="FILE", help="resolved configuration (JSON)")
    mode.add_argument("--versions", action="store_true", help="print the versions of the libraries and exit")
    parser.add_argument(
        "--stop-file",
        type=Path,
        metavar="FILE",
        help="when this file appears, save at the next step boundary and exit with status 0",
    )
    parser.add_argument("--progress", action="store_true", help="show a progress bar if stderr is a terminal")
    return parser


# Nothing may run at import, since spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
