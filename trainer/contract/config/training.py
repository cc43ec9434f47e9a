"""Batch, length, precision and recomputation."""

from __future__ import annotations

from typing import Literal

from trainer.contract.config.path import FunctionPath
from trainer.contract.config.resume import Free, Grouped
from trainer.contract.config.values import (
    Count,
    NonNegative,
    NonNegativeFloat,
    OpenFraction,
    PositiveFloat,
    Seed,
)
from trainer.contract.record import config_section

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj"]
RECOMPUTED_BY_DEFAULT: tuple[RecomputeModule, ...] = ("core_attn",)
"""Megatron-Core's default of training.recompute_modules (transformer_config.py)."""
DISCARDS_OUTPUT = frozenset(("layernorm", "moe_act", "mla_up_proj"))
"""Modules whose recomputation discards their output. Core needs Transformer Engine for it."""


@config_section
class EarlyStopping:
    """End of the run when evaluations no longer improve."""

    monitor: str = "valid/loss"
    """Number to watch, as SPLIT/COLUMN: valid/loss, valid/NAME/loss of a named validation set, or a metric of your own
    in place of loss."""
    mode: Literal["min", "max"] = "min"
    """min: lower values are better. max: higher values are better."""
    min_delta: NonNegativeFloat = 0.0
    """Change that an improvement must exceed to keep the run going. The best value is the best of all, whatever this
    is."""
    patience: Count = 3
    """Number of evaluations in a row without such an improvement after which the run ends."""


@config_section
class TrainingConfig:
    """Batch size, length, precision, recomputation and evaluation."""

    micro_batch_size: Free[Count]
    """Number of samples in one forward pass of a data-parallel rank."""
    global_batch_size: Count
    """Number of samples in one optimizer step over all ranks."""
    train_iters: Free[Count]
    """Total number of optimizer steps."""
    seed: Seed = 1234
    """Seed for the initial weights, the data order and dropout."""
    rampup_batch_size: tuple[Count, ...] | None = None
    """Batch-size ramp-up as [start, increment, samples]: the global batch size grows from start to global_batch_size
    over this number of samples."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Training precision. bf16 and fp16 keep fp32 master weights and gradients; fp16 also scales the loss. fp32 is for
    tests and CPUs."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """FP8 format for the matrix products of the layers; hybrid uses e5m2 for gradients. Requires Transformer Engine.
    null disables FP8."""
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    """FP8 scaling: tensorwise (current scaling, from the tensor itself) or delayed (from the maxima of earlier
    steps)."""
    fp8_amax_history_len: Count = 1024
    """Length of the history of maxima for delayed scaling, in steps."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Value of the history that delayed scaling uses: the maximum or the most recent one."""
    freeze: Grouped[tuple[str, ...]] = ()
    """Shell patterns for the names of parameters that are not trained, such as `embedding.*` or
    `decoder.layers.[01].*`. The names are those of optimizer.parameter_groups."""
    ema_decay: OpenFraction | None = None
    """Decay of an exponential moving average of the trained weights, such as 0.9999, which checkpoints contain in
    fp32. Default: no average."""
    transformer_impl: Free[Literal["transformer_engine", "torch"] | None] = None
    """Kernels of the transformer layers. Default: transformer_engine if it is installed, otherwise torch."""
    cross_entropy_fusion_impl: Literal["te", "native"] | None = None
    """Cross entropy: Transformer Engine's (te), or Megatron-Core's (native), which is fused in bf16 only, because it
    rounds gradients to bf16. Default: te for bf16, unless the installed version is wrong for the run's loss masks or
    z-loss (before 2.11); otherwise native."""
    loss: FunctionPath | None = None
    """Loss of your own, as package.module:function or file.py:function: it gets the logits and returns the loss of each
    token, which a step minimizes in place of the cross entropy. It is logged as objective."""
    metrics: Free[tuple[FunctionPath, ...]] = ()
    """Metrics of your own, as import paths of functions. Each gets the logits and returns a sum and a number. The name
    of the function is that of the column. They are computed in evaluations, and in each step of log_interval."""
    z_loss_coeff: NonNegativeFloat | None = None
    """Weight of the z-loss: the squared logarithm of the sum of exponentials of the logits, a mean over tokens. It is
    added to the gradients and logged as output_z_loss. PaLM uses 1e-4. null: none."""
    cuda_graph_impl: Free[Literal["none", "transformer_engine"]] = "none"
    """CUDA-graph backend for the transformer layers. Helps when kernel launches are the bottleneck. Requires bf16 and
    no dropout."""
    deterministic_mode: Free[bool] = False
    """Use only kernels with bitwise reproducible results. Slower."""
    recompute_granularity: Free[Literal["selective", "full"] | None] = None
    """Activations to recompute in the backward pass: selective (recompute_modules), full (entire layers), or null for
    none."""
    recompute_modules: Free[tuple[RecomputeModule, ...] | None] = None
    """With selective recomputation: parts of each layer to recompute. core_attn, mlp and moe keep only their input;
    layernorm, moe_act (the activation function of experts) and mla_up_proj discard their output. Default:
    [core_attn]."""
    recompute_method: Free[Literal["uniform", "block"] | None] = None
    """With full recomputation: recompute all layers in groups of recompute_num_layers (uniform), or only the first
    recompute_num_layers of each stage (block)."""
    recompute_num_layers: Free[Count | None] = None
    """Number of layers per group (uniform) or per stage (block)."""
    eval_interval: Free[Count | None] = None
    """Optimizer steps between evaluations. Default: evaluate only at the end."""
    eval_iters: Free[NonNegative] = 10
    """Number of global batches per evaluation; 0 disables evaluation."""
    early_stopping: Free[EarlyStopping | None] = None
    """End the run when evaluations no longer improve; null trains to train_iters."""
    distributed_timeout_minutes: Free[Count] = 60
    """Timeout of collectives in minutes until the first step is complete, while indices and weights are loaded. The job
    ends if a collective takes longer."""
    distributed_timeout_seconds_after_init: Free[Count] = 600
    """Timeout of collectives in seconds after the first step. The job ends if a collective takes longer."""
    loss_spike_factor: Free[PositiveFloat | None] = 2.0
    """Report a loss above this factor times the median of the last 100 steps, with its samples; null disables this."""
    skip_loss_spikes: Free[NonNegative] = 0
    """Maximum number of loss-spike batches to exclude from training over the entire run; 0 trains on all batches."""

    @property
    def precision_of_layers(self) -> Literal["bf16", "fp16", "fp32", "fp8"]:
        """Precision of matrix products in the layers, as node types name their peaks."""
        return "fp8" if self.fp8 else self.precision
