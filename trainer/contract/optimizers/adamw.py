"""AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

import itertools
import math

from trainer.contract.optimizers.kind import Kind, Optimizer

PUBLISHED = (
    (125e6, 6.0e-4),
    (350e6, 3.0e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2.0e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1.0e-4),
    (175e9, 0.6e-4),
)
"""Number of parameters and peak learning rate: Brown et al., arXiv 2005.14165, table 2.1. Llama 3's rates are up to
three times as high (arXiv 2407.21783, table 3)."""


class AdamW(Optimizer):
    """Two moments for each parameter."""

    name = "AdamW"
    megatron = "adam"
    keys = ("adam_beta1", "adam_beta2", "adam_eps")
    sharding = "distributed"
    largest_lr = 0.1  # initial weights have a standard deviation of about 0.02

    def moments(self, kind: Kind) -> tuple[str, ...]:
        """The means of the gradients and of their squares."""
        return ("exp_avg", "exp_avg_sq")

    def usual_lr(self, parameters: float) -> float:
        """The rates in PUBLISHED, interpolated in log space.

        Below their range: 0.003239 - 0.0001395 x ln(parameters), fitted to models of up to a billion parameters (Kaplan
        et al., arXiv 2001.08361, appendix D.6).
        """
        if parameters <= PUBLISHED[0][0]:
            return max(PUBLISHED[0][1], 0.003239 - 0.0001395 * math.log(parameters))
        for (small, upper), (large, lower) in itertools.pairwise(PUBLISHED):
            if parameters <= large:
                share = math.log(parameters / small) / math.log(large / small)
                return upper * math.pow(lower / upper, share)
        return PUBLISHED[-1][1]

    def effect_of_lr(self, lr: float) -> str:
        """A step moves each weight by about the learning rate (Kingma and Ba, arXiv 1412.6980, section 2.1)."""
        return f"each step would move every weight by about {lr:g}"


ADAMW = AdamW()
