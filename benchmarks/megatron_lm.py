"""Runs pretrain_gpt.py of a Megatron-LM checkout on GPUs, with the megatron-core that is installed.

    python -m benchmarks.megatron_lm CHECKOUT [pretrain_gpt.py's arguments]

The ranks are in the environment, as torchrun sets them.
"""

from __future__ import annotations

import queue
import runpy
import sys
from pathlib import Path

from megatron.core.datasets import utils
from megatron.core.dist_checkpointing.strategies import filesystem_async


def main() -> None:
    """Leaves what pretrain_gpt.py would do at an installed core and in a process of its own, and becomes it."""
    script = Path(sys.argv[1]) / "pretrain_gpt.py"
    sys.path.append(str(script.parent))
    utils.compile_helpers = lambda: None  # a wheel has them compiled, and not their Makefile
    filesystem_async._results_queue = queue.Queue()  # saves are waited for
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
