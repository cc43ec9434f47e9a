"""Matrix products of the layers: forward, and the gradients of data and weights, in bf16 and FP8.

A row's m, n and k are those of the forward product y[m, n] = x[m, k] w[n, k]^T in all three passes: tokens, outputs
and inputs. With groups (experts), m counts the tokens of all groups, which have equally many. The gradient of the
weights is added to an fp32 buffer. FP8 operands are ready: their casts are kernels of their own (`memory`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.kernels import timing
from benchmarks.kernels.timing import Call

PASSES = ("forward", "data_gradient", "weight_gradient")
BYTES = {"bf16": 2, "fp8": 1}
TINY = [{"pass": each, "precision": "bf16", "m": 32, "n": 48, "k": 16, "groups": 1} for each in PASSES]
"""Jobs with which a CPU tries this."""

DENSE = (
    # tokens of a microbatch, (outputs, inputs) of the products of a layer
    ((4096, 8192, 16384), ((6144, 2048), (2048, 2048), (8192, 2048), (2048, 8192))),  # GPT 1.3B
    ((4096, 8192), ((3072, 2048), (2048, 1024), (4096, 2048), (2048, 4096))),  # the same, TP 2
    ((2048, 8192, 16384), ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))),  # Llama 8B
    ((8192, 16384), ((3072, 4096), (4096, 2048), (14336, 4096), (4096, 7168))),  # the same, TP 2
    ((8192,), ((10240, 8192), (8192, 8192), (57344, 8192), (8192, 28672))),  # Llama 70B
    ((4096, 8192), ((2560, 8192), (8192, 2048), (14336, 8192), (8192, 7168))),  # the same, TP 4
    ((8192,), ((1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584))),  # the same, TP 8
    ((4096, 8192), ((2304, 16384), (16384, 2048), (13312, 16384), (16384, 6656))),  # Llama 405B, TP 8
    ((2048, 4096), ((9216, 12288), (12288, 3072), (12288, 12288))),  # GPT 175B, TP 4
    ((2048, 4096), ((4608, 12288), (12288, 1536), (6144, 12288), (12288, 6144))),  # the same, TP 8
    (
        (4096,),
        ((1536, 7168), (576, 7168), (24576, 1536), (32768, 512), (7168, 16384)),
    ),  # DeepSeek-V3, latent attention
    ((4096,), ((12288, 1536), (16384, 512), (7168, 8192))),  # the same, TP 2
)
GROUPED = (
    # tokens of all groups, groups, (outputs, inputs)
    (16384, (8, 4, 2), ((28672, 4096), (4096, 14336))),  # Mixtral 8x7B
    (8192, (8,), ((28672, 4096), (4096, 14336))),
    (32768, (32, 8, 4), ((4096, 7168), (7168, 2048))),  # DeepSeek-V3
    (32768, (32, 8), ((1536, 2048), (2048, 768))),  # Qwen3 30B
    (32768, (16, 4), ((3072, 4096), (4096, 1536))),  # Qwen3 235B
)
OUTPUT = (
    # tokens, vocabulary / TP, hidden size. The trainer computes these in bf16 also in runs with FP8.
    (8192, 50304, 2048),
    (4096, 50304, 2048),
    (8192, 25152, 2048),
    (2048, 12576, 12288),
    (2048, 6288, 12288),
    (8192, 128256, 4096),
    (16384, 128256, 4096),
    (16384, 64128, 4096),
    (8192, 32064, 8192),
    (8192, 16032, 16384),
    (4096, 129280, 7168),
)


def jobs() -> Iterator[dict[str, Any]]:
    """The rows to measure, without their times."""
    dense = [(m, n, k, 1) for tokens, layer in DENSE for m in tokens for n, k in layer]
    grouped = [(m, n, k, g) for m, groups, layer in GROUPED for g in groups for n, k in layer]
    shapes = [("bf16", *shape) for shape in (*dense, *grouped, *((m, n, k, 1) for m, n, k in OUTPUT))]
    shapes += [("fp8", *shape) for shape in (*dense, *grouped)]
    for precision, m, n, k, groups in shapes:
        for each in PASSES:
            yield {"pass": each, "precision": precision, "m": m, "n": n, "k": k, "groups": groups}


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
