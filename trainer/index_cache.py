"""`python -m trainer.index_cache`: builds the sample indices that a training run will ask for, without a GPU.

It reads the configuration of the training run and leaves in its cache directory (`data.cache_dir`, else `index-cache`
in the run directory) every file under the name that training looks for, so that no GPU waits for them.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer import config as configuration
from trainer import device
from trainer.errors import TrainerError
from trainer.logging import quiet_libraries
from trainer.resolve import resolve
from trainer.run_directory import RunDirectory


def main() -> int:
    """Reads the arguments and builds. Returns the exit status: 2 for mistakes, 1 for a storage that fails."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer.index_cache",
        description="Builds the index files of a training run, on a CPU.",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        required=True,
        help="the training run's resolved configuration (JSON)",
    )
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
    # These import megatron.core, which the stand-ins must precede.
    import torch

    from trainer.datasets import build_index, say_on_stdout

    # Core before 0.18 asks for its rank when it blends. Alone it needs no network, and no name that resolves.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    build_index(config, RunDirectory.of(config).index_cache, config.model.padded_vocab_size, say_on_stdout)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
