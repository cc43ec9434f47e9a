"""The validation sets of a run: which configuration evaluates each, and how many batches that takes."""

from __future__ import annotations

from trainer.contract.config import NAMED_SPLIT, BlendConfig, TrainerConfig
from trainer.contract.record import replaced


def config_of_split(config: TrainerConfig, split: str) -> TrainerConfig:
    """The configuration that evaluates a split. For a named set, `config` with this set as its only blend."""
    if not split.startswith(NAMED_SPLIT):
        return config
    [chosen] = (each for each in config.data.validation if each.split == split)
    sft = config.data.sft if chosen.sft is None else chosen.sft
    data = replaced(
        config.data if sft == config.data.sft else _with_other_samples(config.data, sft),
        datasets=(),
        split=BlendConfig.split,
        train=(),
        valid=chosen.datasets,
        test=(),
        dataset=None,
        validation=(),
    )
    eval_iters = chosen.eval_iters or config.training.eval_iters
    return replaced(config, data=data, training=replaced(config.training, eval_iters=eval_iters))


def _with_other_samples(data: BlendConfig, sft: bool) -> BlendConfig:
    """`data` with chats in place of texts, or the reverse. The keys for the documents of texts are left out."""
    return replaced(
        data, sft=sft, reset_attention_mask=False, reset_position_ids=False, eod_mask_loss=False, eod_id=None
    )


def batches_per_evaluation(config: TrainerConfig) -> int:
    """Number of global batches that an evaluation reads: those of `valid` and of all named sets."""
    data, eval_iters = config.data, config.training.eval_iters
    if not eval_iters:
        return 0
    has_valid = bool(data.valid or data.mock or data.datasets or data.dataset)
    return has_valid * eval_iters + sum(each.eval_iters or eval_iters for each in data.validation)
