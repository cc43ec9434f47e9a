"""Plans with Megatron-Core which rank writes which part of which tensor into which file."""

from __future__ import annotations

import inspect
import io
import queue
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint.writer import Bucket

FILES_PER_RANK = 2
"""Written at the same time, by a thread each."""

# Planning makes a queue for what Core's own writers did, in a server process: 2 s and the memory of one more
# Python for each rank. Ours are threads of this process, and nothing goes through it.
filesystem_async._results_queue = queue.Queue()


@dataclass
class Plan:
    """What this rank is to write, and on rank 0 the index of the whole checkpoint."""

    common: bytes
    """The values that are the same on all ranks, as `common.pt` holds them."""
    _writer: FileSystemWriterAsync
    _index: Metadata | None

    def take_buckets(self) -> list[Bucket]:
        """The files of this rank, with the tensors themselves, which the plan then holds no longer."""
        buckets, self._writer.write_buckets = self._writer.write_buckets, None
        return buckets or []

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata`, on rank 0: where each tensor lies, from what all ranks wrote."""
        assert self._index is not None
        self._writer.finish(self._index, results)


def plan_save(content: dict[str, Any], path: Path, groups: ProcessGroupCollection, *, is_first: bool) -> Plan:
    """Plans a save of `content`, spread over data-parallel ranks. Nothing is written; every rank calls this.

    What is planned is checked on the first save: no tensor may be missing or written twice.
    """
    sharded, common = save_preprocess(content, validate_access_integrity=is_first)
    serialised = io.BytesIO()
    torch.save(common, serialised)
    strategy = _Strategy("torch_dist", 1, thread_count=FILES_PER_RANK)
    # The process-based writers of one version are the default of the next: say which, where one can.
    parameters = inspect.signature(strategy.async_save).parameters
    chosen = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
    FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp).apply_saving_parallelization(sharded)
    writer, index = strategy.async_save(sharded, str(path), **chosen)
    if index is not None:
        vars(index).pop(
            "all_local_plans", None
        )  # a second copy of the index, for a cache that is not used here
    return Plan(serialised.getvalue(), writer, index)


class _Strategy(TorchDistSaveShardedStrategy):
    """Core's, up to the plan: how it is carried out is this trainer's."""

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any, *_: Any
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, planned[1]
