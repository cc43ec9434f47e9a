"""Source of the samples."""

from __future__ import annotations

from trainer.contract.config.path import FilePath, FunctionPath
from trainer.contract.config.resume import Free
from trainer.contract.config.values import Count, NonNegative, PositiveFloat
from trainer.contract.record import config_section

NAMED_SPLIT = "valid/"
"""Beginning of the splits of named validation sets. The name of the set follows."""


@config_section
class Dataset:
    """One tokenized corpus in a blend."""

    prefix: FilePath
    """Path of the .bin/.idx pair without the suffix."""
    weight: PositiveFloat | None = None
    """Weight in the blend. If no dataset has a weight, each is weighted by its number of tokens in the split, or of
    samples for chats."""


@config_section
class ValidationSet:
    """A validation set that is evaluated on its own."""

    name: str
    """Name of the set: its loss is the split valid/NAME in metrics and reports."""
    datasets: tuple[Dataset, ...]
    """Blend of the set. All documents of its pairs are read, and none may be trained on."""
    eval_iters: Count | None = None
    """Number of global batches per evaluation of this set. Default: training.eval_iters."""
    sft: bool | None = None
    """The documents of this set are chats, of which only the answers count. Default: data.sft."""

    @property
    def split(self) -> str:
        """Name of its split in metrics."""
        return f"{NAMED_SPLIT}{self.name}"


@config_section
class DataStage:
    """A part of the run with weights of its own for the training pairs."""

    name: str
    """Name in the log, in metrics.jsonl and in the report."""
    train: tuple[Dataset, ...]
    """The mixture of the stage: pairs of `datasets` or `train`, each at most once. If none has a weight, each is
    weighted by its number of training tokens."""
    until_iter: Count | None = None
    """Last iteration of the stage. Required for all stages but the last, which lasts until the end of the run."""


@config_section
class BlendConfig:
    """Source of training, validation and test samples: exactly one of `datasets`, `train` (with `valid`, `test`),
    `dataset` and `mock`."""

    datasets: tuple[Dataset, ...] = ()
    """Option 1: one blend, divided by `split`."""
    split: str = "99990,8,2"
    """Proportions of train, valid and test for `datasets`. The documents of each dataset are divided in order."""
    train: tuple[Dataset, ...] = ()
    """Option 2: a blend for each split. `train` is required, `valid` and `test` are optional. A pair may be in only
    one split."""
    valid: Free[tuple[Dataset, ...]] = ()
    """Validation blend of option 2."""
    test: Free[tuple[Dataset, ...]] = ()
    """Test blend of option 2, evaluated once after the last step."""
    validation: Free[tuple[ValidationSet, ...]] = ()
    """Named validation sets, each with a loss of its own. They are evaluated together with `valid` and in addition to
    it."""
    stages: tuple[DataStage, ...] = ()
    """Mixtures that follow each other during the run. Each pair continues where the stage before left it. Validation
    and test keep the weights of `datasets`, or those of `valid` and `test`. Default: one mixture for all of the run."""
    dataset: FunctionPath | None = None
    """Option 3: samples of your own, from a function or a class that is called with the name of the split and the
    configuration: package.module:function or file.py:function (`trainer.contract.code.imports.SampleProvider`)."""
    mock: bool = False
    """Option 4: synthetic samples, for testing a cluster without data."""
    reset_attention_mask: bool = False
    """Attend only to tokens of the same document. A document ends after the end-of-document token. Default: attend to
    all earlier tokens of the sample."""
    reset_position_ids: bool = False
    """Count positions from the beginning of each document. This changes learned positions; rotary embeddings depend
    only on distances. Default: count from the beginning of the sample."""
    eod_mask_loss: bool = False
    """Leave the prediction after the end-of-document token, the next document's first token, out of the loss."""
    sft: bool = False
    """The documents are chats with a loss mask, PREFIX.mask: learn only the answers of the assistant. Chats never see
    each other, and positions begin with each chat."""
    sft_packing: bool = True
    """With sft: put several chats into a sample. Otherwise, each chat has a sample of its own, padded to seq_length."""
    eod_id: NonNegative | None = None
    """ID of the end-of-document token, for the three keys above. Default: the token of data.tokenizer."""
    num_workers: Free[NonNegative] = 2
    """Number of data loader processes per rank; 0 loads in the training process."""
    cache_dir: Free[FilePath | None] = None
    """Directory of the sample indices. Default: `index-cache` in the run directory."""

    @property
    def blends(self) -> dict[str, tuple[Dataset, ...]]:
        """The lists of pairs by their keys in the section, also empty ones."""
        lists = {"datasets": self.datasets, "train": self.train, "valid": self.valid, "test": self.test}
        named = {f"validation[{index}].datasets": each.datasets for index, each in enumerate(self.validation)}
        return lists | named

    @property
    def needs_eod(self) -> bool:
        """True if the trainer must know the end-of-document token."""
        return self.reset_attention_mask or self.reset_position_ids or self.eod_mask_loss

    @property
    def masks_tokens(self) -> bool:
        """True if tokens may be left out of the loss."""
        return self.sft or self.eod_mask_loss or self.dataset is not None

    @property
    def separates_documents(self) -> bool:
        """True if tokens attend only to tokens of the same document or chat."""
        return self.sft or self.reset_attention_mask

    @property
    def predicts_next_document(self) -> bool:
        """True if the first token of a document is predicted from the end of another document."""
        return not (self.separates_documents or self.eod_mask_loss)

    @property
    def separating_key(self) -> str:
        """The key that separates documents, if they are separate."""
        return "data.sft" if self.sft else "data.reset_attention_mask"
