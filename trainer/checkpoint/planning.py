"""Save plans by Megatron-Core: which rank writes which part of which tensor to which file."""

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
"""Number of files that each rank writes in parallel, one thread per file."""

# Core's planning creates a result queue in a server process for its own writers, which costs each rank 2 s and the
# memory of one more Python. Here writers are threads and do not use this queue.
filesystem_async._results_queue = queue.Queue()


@dataclass
class Plan:
    """Data for this rank to write and, on rank 0, the index of the complete checkpoint."""

    common: bytes
    """Content of `common.pt`: the values that are the same on all ranks."""
    _writer: FileSystemWriterAsync
    _index: Metadata | None

    def take_buckets(self) -> list[Bucket]:
        """Return the files of this rank with their tensors. The plan then no longer references the tensors."""
        buckets, self._writer.write_buckets = self._writer.write_buckets, None
        return buckets or []

    def write_index(self, results: list[list[WriteResult]]) -> None:
        """Write `.metadata`, on rank 0, with the location of each tensor, from the results of all ranks."""
        assert self._index is not None
        self._writer.finish(self._index, results)


def plan_save(content: dict[str, Any], path: Path, groups: ProcessGroupCollection, *, is_first: bool) -> Plan:
    """Plan a save of `content`, distributed over data-parallel ranks. Writes nothing. Every rank must call this.

    The first plan is checked for tensors that are missing or written twice.
    """
    sharded, common = save_preprocess(content, validate_access_integrity=is_first)
    serialized = io.BytesIO()
    torch.save(common, serialized)
    strategy = _Strategy("torch_dist", 1, thread_count=FILES_PER_RANK)
    # The default writers differ between versions of Core, so choose explicitly if the version has this parameter.
    parameters = inspect.signature(strategy.async_save).parameters
    chosen = {"async_strategy": "mcore"} if "async_strategy" in parameters else {}
    FullyParallelSaveStrategyWrapper(strategy, groups.dp_cp).apply_saving_parallelization(sharded)
    writer, index = strategy.async_save(sharded, str(path), **chosen)
    if index is not None:
        vars(index).pop("all_local_plans", None)  # a second copy of the index, for a cache that is not used
    return Plan(serialized.getvalue(), writer, index)


class _Strategy(TorchDistSaveShardedStrategy):
    """Core's strategy, reduced to planning. This trainer executes the plan itself."""

    def _get_save_and_finalize_callbacks(
        self, writer: FileSystemWriterAsync, planned: Any, *_: Any
    ) -> tuple[FileSystemWriterAsync, Metadata | None]:
        return writer, planned[1]
