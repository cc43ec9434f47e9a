"""Replays layers as CUDA graphs: a layer then costs the host two launches in place of hundreds.

Worth it where the host cannot keep up with the GPU: small micro-batches, and matrices that tensor parallelism has cut
small. Megatron-Core records the layers with Transformer Engine's make_graphed_callables. A pipeline stage needs a
graph, and memory, for each micro-batch of a step.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.utils import get_model_config

from trainer.config import TrainerConfig
from trainer.logging import Log
from trainer.step import TrainingState

WARMUP_STEPS = 3
"""Steps of a life without graphs, in which kernels are chosen and compiled: cuda_graph_warmup_steps of Core."""


def prepare_nccl(config: TrainerConfig) -> None:
    """Lets NCCL's collectives be recorded; called before it makes communicators. What is in the environment holds."""
    if config.training.cuda_graph_impl != "none":
        # What NCCL registers for a graph, expandable segments of torch's allocator may give back (TECudaGraphHelper).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


@contextlib.contextmanager
def recordable_gradients(config: TrainerConfig) -> Iterator[None]:
    """What is wrapped for data parallelism in here can be recorded.

    The nodes that take in gradients belong to the stream that is current when they are made. The default stream may
    not wait for one that is recorded; another may (Megatron-LM training.py, get_model).
    """
    if config.training.cuda_graph_impl == "none":
        yield
        return
    usual, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(usual)
    with torch.cuda.stream(stream):
        yield
    usual.wait_stream(stream)


class LayerGraphs:
    """The graphs of this rank's layers; does nothing when the configuration asks for none."""

    def __init__(
        self,
        config: TrainerConfig,
        state: TrainingState,
        groups: ProcessGroupCollection,
        log: Log,
        become_alone: Callable[[], None],
    ) -> None:
        """`become_alone` returns when no other thread asks for memory that the GPU can reach, which spoils a record."""
        self._become_alone = become_alone
        self._config, self._model, self._optimizer = config, state.model, state.optimizer
        self._groups, self._log = groups, log
        self._is_due_in = -1 if config.training.cuda_graph_impl == "none" else WARMUP_STEPS
        self._helper: Any = None

    def before(self, iteration: int) -> bool:
        """Records the layers when it is time, as `iteration` is about to begin. Whether that took time."""
        if self._is_due_in < 0:
            return False
        self._is_due_in -= 1
        if self._is_due_in >= 0:
            return False
        started = time.perf_counter()
        self._record()
        seconds = time.perf_counter() - started
        self._log.line(f"iteration {iteration}: layers recorded as CUDA graphs in {seconds:.1f} s")
        return True

    def close(self) -> None:
        """Gives the graphs up: a communicator waits at its end for those that hold its collectives."""
        if self._helper is not None:
            self._helper.delete_cuda_graphs()
            self._helper = None

    def _record(self) -> None:
        self._become_alone()
        training = self._config.training
        gathers = self._config.parallelism.overlap_param_gather
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=self._groups.dp_cp.rank(),
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            data_parallel_size=self._groups.dp.size(),
        )
        # Recording is no step: nothing may be gathered from within, and the gradients that it leaves are cleared.
        for chunk in self._model if gathers else ():
            chunk.disable_forward_pre_hook()
        helper = TECudaGraphHelper(
            self._model,
            get_model_config(self._model[0]),
            self._config.model.seq_length,
            training.micro_batch_size,
            optimizers=[self._optimizer],
        )
        helper.create_cudagraphs()
        if gathers:
            for chunk in self._model:
                chunk.enable_forward_pre_hook()
            helper.cuda_graph_set_manual_hooks()
        self._helper = helper
        gc.collect()
        gc.freeze()  # as before the first step; Core has undone that
