"""The user's own functions, which the configuration names by import path.

An import path is `package.module:function`, for modules that are installed or on PYTHONPATH, or
`path/of/file.py:function`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypedDict

from trainer.contract.config import OptimizerConfig, PathKind, TrainerConfig, paths_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    from trainer.contract.config import TrainerConfig
    from trainer.data.microbatch import MicroBatch

IMPORT_PATH = re.compile(r"(?P<source>[^:\n]+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")

_PACKAGES_OF_TRAINER = ("megatron", "numpy", "torch", "trainer")


class LayerSpec(Protocol):
    """Signature of `model.layer_spec`, which returns the layers of the decoder."""

    def __call__(
        self, core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
    ) -> TransformerBlockSubmodules | ModuleSpec:
        """Return either a block that replaces `usual`, this rank's default chunk, or one layer spec for all layers."""


class ModelProvider(Protocol):
    """Signature of `model.model_provider`: a subclass of GPTModel, or a function that is called instead of it."""

    def __call__(
        self,
        *,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool,
        post_process: bool,
        share_embeddings_and_output_weights: bool,
        position_embedding_type: str,
        rotary_base: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> GPTModel:
        """Return chunk `vp_stage` of this rank. It embeds tokens if `pre_process`, has the loss if `post_process`."""


class Rate(Protocol):
    """Signature of `optimizer.lr_schedule`, the learning rate after the warm-up."""

    def __call__(self, iteration: int, optimizer: OptimizerConfig) -> float:
        """Return the learning rate of the step that follows `iteration` steps of the run. `optimizer` is resolved."""


class TokenLoss(Protocol):
    """Signature of `training.loss`, and of the instances of a class that it names (`LossClass`).

    b is the microbatch, s the tokens of the samples on this context-parallel rank, and v is model.padded_vocab_size.
    With an attribute `vocab_parallel = True`, v is this rank's part of the vocabulary (`trainer.model.vocab_parallel`).
    """

    def __call__(
        self, *, logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
    ) -> torch.Tensor | tuple[torch.Tensor, Mapping[str, torch.Tensor]]:
        """Return the losses of all tokens [b, s], and optionally parts of them to log, each [b, s].

        `logits` is [b, s, v] in fp32, `labels` is [b, s], and `loss_mask` [b, s] is 1 where the loss counts. A step
        minimizes the sum of the losses that count, divided by their number in the global batch. The names of the parts
        are those of an attribute `terms`, a tuple.
        """


class LossClass(Protocol):
    """Signature of a class that `training.loss` names. Ranks that compute the loss make one instance at the start."""

    def __call__(self, config: TrainerConfig) -> TokenLoss:
        """Return the loss. `config` is resolved."""


class Metric(Protocol):
    """Signature of the functions in `training.metrics`. The name of a function is the name of its column.

    They get what `TokenLoss` gets, without gradients, and can have the attribute `vocab_parallel` too.
    """

    def __call__(
        self, *, logits: torch.Tensor, labels: torch.Tensor, loss_mask: torch.Tensor, batch: MicroBatch
    ) -> tuple[torch.Tensor | float, torch.Tensor | float]:
        """Return a sum over the tokens or samples of the microbatch, and their number, as scalars.

        The metric is the sum over all ranks and microbatches, divided by the number.
        """


class Sample(TypedDict, total=False):
    """A sample of s = model.seq_length tokens: tensors or numpy arrays of integers."""

    tokens: torch.Tensor
    """IDs of tokens [s], or [s + 1] in a sample without labels. Required."""
    labels: torch.Tensor
    """The ID to predict after each token [s]. Default: the next of the s + 1 tokens."""
    loss_mask: torch.Tensor
    """1 for each label that the model learns, otherwise 0 [s]. Default: all are learned."""
    position_ids: torch.Tensor
    """Positions [s], for a model with learned positions. Default: 0 to s - 1."""


class MapStyleSamples(Protocol):
    """Samples by number, as a list or a map-style dataset of torch."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def __getitem__(self, index: int) -> Sample:
        """Return a sample, the same one in every process and at every call."""


class StreamOfSamples(Protocol):
    """Samples in a fixed order, as an iterable dataset of torch or a generator.

    With `state_dict()` and `load_state_dict(state)`, a resumed run continues a stream without reading it from its
    beginning. The state is a dictionary that JSON can represent.
    """

    def __iter__(self) -> Iterator[Sample]:
        """Iterate over the samples: from the first one, or from the loaded state. The order is always the same."""


class SampleProvider(Protocol):
    """Signature of `data.dataset`: a function, a generator function or a class."""

    def __call__(self, split: str, config: TrainerConfig) -> MapStyleSamples | StreamOfSamples | None:
        """Return the samples of a split, "train", "valid" or "test". None if there are none for this split.

        `config` is resolved: config.model.seq_length, config.model.padded_vocab_size and config.training.seed, for
        example. Every process calls this.
        """


def file_of(path: str) -> str | None:
    """The file in an import path; None for a module or an invalid import path."""
    match = IMPORT_PATH.fullmatch(path)
    return match["source"] if match and match["source"].endswith(".py") else None


def name_problem(file: str) -> str:
    """Why a file cannot be imported as a module of its own name. Empty if it can, as far as this Python knows."""
    stem = Path(file).stem
    if not stem.isidentifier():
        return f"names {file}, but {stem} is not a valid module name"
    if stem in sys.stdlib_module_names or stem in _PACKAGES_OF_TRAINER:
        return f"names {file}, but {stem} is the name of another module, which Python would import"
    return ""


def with_file(path: str, file: str) -> str:
    """Import path of the same function in another file."""
    return f"{file}:{path.rpartition(':')[2]}"


def named(config: Any) -> dict[str, str]:
    """Import paths in the configuration of the trainer, or in a run file, by key."""
    return {key: text for key, kind, text in paths_in(config) if kind is PathKind.FUNCTION and text}
