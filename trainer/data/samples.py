"""`python -m trainer.data.samples`: prints the documents that training samples were cut from."""

from __future__ import annotations

import sys

from trainer.contract import config as configuration
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.rules.engine import SAMPLES, require
from trainer.data.command_line import config_parser
from trainer.data.progress import Progress, newest_checkpoint, of_next_attempt
from trainer.distributed import device
from trainer.distributed.loopback import single_process_group
from trainer.metrics.console import quiet_libraries


def main() -> int:
    """Parse the arguments and print a line for each sample. Returns the exit status, which is 2 for mistakes."""
    parser = config_parser("trainer.data.samples", "Prints the documents of training samples, on a CPU.")
    parser.add_argument("first", type=int, metavar="FIRST", help="first sample")
    parser.add_argument("last", type=int, metavar="LAST", nargs="?", help="last sample; default: FIRST")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = configuration.read(arguments.config)
        require(config, SAMPLES)
        if config.data.dataset is not None:
            raise TrainerError(
                f"data.dataset = {config.data.dataset!r} makes the samples, which have no documents"
            )
        config = resolve(config)
        progress = _progress(config)
        last = arguments.first if arguments.last is None else arguments.last
        if not 0 <= arguments.first <= last < progress.end:
            raise TrainerError(
                f"{arguments.first} to {last} is outside of the run's samples, 0 to {progress.end - 1}"
            )
        device.prepare("cpu")  # independent of the run's device
        from trainer.data.sample_documents import lines  # imports megatron.core: after `device.prepare`

        with single_process_group():
            for line in lines(config, progress, arguments.first, last, _log):
                print(line)
    except (TrainerError, OSError) as error:
        print(f"samples: {error}", file=sys.stderr)
        return 2
    return 0


def _progress(config: TrainerConfig) -> Progress:
    """The progress of the run's next attempt.

    Raises:
        TrainerError: the newest checkpoint is Megatron-LM's.
        OSError: the checkpoints or the pairs cannot be read.
    """
    if progress := of_next_attempt(config):
        return progress
    newest = newest_checkpoint(config)
    raise TrainerError(
        f"{newest and newest.path} is Megatron-LM's and does not say how many samples it has read. Wait for this run's "
        "first checkpoint"
    )


def _log(line: str) -> None:
    print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
