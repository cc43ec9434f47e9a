"""Optimizer and its schedule."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Literal

from trainer.contract.config.path import FunctionPath
from trainer.contract.config.resume import Free, Grouped
from trainer.contract.config.values import Count, Fraction, NonNegative, NonNegativeFloat, PositiveFloat
from trainer.contract.record import config_section


@config_section
class ParameterGroup:
    """Multipliers for parameters selected by name."""

    match: str
    """Shell pattern for parameter names in the unsharded model, such as `embedding.*` or `decoder.layers.0.*`."""
    wd_mult: NonNegativeFloat = 1.0
    """Factor for weight_decay. Biases and normalization weights never have weight decay."""
    lr_mult: NonNegativeFloat = 1.0
    """Factor for the learning rate."""


def group_index(name: str, groups: Sequence[ParameterGroup]) -> int | None:
    """Index of the first of the `groups` that matches the global name of a parameter; None if there is none."""
    return next((index for index, group in enumerate(groups) if fnmatchcase(name, group.match)), None)


@config_section
class OptimizerConfig:
    """AdamW and the learning-rate schedule. The distributed optimizer is always on."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of the decay. Default: lr / 10."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up. WSD stays constant and decays in the last lr_wsd_decay_iters steps."""
    lr_decay_iters: Count | None = None
    """Step at which the decay ends. Default: train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the decay of WSD."""
    lr_wsd_decay_iters: Count | None = None
    """Number of decay steps of WSD. Default: lr_decay_iters / 10."""
    lr_schedule: FunctionPath | None = None
    """Custom decay function in place of lr_decay_style, as `package.module:function` or `file.py:function`."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_warmup_iters: NonNegative | None = None
    """Number of linear warm-up steps. Default without lr_warmup_fraction: the steps for 375M tokens, but at most a
    tenth of the run."""
    lr_warmup_fraction: Free[Fraction | None] = None
    """Length of the warm-up as a fraction of lr_decay_iters, in place of lr_warmup_iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay. It does not apply to biases and normalization weights."""
    parameter_groups: Grouped[tuple[ParameterGroup, ...]] = ()
    """Parameters with their own weight decay or learning rate. The first matching group applies."""
    adam_beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    adam_beta2: Fraction = 0.95
    """Decay rate of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Epsilon added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 disables clipping."""
    loss_scale: PositiveFloat | None = None
    """Fixed loss scale for fp16. Default: adaptive."""
    initial_loss_scale: Free[PositiveFloat] = 2.0**32
    """Initial value of the adaptive loss scale for fp16."""
    min_loss_scale: Free[PositiveFloat] = 1.0
    """Minimum loss scale for fp16. The run ends if gradients overflow at this scale or at a fixed loss_scale."""
    loss_scale_window: Count = 1000
    """Number of fp16 steps without overflow after which the loss scale doubles."""
    hysteresis: Count = 2
    """Number of overflows, since the fp16 loss scale last doubled, after which it is halved. Each further overflow
    halves it again."""
