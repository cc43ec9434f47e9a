"""Runs rank 0 of a program alone, as if the other ranks were there (trainer.distributed.one_rank).

RANK=0 LOCAL_RANK=0 WORLD_SIZE=4 python -m benchmarks.one_rank MODULE [ARGUMENTS]
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torch import distributed
from torch.distributed import Store
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.distributed import one_rank, rendezvous


def main() -> None:
    """Run the module in this process, with collectives that involve no other."""
    replace_functions()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path.cwd()))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def replace_functions() -> None:
    """Replace functions with which programs find other ranks. Call it before Megatron-Core is imported."""
    connect, new_group = distributed.init_process_group, distributed.new_group

    def connect_to_nobody(*_: Any, store: Store | None = None, **__: Any) -> None:
        connect("fake", store=store or FakeStore(), rank=0, world_size=int(os.environ["WORLD_SIZE"]))

    def new_fake_group(*arguments: Any, **options: Any) -> Any:
        return new_group(*arguments, **(options | {"backend": None, "pg_options": None}))

    rendezvous.open_store = lambda *_, **__: distributed.HashStore()
    one_rank.replace("init_process_group", connect_to_nobody)
    one_rank.replace("new_group", new_fake_group)
    one_rank.replace_collectives()
    from trainer.faults import stragglers

    stragglers.gather_places = lambda ranks, _: [
        stragglers.RankLocation("one rank", rank, 0, (rank,), "") for rank in range(ranks.world_size)
    ]


if __name__ == "__main__":
    main()
