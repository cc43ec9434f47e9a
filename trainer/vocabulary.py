"""How many rows the embedding has; standard library only, since hpcgen plans with it."""

from __future__ import annotations

from trainer.config import ConfigError, ModelConfig

MULTIPLE = 128


def pad_vocab_size(vocab_size: int) -> int:
    """The next multiple of 128.

    Megatron-LM pads to a multiple of 128 x TP, so that another layout has another model: padded columns are
    not masked, and 50432 rows in place of 50304 raise the first loss by ln(50432 / 50304) = 0.0025.
    """
    return -(-vocab_size // MULTIPLE) * MULTIPLE


def vocabulary_rows(model: ModelConfig) -> int:
    """Rows of the embedding: padded once, whatever the layout, so that every layout has the same loss.

    Raises:
        ConfigError: neither vocab_size nor padded_vocab_size is set, or the padding cuts tokens off.
    """
    if model.padded_vocab_size is None:
        if model.vocab_size is None:
            raise ConfigError("model.vocab_size is null; the trainer has no tokenizer to ask, so set it")
        return pad_vocab_size(model.vocab_size)
    if model.vocab_size is not None and model.padded_vocab_size < model.vocab_size:
        raise ConfigError(
            f"model.padded_vocab_size = {model.padded_vocab_size} is below "
            f"model.vocab_size = {model.vocab_size}"
        )
    return model.padded_vocab_size
