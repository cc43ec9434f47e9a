"""Matrix products of the layers: forward, and the gradients of data and weights, in bf16 and FP8.

A row's m, n and k are those of the forward product y[m, n] = x[m, k] w[n, k]^T in all three passes: tokens, outputs
and inputs. With groups (experts), m counts the tokens of all groups, which have equally many. The gradient of the
weights is added to an fp32 buffer. FP8 operands are ready: their casts are kernels of their own (`memory`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from trainer.calibration import timing
from trainer.calibration.timing import Call

PASSES = ("forward", "data_gradient", "weight_gradient")
BYTES = {"bf16": 2, "fp8": 1}


def measure(job: dict[str, Any], seconds: float, device: str) -> dict[str, Any]:
    """Time of a product."""
    size = BYTES[job["precision"]] * _values(job)
    calls = [product(job, device) for _ in range(timing.copies(size))]
    return timing.measure(calls, seconds, device)


def _values(job: dict[str, Any]) -> int:
    """Number of values in the operands and the result."""
    m, n, k, groups = job["m"], job["n"], job["k"], job["groups"]
    return m * k + m * n + groups * n * k


def product(job: dict[str, Any], device: str) -> Call:
    """Return a function that computes the product with random data of its own."""
    m, n, k, groups = job["m"], job["n"], job["k"], job["groups"]
    splits = [m // groups] * groups
    x = _random(m, k, device=device)
    dy = _random(m, n, device=device, scale=1e-3)
    weights = [_random(n, k, device=device, scale=0.02) for _ in range(groups)]
    if device == "cpu":
        return _of_torch(job["pass"], x, dy, weights[0])
    from transformer_engine.pytorch.cpp_extensions import general_gemm, general_grouped_gemm

    is_fp8 = job["precision"] == "fp8"
    xs, dys = list(x.split(splits)), list(dy.split(splits))
    if is_fp8:
        xs, weights = (
            [_cast(each, "kFloat8E4M3") for each in xs],
            [_cast(each, "kFloat8E4M3") for each in weights],
        )
        dys = [_cast(each, "kFloat8E5M2") for each in dys]
    # As in the recipes of FP8 with current and delayed scaling
    split_accumulator = is_fp8 and job["pass"] != "forward"
    if job["pass"] == "weight_gradient":
        a, b, layout = xs, dys, "NT"
        out = [torch.zeros(n, k, device=device) for _ in range(groups)]
    else:
        a, b, layout = (weights, xs, "TN") if job["pass"] == "forward" else (weights, dys, "NN")
        out = [torch.empty(m, n if job["pass"] == "forward" else k, device=device, dtype=torch.bfloat16)]
    keywords = {
        "layout": layout,
        "grad": job["pass"] != "forward",
        "accumulate": job["pass"] == "weight_gradient",
        "use_split_accumulator": split_accumulator,
    }
    if groups == 1:
        return functools.partial(general_gemm, a[0], b[0], out_dtype=out[0].dtype, out=out[0], **keywords)
    return functools.partial(
        general_grouped_gemm,
        a,
        b,
        out,
        [None] * groups,
        torch.bfloat16,
        m_splits=splits,
        single_output=job["pass"] != "weight_gradient",
        **keywords,
    )


def _random(*shape: int, device: str, scale: float = 1.0) -> torch.Tensor:
    # Random values, because products of zeros need less power and run at higher clocks.
    return torch.randn(*shape, device=device, dtype=torch.bfloat16).mul_(scale)


def _cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(getattr(tex.DType, dtype), torch.device("cuda"))
    return quantizer(tensor)


def _of_torch(which: str, x: torch.Tensor, dy: torch.Tensor, weight: torch.Tensor) -> Call:
    """The product without Transformer Engine."""
    if which == "forward":
        return lambda: x @ weight.t()
    if which == "data_gradient":
        return lambda: dy @ weight
    buffer = torch.zeros(weight.shape, dtype=torch.float32)
    return lambda: buffer.add_(dy.t() @ x)
