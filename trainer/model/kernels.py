"""Chooses the kernels of a run from the installed ones, and reports missing ones.

Transformer Engine has the fast layers, attention, cross entropy and AdamW. NVIDIA's apex (not the package apex on PyPI)
has one kernel that Megatron-Core uses: it adds weight gradients directly to their fp32 buffer. If apex is missing, one
matrix product of torch replaces it.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Literal

import megatron.core.optimizer as core_optimizer
import torch
from megatron.core.models.common.language_module import language_module
from megatron.core.tensor_parallel import layers as core_layers
from megatron.core.transformer import attention as core_attention

from trainer.contract.config import DISCARDS_OUTPUT, TrainerConfig
from trainer.contract.errors import TrainerError
from trainer.contract.files.checkpoint_index import pickle_by_value
from trainer.contract.transformer_engine import cross_entropy_problem


@dataclass(frozen=True)
class Kernels:
    """The kernels of a run."""

    transformer_engine: str | None
    """Version of Transformer Engine if the layers use it, else None."""
    adamw: str
    """Library whose fused AdamW updates the weights."""
    cross_entropy: Literal["te", "native"]
    """Megatron-Core's name of the fused cross entropy."""
    weight_gradient: str | None
    """Library whose kernel accumulates weight gradients in fp32; None if there is none."""
    on_gpu: bool
    grouped_gemm: bool = False
    """True if the experts of a rank are computed in one grouped matrix product."""
    missing: tuple[str, ...] = ()
    """Libraries that are not installed and would make this run faster."""

    def __str__(self) -> str:
        if not self.on_gpu:
            return "torch's for the CPU"
        layers = (
            f"layers{', grouped experts' if self.grouped_gemm else ''} and attention by Transformer Engine "
            f"{self.transformer_engine}"
            if self.transformer_engine
            else f"layers and scaled_dot_product_attention by torch {torch.__version__}"
        )
        entropy = "Transformer Engine" if self.cross_entropy == "te" else "Megatron-Core"
        others = "Transformer Engine and " if self.transformer_engine else ""
        gradients = (
            f"weight gradients added in fp32 by {others}{self.weight_gradient}"
            if self.weight_gradient
            else "weight gradients added separately from their matrix products"
        )
        missing = f"; not installed: {', '.join(self.missing)}" if self.missing else ""
        return f"{layers}; cross entropy by {entropy}; fused AdamW by {self.adamw}; {gradients}{missing}"


TORCH = Kernels(
    transformer_engine=None, adamw="torch", cross_entropy="native", weight_gradient=None, on_gpu=False
)
"""torch's layers, without Core's fused kernels: for a CPU, and for inference on every device, since torch.compile would
compile fused kernels for new shapes."""


def choose(config: TrainerConfig) -> Kernels:
    """Choose kernels by `config` from the installed libraries, and set up the replacement for apex's kernel.

    Raises:
        TrainerError: `config` requires Transformer Engine, directly or for example by FP8, and it is missing.
    """
    training = config.training
    version = transformer_engine_version() if config.device == "cuda" else None
    wanted = training.transformer_impl
    if version is None:
        _refuse_what_needs_transformer_engine(config)
    if config.device != "cuda":
        return TORCH
    has_layers = version is not None and wanted != "torch"
    if has_layers:
        _split_without_copies()
        _pickle_formats_by_value()
    missing = () if version or wanted == "torch" else ("Transformer Engine (about 5% faster, and FP8)",)
    adamw = "torch" if core_optimizer.USING_PYTORCH_OPTIMIZER else "Transformer Engine" if version else "apex"
    return Kernels(
        transformer_engine=version if has_layers else None,
        adamw=adamw,
        cross_entropy=choose_cross_entropy(config, version),
        weight_gradient=weight_gradient_kernel() if training.precision != "fp32" else None,
        on_gpu=True,
        grouped_gemm=has_layers and _has_grouped_gemm(config),
        missing=missing,
    )


def _refuse_what_needs_transformer_engine(config: TrainerConfig) -> None:
    """Raise TrainerError for keys that need Transformer Engine, which this machine lacks.

    The rules (`trainer.contract.rules`) check whether the configuration allows it. hpcgen cannot see the image.
    """
    training = config.training
    requested = {
        "training.transformer_impl": training.transformer_impl
        if training.transformer_impl != "torch"
        else None,
        "training.cross_entropy_fusion_impl": "te" if training.cross_entropy_fusion_impl == "te" else None,
        **_needs_its_layers(config),
    }
    for key, value in requested.items():
        if value is not None:
            raise TrainerError(
                f"{key} = {value} requires a GPU and Transformer Engine, which cannot be imported. "
                "Use an image that has it (NVIDIA's PyTorch images do), or remove the key"
            )


def _needs_its_layers(config: TrainerConfig) -> dict[str, object]:
    """Keys that other layers would silently ignore, with their values. None means that the key requires nothing."""
    training, cp_comm_type = config.training, config.parallelism.cp_comm_type
    discarding = DISCARDS_OUTPUT.intersection(training.recompute_modules or ())
    return {
        "training.fp8": training.fp8,
        "training.cuda_graph_impl": training.cuda_graph_impl if training.cuda_graph_impl != "none" else None,
        "parallelism.tp_comm_overlap": config.parallelism.tp_comm_overlap or None,
        "parallelism.moe_grouped_gemm": config.parallelism.moe_grouped_gemm or None,
        # torch's kernels gather keys and values.
        "parallelism.cp_comm_type": None if cp_comm_type == "all_gather" else cp_comm_type,
        # Core's recomputation that discards outputs asks Transformer Engine whether FP8 is on.
        "training.recompute_modules": ", ".join(sorted(discarding)) or None,
        # torch's kernels would need a mask of all queries and keys.
        config.data.separating_key: (config.device == "cuda" and config.data.separates_documents) or None,
    }


def _has_grouped_gemm(config: TrainerConfig) -> bool:
    """True if Transformer Engine computes experts together. Its module has no biases (moe/experts.py, TEGroupedMLP)."""
    chosen, model = config.parallelism.moe_grouped_gemm, config.model
    return model.num_moe_experts is not None and (not model.add_bias_linear if chosen is None else chosen)


def choose_cross_entropy(config: TrainerConfig, version: str | None) -> Literal["te", "native"]:
    """Choose the cross entropy of Transformer Engine `version`, which is faster than Core's, if it is right and only
    rounds once.

    It rounds the gradient of each logit to the model's precision before it multiplies by the gradient of the loss.
    Megatron-LM found this unstable (its pull request 5115). In bf16 this factor is 1 here, since the loss is a sum that
    is scaled later in fp32, so nothing is rounded twice. In fp16 the factor is the loss scale, which is then applied
    too late. Megatron-LM does not count it among the deterministic ones.

    Raises:
        TrainerError: the configuration asks for it, and this version is missing it or wrong.
    """
    training = config.training
    if training.deterministic_mode or version is None:
        return "native"
    is_missing = language_module.te_parallel_cross_entropy is None
    lacking = f"Transformer Engine {version} has no cross entropy" if is_missing else ""
    problem = lacking or cross_entropy_problem(config, version)
    if training.cross_entropy_fusion_impl == "te" and problem:
        raise TrainerError(f"training.cross_entropy_fusion_impl = te, but {problem}. Remove the key")
    if training.cross_entropy_fusion_impl is not None:
        return training.cross_entropy_fusion_impl
    return "te" if training.precision == "bf16" and not problem else "native"


def transformer_engine_version() -> str | None:
    """Version of Transformer Engine; None if it cannot be imported."""
    try:
        import transformer_engine.pytorch
    except (ImportError, OSError):  # OSError: a linked library may be for another CUDA version
        return None
    return str(getattr(transformer_engine, "__version__", "of unknown version"))


def _split_without_copies() -> None:
    """Make Core use Transformer Engine's split of queries, keys and values, whose backward pass copies nothing.

    Core looks for it under an older name, and otherwise uses torch's split, whose backward pass concatenates the three
    gradients. That costs 4% of a step of GPT 1.3B on an H200 with megatron-core 0.19.2 and Transformer Engine 2.16.1.
    """
    if core_attention.SplitAlongDim is None:
        from transformer_engine.pytorch.utils import SplitAlongDim

        core_attention.SplitAlongDim = SplitAlongDim.apply


def _pickle_formats_by_value() -> None:
    """Transformer Engine pickles the scales of FP8 with their format, which every Python must be able to read."""
    from transformer_engine.common.recipe import Format

    pickle_by_value(Format)


def weight_gradient_kernel() -> str | None:
    """Library whose kernel adds weight gradients in fp32. If apex is missing, torch replaces it if possible."""
    if core_layers._grad_accum_fusion_available:  # Core has imported apex's kernel
        return getattr(core_layers.fused_weight_gradient_mlp_cuda, "owner", "apex")
    if not hasattr(torch.ops.aten.addmm, "dtype_out"):  # torch before 2.8
        return None
    core_layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=_accumulate, wgrad_gemm_accum_fp16=_accumulate, owner="torch"
    )
    core_layers._grad_accum_fusion_available = True
    return "torch"


def _accumulate(activation: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
    """main_grad [out, in] += gradient^T [out, tokens] x activation [tokens, in], rounded only as main_grad is."""
    activation = activation.reshape(-1, activation.shape[-1])
    gradient = gradient.reshape(-1, gradient.shape[-1])
    torch.ops.aten.addmm.dtype_out(
        main_grad, gradient.t(), activation, main_grad.dtype, beta=1, alpha=1, out=main_grad
    )
