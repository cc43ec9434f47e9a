"""`python -m trainer.evaluate`: the command line around `job.evaluate`.

With several ranks (torchrun, srun), every rank runs the same command.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from pathlib import Path

from trainer.contract.config import ConfigError
from trainer.contract.config.document import read_as
from trainer.contract.errors import Exit, ReportedByRank0Error, TrainerError
from trainer.contract.evaluation import EvaluationConfig
from trainer.distributed.rendezvous import find_ranks
from trainer.evaluate.tasks import load_tasks
from trainer.faults.stopping import announce, announce_traceback, leave
from trainer.inference.start import prepare_device


def main() -> int:
    """Parse the arguments and evaluate, or download the datasets of tasks. Returns the exit status."""
    arguments = _parser().parse_args()
    try:
        if arguments.download:
            return _download(arguments.download)
        config = _read(arguments.config)
        # Progress bars of lm-eval would hide the lines of the log. The libraries read this when they are imported.
        os.environ |= {"TQDM_DISABLE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        gc.disable()  # imported objects are never garbage, and scanning them takes a fifth of the import time
        prepare_device(config.device)
        from trainer.evaluate.job import evaluate  # imports megatron.core: after `prepare_device`

        gc.freeze()
        gc.enable()
        evaluate(config, find_ranks(os.environ))
    except TrainerError as error:
        announce(error, None)
        leave(error.exit_code)
    except ReportedByRank0Error:
        leave(Exit.FAULT)
    except KeyboardInterrupt:
        leave(130)
    except Exception:
        # Other ranks may wait for this one, so it must not wait for them.
        announce_traceback()
        leave(Exit.FAULT)
    return Exit.DONE


def _read(path: Path) -> EvaluationConfig:
    return read_as(EvaluationConfig, path)


def _download(names: list[str]) -> int:
    """Load tasks, which downloads their datasets into the cache."""
    found, problems = load_tasks(names)
    if problems:
        raise ConfigError(*problems)
    print(f"in the cache: {', '.join(found.tasks)}")
    return Exit.DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.evaluate", description="Evaluates checkpoints on texts and tasks."
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--config", type=Path, metavar="FILE", help="resolved configuration (JSON)")
    mode.add_argument(
        "--download",
        nargs="+",
        metavar="TASK",
        help="download the datasets of tasks, for jobs on nodes without network",
    )
    return parser


# Nothing may run at import, since spawned processes import this module again.
if __name__ == "__main__":
    sys.exit(main())
