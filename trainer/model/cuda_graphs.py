"""Replays layers as CUDA graphs, so that a layer costs the host two launches instead of hundreds.

This helps if the host cannot keep up with the GPU, as with small microbatches or with matrices that are small due to
tensor parallelism. Megatron-Core records the layers with Transformer Engine's make_graphed_callables. A pipeline stage
needs a graph, and memory, for each microbatch of a step.
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
from trainer.distributed.groups import this_rank
from trainer.faults.machine_failures import is_out_of_memory
from trainer.metrics.console import Log
from trainer.step import TrainingState

WARMUP_STEPS = 3
"""First steps of an attempt, without graphs, to choose and compile kernels (Core: cuda_graph_warmup_steps)."""


def prepare_nccl(config: TrainerConfig) -> None:
    """Prepare NCCL for recording. Call this before it creates communicators. Variables that are set take precedence."""
    if config.training.cuda_graph_impl != "none":
        # torch's expandable segments may free memory that NCCL has registered for a graph (TECudaGraphHelper).
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


@contextlib.contextmanager
def recordable_gradients(config: TrainerConfig) -> Iterator[None]:
    """Context in which to wrap models for data parallelism, so that they can be recorded.

    The autograd nodes that accumulate gradients belong to the stream that is current when they are created. The default
    stream must not wait for a stream that is being recorded, but another stream may. Source: Megatron-LM training.py,
    get_model.
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
    """CUDA graphs of this rank's layers. Does nothing if cuda_graph_impl is none."""

    def __init__(
        self, config: TrainerConfig, state: TrainingState, groups: ProcessGroupCollection, log: Log
    ) -> None:
        self._config, self._model, self._optimizer = config, state.model, state.optimizer
        self._groups, self._log = groups, log
        self._is_due_in = -1 if config.training.cuda_graph_impl == "none" else WARMUP_STEPS
        self._helper: Any = None

    def before(self, iteration: int) -> bool:
        """Record the layers if that is due before `iteration`. Returns whether that took time."""
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
        """Delete the graphs. Otherwise a communicator would wait for them when it is destroyed."""
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
        # Recording is not a step: it must not gather parameters, and the gradients that it leaves are cleared later.
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
                f"training.cuda_graph_impl = {training.cuda_graph_impl}, but the model has no layer that can be "
                "recorded. Set it to none, or build the layers from Megatron-Core's TransformerLayer"
            )
        try:
            with _only_this_thread_recorded():
                self._helper.create_cudagraphs()
        except RuntimeError as error:
            if not _is_due_to_memory(error):
                raise
            raise TrainerError(
                f"{this_rank()}: not enough memory to record layers as CUDA graphs ({error}). "
                "Set training.cuda_graph_impl: none, lower training.micro_batch_size, or shard the model further"
            ) from error
        if gathers:
            for chunk in self._model:
                chunk.enable_forward_pre_hook()
            self._helper.cuda_graph_set_manual_hooks()
        gc.collect()
        gc.freeze()  # again as before the first step, since Core has unfrozen the objects


def _is_due_to_memory(error: BaseException | None) -> bool:
    """True if the error, or an error in its context, is a lack of GPU memory. Aborting a recording raises another
    error."""
    return error is not None and (is_out_of_memory(error) or _is_due_to_memory(error.__context__))


@contextlib.contextmanager
def _only_this_thread_recorded() -> Iterator[None]:
    """Context that lets other threads allocate memory while graphs are recorded.

    In torch's default mode, which Transformer Engine uses, an allocation by any thread makes the recording fail, for
    example the data loader's allocation of pinned memory. Core's own graphs use the thread-local mode.
    """
    usual = torch.cuda.graph
    torch.cuda.graph = functools.partial(usual, capture_error_mode="thread_local")
    try:
        yield
    finally:
        torch.cuda.graph = usual
