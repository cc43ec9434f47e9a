"""Runs pretrain_gpt.py of a Megatron-LM checkout on GPUs with the installed megatron-core.

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
    """Skip steps that do not work with an installed megatron-core, and run pretrain_gpt.py in this process."""
    script = Path(sys.argv[1]) / "pretrain_gpt.py"
    sys.path.append(str(script.parent))
    utils.compile_helpers = lambda: None  # a wheel has compiled helpers but no Makefile
    filesystem_async._results_queue = queue.Queue()  # saves are synchronous, so no server process is needed
    sys.argv = [str(script), *sys.argv[2:]]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
