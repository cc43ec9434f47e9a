"""`python -m trainer.data.index_cache`: builds the sample indices that a training run will ask for, without a GPU.

It reads the configuration of the training run and leaves in its cache directory (`data.cache_dir`, else `index-cache`
in the run directory) every file under the name that training looks for, so that no GPU waits for them.
"""

from __future__ import annotations

import sys

from trainer.contract import config as configuration
from trainer.contract.errors import TrainerError
from trainer.contract.resolve import resolve
from trainer.contract.run_directory import RunDirectory
from trainer.data.single_process import alone, parser_of
from trainer.distributed import device
from trainer.metrics.console import quiet_libraries


def main() -> int:
    """Reads the arguments and builds. Returns the exit status: 2 for mistakes, 1 for a storage that fails."""
    parser = parser_of("trainer.data.index_cache", "Builds the index files of a training run, on a CPU.")
    arguments = parser.parse_args()
    quiet_libraries()
    try:
        config = resolve(configuration.read(arguments.config))
        device.prepare("cpu")  # whatever the run computes on
        _build(config)
    except (configuration.ConfigError, TrainerError) as error:
        print(f"index cache: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(
            f"index cache: {error}; what is complete stays, and the next run goes on from it", file=sys.stderr
        )
        return 1
    return 0


def _build(config: configuration.TrainerConfig) -> None:
    # This imports megatron.core, which the stand-ins must precede.
    from trainer.data.datasets import build_index, say_on_stdout

    with alone():
        build_index(
            config, RunDirectory.of(config).index_cache, config.model.padded_vocab_size, say_on_stdout
        )


if __name__ == "__main__":
    sys.exit(main())
