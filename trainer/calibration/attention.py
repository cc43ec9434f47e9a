"""Causal attention of Transformer Engine, which chooses the kernel as in training. `batch` samples of `seq` tokens."""

from __future__ import annotations

from typing import Any

import torch

from trainer.calibration import timing


def measure(job: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    """Time of one pass."""
    seq, batch, heads, groups = job["seq"], job["batch"], job["heads"], job["kv_heads"]
    qk_dim, v_dim = job["qk_dim"], job["v_dim"]
    options = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    q = torch.randn(seq, batch, heads, qk_dim, **options)
    k = torch.randn(seq, batch, groups, qk_dim, **options)
    v = torch.randn(seq, batch, groups, v_dim, **options)
    attention = _of_torch if device == "cpu" else of_transformer_engine(heads, groups, qk_dim, v_dim)
    gradient = torch.randn_like(attention(q, k, v))
    passes = timing.Passes(
        lambda: attention(q, k, v), lambda: torch.autograd.grad(attention(q, k, v), (q, k, v), gradient)
    )
    return timing.measure_pass([passes], job["pass"], seconds, device)


def of_transformer_engine(heads: int, groups: int, qk_dim: int, v_dim: int) -> Any:
    """Transformer Engine's attention of so many heads and groups of keys and values."""
    import transformer_engine.pytorch as te

    return te.DotProductAttention(
        heads,
        (qk_dim, v_dim),
        num_gqa_groups=groups,
        attention_dropout=0.0,
        qkv_format="sbhd",
        attn_mask_type="causal",
    )


def _of_torch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (each.permute(1, 2, 0, 3) for each in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
