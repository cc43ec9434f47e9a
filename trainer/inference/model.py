"""A loaded model and its logits, with or without a cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from trainer.contract.config import TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.data import documents
from trainer.distributed.groups import from_last_stage
from trainer.inference.attention import UsualCaching
from trainer.inference.cache import Cache, Cached, Caching, Rotary
from trainer.inference.latent_attention import LatentCaching
from trainer.model.attention.core import CoreAttention

CACHING: tuple[Caching, ...] = (UsualCaching(), LatentCaching())
"""The kinds of attention with a cache."""

MAX_LOGITS = 2**26
"""Maximum number of logits that are computed at once when sequences are scored: 256 MiB in fp32."""


class Model:
    """This rank's part of a model in inference mode. Every rank must make the same calls."""

    def __init__(self, config: TrainerConfig, chunk: GPTModel, groups: ProcessGroupCollection) -> None:
        self.config = config
        self.module = chunk.eval().requires_grad_(False)
        self.device = next(chunk.parameters()).device
        self._groups = groups
        self._is_first = groups.pp.rank() == 0
        self._is_last = groups.pp.rank() == groups.pp.size() - 1
        self._is_tied = not config.model.untie_embeddings_and_output_weights
        # A user's model may compute its logits differently.
        self._overridden = [
            name
            for name in ("forward", "_postprocess")
            if getattr(type(chunk), name) is not getattr(GPTModel, name, None)
        ]
        self._is_plain = not self._overridden
        self._dtype: torch.dtype = chunk.config.params_dtype
        self._attention: list[Cached] = []
        self._rotary: Rotary | None = None
        self._caching = _caching(chunk) if self._is_plain else None
        if self._caching is not None:
            self._attention, self._rotary = self._caching.insert(
                chunk, config.model, self.device, self._dtype
            )
        if self._is_plain:
            # Then the model returns hidden states, and logits are computed only for the last token.
            self._output_weight = chunk.shared_embedding_or_output_weight() if self._is_tied else None
            chunk.post_process = False

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without padding."""
        return self.config.model.num_tokens

    @property
    def max_length(self) -> int:
        """Maximum number of tokens of prompt and continuation."""
        assert self.config.model.max_position_embeddings
        return self.config.model.max_position_embeddings

    @property
    def follows_documents(self) -> bool:
        """True if the model was trained to begin a document after the end of another document, and to see this end."""
        return self.config.data.predicts_next_document

    @property
    def has_cache(self) -> bool:
        """True if each layer has the trainer's attention. Otherwise, each step computes all tokens again."""
        return self._caching is not None

    @property
    def why_slow(self) -> str:
        """A line for the log that says why there is no cache; empty if there is one."""
        if self.has_cache:
            return ""
        kind = type(self.module).__name__
        own = f"{kind} has its own {' and '.join(self._overridden)}"
        why = own if self._overridden else "a layer does not have the trainer's attention"
        return f"each step computes the complete text again, without a cache of keys and values: {why}"

    @property
    def can_record(self) -> bool:
        """True if a step with the cache can be a CUDA graph: with Core's usual layers, without TP and PP."""
        model = self.config.model
        is_own = model.layer_spec is not None or model.model_provider is not None
        # Experts wait for the numbers of their tokens.
        is_usual = self._caching is not None and self._caching.can_record and model.num_moe_experts is None
        is_alone = self.device.type == "cuda" and self._groups.mp.size() == 1
        return is_alone and is_usual and not is_own

    def new_cache(self, num_slots: int) -> Cache:
        """An empty cache for sequences of up to `num_slots` tokens."""
        return Cache(num_slots, self._attention[0].window, self._dtype)

    def cache_bytes(self, num_rows: int, num_slots: int) -> int:
        """Size of a cache on this rank."""
        if self._caching is None:
            return 0
        width = self._caching.width(self.module.config, self._groups.tp.size())
        return num_rows * num_slots * len(self._attention) * width * self._dtype.itemsize

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits in fp32 [token, vocabulary] after each of `tokens`. Requires a single pipeline stage.

        Raises:
            TrainerError: there are no tokens, or more than the model has positions.
        """
        if not 0 < len(tokens) <= self.max_length:
            raise TrainerError(f"{len(tokens)} tokens: the model computes 1 to {self.max_length}")
        with torch.inference_mode():
            rows = torch.tensor([list(tokens)], device=self.device)
            output = self._compute(rows, self._position_ids(rows), None)
            assert output is not None
            return self._to_logits(output)[:, 0, : self.vocab_size].float()

    @contextlib.contextmanager
    def computing(self, num_rows: int, num_slots: int) -> Iterator[None]:
        """Inference mode. Reports in one line that a GPU's memory is too small for a batch."""
        try:
            with torch.inference_mode():
                yield
        except torch.OutOfMemoryError as error:
            free, total = (size / 2**30 for size in torch.cuda.mem_get_info(self.device))
            cache = self.cache_bytes(num_rows, num_slots) / 2**30
            raise TrainerError(
                f"out of GPU memory: the keys and values of batch_size = {num_rows} texts of up to {num_slots} tokens "
                f"take {cache:.1f} GiB in addition to the weights, and {free:.1f} of {total:.1f} GiB are free. "
                "Use a smaller batch_size or max_new_tokens, or more GPUs"
            ) from error

    def is_out_of_time(self) -> bool:
        """Texts may take any time."""
        return False

    def next_logits(
        self, tokens: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor | None:
        """Logits in fp32 [b, vocabulary] after the token with index `last` [b] of each row of `tokens` [b, s].

        `positions` are the positions of the tokens [b, s], or [1, s] if all rows have the same. With `cache`, `tokens`
        follow the tokens in the cache. Returns None on stages that have no logits.
        """
        output = self._compute(tokens, positions, cache)
        if output is None:
            return None
        if len(output) > 1:
            output = output[last, torch.arange(len(last), device=self.device)][None]
        return self._to_logits(output)[0, :, : self.vocab_size].float()

    def log_probabilities(
        self, tokens: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, targets: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Log-probabilities in fp32 [n], and whether each target is the most likely token [n].

        Element i is about token `targets[i]` after the token at `positions[i]` of row `rows[i]` of `tokens` [b, s].
        Only the tokens of the vocabulary count: its padding has no probability. Returns None on stages that have no
        logits.
        """
        output = self._compute(tokens, self._position_ids(tokens), None)
        if output is None:
            return None
        found, greedy = [], []
        # Logits of a complete batch may need more memory than the model.
        size = max(1, MAX_LOGITS // self.vocab_size)
        for part in torch.arange(len(targets), device=self.device).split(size):
            selected = output[positions[part], rows[part]][None]
            logits = self._to_logits(selected)[0, :, : self.vocab_size].float()
            chosen = logits.gather(1, targets[part, None])[:, 0]
            found.append(chosen - logits.logsumexp(-1))
            greedy.append(logits.argmax(-1) == targets[part])
        return torch.cat(found), torch.cat(greedy)

    def from_last_stage(self, values: torch.Tensor) -> torch.Tensor:
        """The `values` of the ranks of the last stage, on every rank of this replica. All ranks pass the same shape."""
        return from_last_stage(values, self._groups)

    @property
    def replica(self) -> tuple[int, int]:
        """Number of this replica of the model, and the number of replicas."""
        return self._groups.dp.rank(), self._groups.dp.size()

    @property
    def reports(self) -> bool:
        """True on one rank of each replica, which is in the last pipeline stage."""
        return self._is_last and self._groups.tp.rank() == 0

    def _position_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        """Positions of tokens [b, s] in their rows, or in their documents as with data.reset_position_ids."""
        data, is_first = self.config.data, torch.zeros_like(tokens, dtype=torch.bool)
        if data.reset_position_ids and self._rotary is None:  # in training, rotary embeddings ignore the key
            assert data.eod_id is not None
            is_first = documents.first_tokens(tokens, data.eod_id)
        return documents.positions(is_first)

    def _compute(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache | None
    ) -> torch.Tensor | None:
        """Hidden states after the last layer, or logits of a user's model [s, b, ...]. None before the last stage."""
        if self._rotary is not None:
            self._rotary.begin(positions)
        for attention in self._attention:
            attention.cache = cache
        if not self._is_first:
            self.module.set_input_tensor(self._receive(*tokens.shape))
        output = self.module(tokens, positions, None)
        if not self._is_last:
            torch.distributed.send(output, self._stage(1), group=self._groups.pp)
            return None
        return output if self._is_plain else output.transpose(0, 1)

    def _to_logits(self, output: torch.Tensor) -> torch.Tensor:
        """Logits of the complete vocabulary [s, b, padded vocabulary] for the output of `_compute`."""
        if self._is_plain:
            output, _ = self.module.output_layer(output, weight=self._output_weight)
        return gather_from_tensor_model_parallel_region(output, group=self._groups.tp)

    def _receive(self, rows: int, length: int) -> torch.Tensor:
        """The output [s, b, hidden] of the stage before this one."""
        shape = (length, rows, self.config.model.hidden_size)
        hidden = torch.empty(shape, dtype=self._dtype, device=self.device)
        torch.distributed.recv(hidden, self._stage(-1), group=self._groups.pp)
        return hidden

    def _stage(self, step: int) -> int:
        return torch.distributed.get_global_rank(self._groups.pp, self._groups.pp.rank() + step)


def _caching(chunk: GPTModel) -> Caching | None:
    """How `chunk` uses a cache. None unless all of its layers have the trainer's attention of one kind."""
    layers = [layer.self_attention for layer in chunk.decoder.layers]
    kinds = {(type(layer), type(getattr(layer, "core_attention", None))) for layer in layers}
    return next((caching for caching in CACHING if kinds == {(caching.layer, CoreAttention)}), None)
