"""Replays layers as CUDA graphs: a layer then costs the host two launches in place of hundreds.

Worth it where the host cannot keep up with the GPU: small micro-batches, and matrices that tensor parallelism has cut
small. Megatron-Core records the layers with Transformer Engine's make_graphed_callables. A pipeline stage needs a
graph, and memory, for each micro-batch of a step.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import num_microbatches_calculator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.utils import get_model_config

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.metrics.console import Log
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
        self, config: TrainerConfig, state: TrainingState, groups: ProcessGroupCollection, log: Log
    ) -> None:
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
        training = self._config.training
        gathers = self._config.parallelism.overlap_param_gather
        num_microbatches_calculator.unset_num_microbatches_calculator()
        num_microbatches_calculator.init_num_microbatches_calculator(
            rank=self._groups.dp_cp.rank(),
            rampup_batch_size=None,
            global_batch_size=training.global_batch_size,
            micro_batch_size=training.micro_batch_size,
            data_parallel_size=self._groups.dp.size(),
        )
        # Recording is no step: nothing may be gathered from within, and the gradients that it leaves are cleared.
        for chunk in self._model if gathers else ():
            chunk.disable_forward_pre_hook()
        self._helper = TECudaGraphHelper(
            self._model,
            get_model_config(self._model[0]),
            self._config.model.seq_length,
            training.micro_batch_size,
            optimizers=[self._optimizer],
        )
        if not self._helper.flattened_callables:
            raise TrainerError(
                f"training.cuda_graph_impl = {training.cuda_graph_impl}, and the model has no layer that can be "
                "recorded: set it to none, or build the layers of Megatron-Core's TransformerLayer"
            )
        try:
            with _only_this_thread_recorded():
                self._helper.create_cudagraphs()
        except RuntimeError as error:
            if not _is_of_memory(error):
                raise
            raise TrainerError(
                f"rank {torch.distributed.get_rank()}: no memory to record the layers as CUDA graphs ({error}); set "
                "training.cuda_graph_impl: none, lower training.micro_batch_size, or cut the model further"
            ) from error
        if gathers:
            for chunk in self._model:
                chunk.enable_forward_pre_hook()
            self._helper.cuda_graph_set_manual_hooks()
        gc.collect()
        gc.freeze()  # as before the first step; Core has undone that


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether it is a want of GPU memory, or covers one: a record that is broken off raises an error of its own."""
    return error is not None and (
        isinstance(error, torch.OutOfMemoryError) or _is_of_memory(error.__context__)
    )


@contextlib.contextmanager
def _only_this_thread_recorded() -> Iterator[None]:
    """Graphs made in here may be recorded while other threads ask the driver for memory.

    Transformer Engine takes torch's default, by which any thread's request spoils the record, that of the data
    loader's for pinned memory among them. Core's own graphs are recorded in this mode.
    """
    usual = torch.cuda.graph
    torch.cuda.graph = functools.partial(usual, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = usual
