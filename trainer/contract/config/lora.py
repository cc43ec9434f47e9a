"""Low-rank adapters (LoRA)."""

from __future__ import annotations

from trainer.contract.config.resume import Fixed
from trainer.contract.config.values import Count, Fraction, PositiveFloat
from trainer.contract.record import config_section


@config_section
class LoraConfig:
    """LoRA (arXiv 2106.09685): train a low-rank adapter next to each chosen linear layer. All weights of the model in
    checkpoint.load stay as they are, and checkpoints contain only the adapters."""

    rank: Fixed[Count | None] = None
    """Rank of the adapters. Default: no adapters, so all weights are trained."""
    alpha: PositiveFloat | None = None
    """Scale of the adapters: their output is multiplied by alpha / rank. Default: rank."""
    dropout: Fraction = 0.0
    """Dropout probability of the adapters' input."""
    target_modules: Fixed[tuple[str, ...] | None] = None
    """Linear layers with an adapter: linear_qkv, linear_proj, linear_fc1, linear_fc2, or shell patterns for complete
    names, such as `decoder.layers.0.*.linear_qkv` or `*.self_attention.*`. Default: all that the model has."""

    @property
    def scale(self) -> float:
        """Factor of the output of the adapters, which the resolved section has."""
        assert self.rank
        assert self.alpha
        return self.alpha / self.rank
