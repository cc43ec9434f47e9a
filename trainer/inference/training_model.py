"""The model in training as a model that generates texts, without a second copy of its weights.

Each new token is a forward pass of training over the complete text: with its kernels, in every layout, without a cache.
So nothing of the model changes, and training goes on as if no text had been generated. For short texts a pass with a
cache would hardly be faster, since both wait for memory and launches.

Shapes: b rows, s tokens of a row, w this tensor-parallel rank's part of the vocabulary.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import unwrap_model

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.data.loader import reads_samples
from trainer.data.microbatch import MicroBatch
from trainer.distributed.groups import from_last_stage
from trainer.distributed.sequence import zigzag_part, zigzag_positions
from trainer.loss import Objective

PADDED_TO = 64
"""Lengths of rows are multiples of this number, so that kernels see few shapes, and FP8 ones that it allows."""


class TrainingModel:
    """The model in training. All ranks of a replica must make the same calls; with experts, all ranks."""

    has_cache = can_record = False

    def __init__(
        self,
        model: Sequence[DistributedDataParallel],
        objective: Objective,
        config: TrainerConfig,
        groups: ProcessGroupCollection,
        num_texts: int,
        beat: Callable[[], None],
    ) -> None:
        """`model` has the wrapped chunks of this rank. The replicas share `num_texts` texts. Each pass calls `beat`.

        Raises:
            TrainerError: the model of the user has no logits that can be read.
        """
        self.config, self._groups = config, groups
        self._model, self._objective, self._beat = list(model), objective, beat
        self.device = next(model[0].parameters()).device
        self._deadline = math.inf
        self._current = 0
        self._positions: list[torch.Tensor] = []
        self._found: dict[int, torch.Tensor] = {}
        last = unwrap_model(model[-1])
        self._output_layer = getattr(last, "output_layer", None) if last.post_process else None
        if last.post_process and self._output_layer is None:
            raise TrainerError(
                f"model.model_provider returns a {type(last).__name__} without the output_layer of GPTModel, which "
                "answers.prompts needs. Derive the model from GPTModel, or remove answers.prompts"
            )
        # Replicas that share experts exchange tokens in each pass, so they must continue the same texts.
        shares_experts = (
            config.model.num_moe_experts is not None
            and groups.ep.size() * groups.expt_tp.size() > groups.tp.size()
        )
        self._num_parts = 1 if shares_experts else min(groups.dp.size(), num_texts)
        self._in_step = (None,) if shares_experts else (groups.mp, groups.cp)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding."""
        return self.config.model.num_tokens

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and continuation: those of a training sample."""
        return self.config.model.seq_length

    @property
    def follows_documents(self) -> bool:
        """True if the model is trained to begin a document after the end of another document, and to see this end."""
        return self.config.data.predicts_next_document

    @property
    def replica(self) -> tuple[int, int]:
        """Index of this replica's part of the texts, and the number of parts. Each replica has one, so that all of
        them run the pass that gathers the weights."""
        return self._groups.dp.rank() % self._num_parts, self._num_parts

    @property
    def reports(self) -> bool:
        """True on one rank for each part of the texts."""
        groups = self._groups
        is_first = groups.mp.rank() == 0 and groups.cp.rank() == 0
        return bool(is_first and groups.dp.rank() < self._num_parts)

    def new_cache(self, num_slots: int) -> None:
        """There is no cache."""

    @contextlib.contextmanager
    def computing(self, num_rows: int, num_slots: int) -> Iterator[None]:
        """Read the logits of the passes. Weights keep their gradients: in torch's inference mode, modules would keep
        tensors that the next step cannot use."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if self._output_layer is not None:
                stack.callback(self._output_layer.register_forward_hook(self._keep_logits).remove)
            yield

    def limit(self, seconds: float) -> None:
        """End the texts after `seconds` from now on."""
        self._deadline = time.monotonic() + seconds

    def is_out_of_time(self) -> bool:
        """True, on all ranks that must agree, if the time of one of them is over."""
        is_over = torch.tensor([time.monotonic() > self._deadline], dtype=torch.int32, device=self.device)
        for group in self._in_step:
            torch.distributed.all_reduce(is_over, torch.distributed.ReduceOp.MAX, group=group)
        return bool(is_over.item())

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` of the ranks of the last stage, on every rank of this replica. All ranks pass the same shape."""
        return from_last_stage(values, self._groups)

    def next_logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, cache: Any
    ) -> torch.Tensor | None:
        """Logits in fp32 [b, vocabulary] after the token with index `last` [b] of each row of `tokens` [b, s].

        Returns None on stages that have no logits.
        """
        self._beat()
        num_rows, longest = tokens.shape
        length, size, count = self._shape(num_rows, longest)
        padded = tokens.new_zeros(size * count, length)
        padded[:num_rows, :longest] = tokens
        padded[num_rows:] = padded[0]
        self._positions = [*torch.nn.functional.pad(last, (0, size * count - num_rows)).split(size)]
        microbatches = [self._microbatch(rows) for rows in padded.split(size)]
        iterators = [
            self._numbered(microbatches) if reads_samples(chunk, self.config.data) else None
            for chunk in self._model
        ]
        get_forward_backward_func()(
            forward_step_func=self._forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self._model,
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=size,
            forward_only=True,
        )
        if self._output_layer is None:
            return None
        logits = torch.cat([self._found[number] for number in range(count)])
        if self._groups.cp.size() > 1:
            torch.distributed.all_reduce(logits, group=self._groups.cp)
        logits = gather_from_tensor_model_parallel_region(logits, group=self._groups.tp)
        return logits[:num_rows, : self.vocab_size]

    def _forward_step(
        self, batches: Iterator[MicroBatch] | None, chunk: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[..., object] | None]:
        """Run one chunk on one microbatch, in the form that the pipeline schedule expects."""
        if batches is None:  # a stage without embedding and logits
            return chunk(input_ids=None, position_ids=None, attention_mask=None), None
        batch = next(batches)
        labels = {}
        # Core computes the losses of these layers in any case.
        if self.config.model.mtp_num_layers is not None:
            self._objective.measure(False)
            labels = {"labels": batch.labels, **self._objective.begin(chunk, batch)}
        output = chunk(
            input_ids=batch.tokens,
            position_ids=batch.position_ids,
            attention_mask=batch.boundaries,
            **labels,
        )
        return output, lambda output: (output.new_zeros(()), output.new_ones((), dtype=torch.int), None)

    def _shape(self, num_rows: int, longest: int) -> tuple[int, int, int]:
        """Tokens of a row, rows of a microbatch and number of microbatches. None has more tokens than in training."""
        config, layout = self.config, self.config.parallelism
        seq_length, size = config.model.seq_length, config.training.micro_batch_size
        length = seq_length
        # Overlap and graphs are set up for one shape.
        if not (layout.tp_comm_overlap or config.training.cuda_graph_impl != "none"):
            unit = math.lcm(PADDED_TO, 2 * self._groups.cp.size() * self._groups.tp.size())
            length = min(-(-longest // unit) * unit, seq_length)
            size = min(num_rows, max(1, size * seq_length // length))
        count = -(-num_rows // size)
        if len(self._model) > 1:  # Core interleaves groups of as many microbatches as there are stages
            count = -(-count // self._groups.pp.size()) * self._groups.pp.size()
        return length, size, count

    def _microbatch(self, rows: torch.Tensor) -> MicroBatch:
        """The part of `rows` [b, s] that this context-parallel rank has. Each row is one document."""
        size, length = rows.shape
        rank, ranks = self._groups.cp.rank(), self._groups.cp.size()
        own = zigzag_part(rows, rank, ranks)
        positions = zigzag_positions(length, rank, ranks).to(rows.device).expand(size, -1)
        boundaries = torch.arange(size + 1) * length if self.config.data.separates_documents else None
        return MicroBatch(own, own, torch.ones_like(own, dtype=torch.float32), positions, boundaries)

    def _numbered(self, microbatches: Sequence[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the microbatches, and notes which one is next."""
        for number, microbatch in enumerate(microbatches):
            self._current = number
            yield microbatch

    def _keep_logits(self, layer: torch.nn.Module, arguments: object, output: Any) -> None:
        """Keep the logits [b, w] at the wanted positions, of the output [s, b, w].

        The last output of a pass is the main one. The loss may overwrite it afterwards.
        """
        logits, wanted = output[0], self._positions[self._current]
        held = zigzag_positions(
            logits.shape[0] * self._groups.cp.size(), self._groups.cp.rank(), self._groups.cp.size()
        )
        is_wanted = held.to(wanted.device)[None] == wanted[:, None]  # [b, s]
        rows = torch.arange(len(wanted), device=wanted.device)
        chosen = logits[is_wanted.int().argmax(1), rows].float()
        self._found[self._current] = chosen * is_wanted.any(1, keepdim=True)
