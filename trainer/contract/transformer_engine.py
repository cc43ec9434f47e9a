"""Versions of Transformer Engine: what they lack, and what they compute wrongly."""

from __future__ import annotations

import re

from trainer.contract.config import TrainerConfig

HAS_CROSS_ENTROPY = (2, 2)
RIGHT_FOR_EACH_TOKEN = (2, 11)
"""First version whose cross entropy multiplies the gradients of each token by the factor of its own loss.

Versions 2.2 to 2.7 take the factor of the first token for all (its pull request 2139). Versions 2.8 to 2.10 take those
of other tokens if a microbatch has several samples (2402). Version 2.16.1 was compared with torch on a GPU, with masks
and with other factors (tests/trainer/test_losses_gpu.py).
"""


def major_minor(version: str) -> tuple[int, int] | None:
    """The first two numbers of a version such as 2.16.1; None if it is not known."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else None


def cross_entropy_problem(config: TrainerConfig, version: str) -> str:
    """Why a run cannot use the cross entropy of `version`, after "but". Empty if it can.

    A version that is not known may be wrong.
    """
    known = major_minor(version)
    if known is not None and known < HAS_CROSS_ENTROPY:
        return f"Transformer Engine {version} has no cross entropy"
    is_right = known is not None and known >= RIGHT_FOR_EACH_TOKEN
    if is_right or not tokens_differ(config):
        return ""
    return (
        f"in Transformer Engine {version}, its gradients are wrong if tokens count differently, as with a loss mask, "
        f"MTP layers or a z-loss (right since {'.'.join(map(str, RIGHT_FOR_EACH_TOKEN))})"
    )


def tokens_differ(config: TrainerConfig) -> bool:
    """True if the losses of some tokens may have other factors than those of others, such as 0 by a loss mask."""
    data, model, training = config.data, config.model, config.training
    return data.masks_tokens or model.mtp_num_layers is not None or training.z_loss_coeff is not None
