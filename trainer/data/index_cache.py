"""`python -m trainer.data.index_cache`: builds the sample indices of a training run without a GPU.

It reads the configuration of the training run and writes all index files to its cache directory (`data.cache_dir`, else
`index-cache` in the run directory), so that no GPU waits for them. If the run has checkpoints, it builds those for the
rest of the run.
"""

from __future__ import annotations

import sys

from trainer.contract import config as configuration
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.rules.engine import SAMPLES, require
from trainer.data.command_line import config_parser
from trainer.data.progress import of_next_attempt
from trainer.distributed import device
from trainer.distributed.loopback import single_process_group
from trainer.metrics.console import quiet_libraries


def main() -> int:
    """Parse the arguments and build. Returns the exit status: 2 for invalid input, 1 for storage errors."""
    parser = config_parser("trainer.data.index_cache", "Builds the index files of a training run, on a CPU.")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = configuration.read(arguments.config)
        require(config, SAMPLES)
        config = resolve(config)
        device.prepare("cpu")  # independent of the run's device
        _build(config)
    except TrainerError as error:
        print(f"index cache: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"index cache: {error}. Complete indices are kept, and the next run builds the rest",
            file=sys.stderr,
        )
        return 1
    return 0


def _build(config: configuration.TrainerConfig) -> None:
    # This imports megatron.core, so it must come after `device.prepare`.
    from trainer.data.datasets import build_index, log_to_stdout

    run = RunDirectory.of(config)
    run.refuse_foreign_links()
    progress = of_next_attempt(config)
    with single_process_group():
        build_index(config, run.index_cache, config.model.num_rows, log_to_stdout, progress)


if __name__ == "__main__":
    sys.exit(main())
