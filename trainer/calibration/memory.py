"""Kernels whose time is that of the bytes they move: those that the trainer runs between the matrix products.

`bytes` of a row are those that the kernel cannot avoid: inputs read once and outputs written once. `width` is the
number of values per token in the output: for SwiGLU half of those in the input, for the cross entropy the vocabulary.
Kernels of the optimizer count parameters as `tokens` of width 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from trainer.calibration import timing
from trainer.calibration.timing import Call, Passes
from trainer.contract.calibration import VOCABULARY, moved_bytes

Job = dict[str, Any]
BF16, FP32 = torch.bfloat16, torch.float32
TENSORS = 16
"""The optimizer gets its parameters as this many tensors."""

ON_HOST = {"adam", "cross_entropy", "gradient_norm"}
"""Kernels that read a value from the GPU or need arguments from the host, so that no CUDA graph can hold them."""


def measure(job: Job, seconds: float, device: str) -> Job:
    """Bytes and time of one pass of a kernel."""
    forward, backward = moved_bytes(job)
    is_forward = job["pass"] == "forward"
    if device == "cuda":
        # All other kernels have one shape per run.
        torch._dynamo.config.automatic_dynamic_shapes = job["kernel"] == "weighted_swiglu"
        torch._dynamo.config.recompile_limit = 64
    size = (forward if is_forward else backward) * job["tokens"] * job["width"]
    kernels = [BUILDERS[job["kernel"]](job, device) for _ in range(timing.copies(size))]
    graph = job["kernel"] not in ON_HOST
    if all(isinstance(each, Passes) for each in kernels):
        return {"bytes": size} | timing.measure_pass(kernels, job["pass"], seconds, device, graph=graph)
    return {"bytes": size} | timing.measure(kernels, seconds, device, graph=graph)


def _random(*shape: int, device: str, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device=device, dtype=dtype)


def _activations(job: Job, device: str, factor: int = 1) -> torch.Tensor:
    return _random(job["tokens"], job["width"] * factor, device=device).requires_grad_()


def _differentiated(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Passes:
    """Both passes of a function."""
    gradient = torch.randn_like(function(*inputs))
    wanted = [each for each in inputs if each.requires_grad]
    return Passes(lambda: function(*inputs), lambda: torch.autograd.grad(function(*inputs), wanted, gradient))


def _norm(job: Job, device: str) -> Passes:
    import transformer_engine.pytorch as te

    norm = te.RMSNorm if job["kernel"] == "norm" else te.LayerNorm
    module = norm(job["width"], dtype=BF16, device=device)
    x = _activations(job, device)
    weights = list(module.parameters())
    return _differentiated(lambda x, *_: module(x), x, *weights)


def _swiglu(job: Job, device: str) -> Passes:
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    return _differentiated(lambda y: bias_swiglu_impl(y, None), _activations(job, device, 2))


def _weighted_swiglu(job: Job, device: str) -> Passes:
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl

    def weighted(y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = weighted_bias_swiglu_impl(y, None, weights)
        return output

    weights = torch.rand(job["tokens"], 1, device=device).requires_grad_()
    # Experts get other numbers of tokens each time, so torch.compile makes a kernel for any number, which is slower.
    fewer = job | {"tokens": job["tokens"] // 2}
    _differentiated(weighted, _activations(fewer, device, 2), weights[::2]).both()
    return _differentiated(weighted, _activations(job, device, 2), weights)


def _gelu(job: Job, device: str) -> Passes:
    from megatron.core.fusions.fused_bias_gelu import bias_gelu_impl

    bias = _random(job["width"], device=device).requires_grad_()
    return _differentiated(bias_gelu_impl, _activations(job, device), bias)


def _rope(job: Job, device: str) -> Passes:
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    tokens, heads = job["tokens"], job["width"] // 128
    angles = torch.randn(tokens, 1, 1, 128, device=device)
    x = _random(tokens, 1, heads, 128, device=device).requires_grad_()
    return _differentiated(lambda x: fused_apply_rotary_pos_emb(x, angles), x)


def _residual(job: Job, device: str) -> Call:
    """Forward, the output of a part is added to the residual. Backward, their gradients are added."""
    from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train

    x, residual = _activations(job, device), _activations(job, device)
    a, b = _random(*x.shape, device=device), _random(*x.shape, device=device)
    if job["pass"] == "backward":
        return lambda: a + b
    return lambda: bias_dropout_add_fused_train((x, None), residual, 0.0)


def _cross_entropy(job: Job, device: str) -> Passes:
    from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

    logits = _random(job["tokens"], 1, job["width"], device=device).requires_grad_()
    labels = torch.randint(job["width"], (job["tokens"], 1), device=device)
    return _differentiated(lambda logits: parallel_cross_entropy(logits, labels), logits)


def _cast_current(job: Job, device: str) -> Call:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer

    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device(device))
    x = _random(job["tokens"], job["width"], device=device)
    return lambda: quantizer(x)


def _cast_delayed(job: Job, device: str) -> Call:
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    scale, largest = torch.ones(1, device=device), torch.zeros(1, device=device)
    quantizer = Float8Quantizer(scale, largest, tex.DType.kFloat8E4M3)
    x = _random(job["tokens"], job["width"], device=device)
    return lambda: quantizer(x)


def _routed(job: Job, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each token, evenly chosen, and their weights."""
    order = torch.rand(job["tokens"], job["experts"], device=device).argsort(dim=1)
    chosen = order < job["topk"]
    return chosen, torch.rand(job["tokens"], job["experts"], device=device) * chosen


def _permute(job: Job, device: str) -> Passes:
    from megatron.core.transformer.moe.moe_utils import permute

    chosen, weights = _routed(job, device)
    rows = job["tokens"] * job["topk"]

    def permuted(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = permute(x, chosen, probs=weights, num_out_tokens=rows, fused=True)[0]
        return output

    return _differentiated(permuted, _activations(job, device))


def _unpermute(job: Job, device: str) -> Passes:
    from megatron.core.transformer.moe.moe_utils import permute, unpermute

    chosen, weights = _routed(job, device)
    x = _activations(job, device)
    y, _, places, *_ = permute(x, chosen, probs=weights, num_out_tokens=len(x) * job["topk"], fused=True)
    y = y.detach().requires_grad_()
    return _differentiated(lambda y: unpermute(y, places, x.shape, fused=True), y)


def _router(job: Job, device: str) -> Passes:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear, topk_routing_with_score_function

    weight = _random(job["experts"], job["width"], device=device).mul_(0.02).requires_grad_()

    def routed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        logits = router_gating_linear(x, weight, None, FP32)
        weights: torch.Tensor = topk_routing_with_score_function(logits, job["topk"])[0]
        return weights

    return _differentiated(routed, _activations(job, device), weight)


def _tensors(job: Job, device: str, dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    return [_random(job["tokens"] // TENSORS, device=device, dtype=dtype) for _ in range(TENSORS)]


def _adam(job: Job, device: str) -> Call:
    from transformer_engine.pytorch.optimizers import FusedAdam

    parameters = [each.requires_grad_() for each in _tensors(job, device)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return FusedAdam(parameters, lr=1e-4, weight_decay=0.1, adam_w_mode=True).step


def _copy_parameters(job: Job, device: str) -> Call:
    sources, targets = _tensors(job, device), _tensors(job, device, BF16)
    return lambda: [target.copy_(source) for source, target in zip(sources, targets, strict=True)]


def _gradient_norm(job: Job, device: str) -> Call:
    from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm

    gradients, overflow = _tensors(job, device), torch.zeros(1, dtype=torch.int, device=device)
    return lambda: multi_tensor_applier(multi_tensor_l2norm, overflow, [gradients], False)


def _scale_gradients(job: Job, device: str) -> Call:
    gradients = _tensors(job, device)
    return lambda: torch._foreach_mul_(gradients, 0.999)


def _zero_gradients(job: Job, device: str) -> Call:
    return _random(job["tokens"], device=device, dtype=FP32).zero_


def _accumulate(job: Job, device: str) -> Call:
    """A gradient that no matrix product adds to its fp32 buffer, such as that of a norm or of the embedding."""
    buffer, gradient = (
        _random(job["tokens"], device=device, dtype=FP32),
        _random(job["tokens"], device=device),
    )
    return lambda: buffer.add_(gradient)


def _embedding(job: Job, device: str) -> Passes:
    weight = _random(VOCABULARY, job["width"], device=device).requires_grad_()
    tokens = torch.randint(VOCABULARY, (job["tokens"], 1), device=device)
    return _differentiated(lambda weight: torch.nn.functional.embedding(tokens, weight), weight)


BUILDERS: dict[str, Callable[[Job, str], Passes | Call]] = {
    "norm": _norm,
    "layer_norm": _norm,
    "swiglu": _swiglu,
    "weighted_swiglu": _weighted_swiglu,
    "gelu": _gelu,
    "rope": _rope,
    "residual": _residual,
    "cross_entropy": _cross_entropy,
    "cast_current": _cast_current,
    "cast_delayed": _cast_delayed,
    "permute": _permute,
    "unpermute": _unpermute,
    "router": _router,
    "adam": _adam,
    "copy_parameters": _copy_parameters,
    "gradient_norm": _gradient_norm,
    "scale_gradients": _scale_gradients,
    "zero_gradients": _zero_gradients,
    "accumulate": _accumulate,
    "embedding": _embedding,
}
