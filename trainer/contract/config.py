"""The configuration that hpcgen writes and the trainer reads, as plain dataclasses.

Both programs import this module, so it uses only the standard library. Names are those of Megatron-Core, or of
Megatron-LM's flags where Core has none. The trainer reads a JSON file with these sections (`read`); hpcgen fills the
same sections from a run file. A string under a field is its documentation: `hpcgen init` and the JSON Schema print it.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from trainer.contract.errors import TrainerError
from trainer.contract.section import config_section


@dataclass(frozen=True)
class Range:
    """Range of valid numbers. `at_least` and `at_most` are inclusive bounds; `above` and `below` are exclusive."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def reason(self, value: float) -> str | None:
        """Reason why `value` is out of range, phrased to follow the value. None if it is in range."""
        if self.at_least is not None and not value >= self.at_least:
            return f"must be at least {self.at_least:g}"
        if self.at_most is not None and not value <= self.at_most:
            return f"must be at most {self.at_most:g}"
        if self.above is not None and not value > self.above:
            return f"must be greater than {self.above:g}"
        if self.below is not None and not value < self.below:
            return f"must be less than {self.below:g}"
        return None


Count = Annotated[int, Range(at_least=1, at_most=2**53)]
NonNegative = Annotated[int, Range(at_least=0, at_most=2**53)]
PositiveFloat = Annotated[float, Range(above=0, at_most=1e300)]
NonNegativeFloat = Annotated[float, Range(at_least=0, at_most=1e300)]
Fraction = Annotated[float, Range(at_least=0, below=1)]

RecomputeModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "mla_up_proj"]
DISCARDS_OUTPUT = frozenset(("layernorm", "moe_act", "mla_up_proj"))
"""Modules whose recomputation discards their output. Core needs Transformer Engine for it."""


@config_section
class RopeScaling:
    """Scaling of the rotary frequencies for sequences longer than those of pretraining. Names and meanings are those of
    Hugging Face's rope_scaling."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """linear divides all frequencies by factor; llama3 (Llama 3.1) and yarn divide only the low ones."""
    factor: Annotated[float, Range(at_least=1, at_most=1e6)]
    """Ratio of the scaled to the original sequence length."""
    original_max_position_embeddings: Count | None = None
    """Maximum sequence length before scaling. Required by llama3 and yarn."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: divide frequencies with fewer than this number of periods in the original length (1 in Llama 3.1).
    Required."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: keep frequencies with more than this number of periods in the original length (4 in Llama 3.1). Those in
    between are interpolated. Required."""
    beta_fast: PositiveFloat | None = None
    """yarn: keep frequencies with more than this number of periods in the original length. Default: 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: divide frequencies with fewer than this number of periods in the original length. Default: 1."""
    truncate: bool | None = None
    """yarn: round the bounds that follow from beta_fast and beta_slow to channels. Default: true."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor of the rotated queries and keys. Default: follows from factor, mscale and mscale_all_dim."""
    mscale: NonNegativeFloat | None = None
    """yarn: weight of log(factor) in the numerator of the default attention_factor. Used only with
    mscale_all_dim."""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: weight of log(factor) in the denominator of the default attention_factor. Used only with mscale."""


@config_section
class ModelConfig:
    """Shape of the GPT model. The names are those of Megatron-Core's TransformerConfig and GPTModel arguments."""

    num_layers: Count
    """Number of transformer layers."""
    hidden_size: Count
    """Width of the residual stream."""
    num_attention_heads: Count
    """Number of attention heads per layer."""
    seq_length: Count
    """Number of tokens in a training sample."""
    ffn_hidden_size: Count | None = None
    """Width of the MLP. Default: 4 x hidden_size."""
    num_query_groups: Count | None = None
    """Number of key/value heads for grouped-query attention. Default: num_attention_heads."""
    kv_channels: Count | None = None
    """Width of an attention head. Default: hidden_size / num_attention_heads, or with multi_latent_attention the width
    of its queries and keys, qk_head_dim + qk_pos_emb_head_dim."""
    multi_latent_attention: bool = False
    """Multi-head latent attention (MLA, as in DeepSeek-V3): keys and values are computed from one latent per token.
    Requires rope."""
    q_lora_rank: Count | None = None
    """MLA: width of the latent of the queries. Default: none, so queries are computed from the hidden states."""
    kv_lora_rank: Count | None = None
    """MLA: width of the latent of keys and values. Default: 512."""
    qk_head_dim: Count | None = None
    """MLA: width of the part of queries and keys that is not rotated, in each head. Default: 128."""
    qk_pos_emb_head_dim: Count | None = None
    """MLA: width of the rotated part of queries and keys, in each head. All heads share that of the keys.
    Default: 64."""
    v_head_dim: Count | None = None
    """MLA: width of the values in each head. Default: 128."""
    max_position_embeddings: Count | None = None
    """Maximum sequence length of the model. Default: seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position embeddings: learned_absolute (GPT-3) or rope (rotary embeddings, as in Llama)."""
    rotary_base: Count = 10000
    """Base of the rotary frequencies. Used only with rope."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long sequences. Requires rope. Default: none."""
    window_size: Count | None = None
    """Sliding-window attention: each token attends to itself and to the window_size - 1 tokens before it.
    Default: all tokens before it."""
    qk_layernorm: bool = False
    """Normalize queries and keys in each head (with `normalization`), before the rotary embedding, as in Qwen3. With
    multi_latent_attention, normalize the latents in their place, as in DeepSeek-V3."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization of every layer and of the final output."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon added to the variance in the normalization."""
    swiglu: bool = False
    """Use a gated MLP with SiLU (as in Llama) in place of activation_func."""
    activation_func: Literal["gelu", "gelu_tanh", "squared_relu"] | None = None
    """Activation function of the MLP without swiglu: gelu (exact), gelu_tanh (its tanh approximation, as in GPT-2) or
    squared_relu. Default: gelu_tanh."""
    add_bias_linear: bool = True
    """Use biases in the linear layers."""
    add_qkv_bias: bool | None = None
    """Use a bias in the projection to queries, keys and values, as in Qwen2. Default: add_bias_linear."""
    untie_embeddings_and_output_weights: bool = False
    """Use a separate output matrix; false shares the embedding matrix."""
    attention_dropout: Fraction = 0.0
    """Dropout probability after the attention softmax."""
    hidden_dropout: Fraction = 0.0
    """Dropout probability on the residual branches and the embedding."""
    init_method_std: PositiveFloat | None = None
    """Standard deviation of the initial weights. Default: sqrt(2 / (5 x hidden_size))."""
    num_moe_experts: Count | None = None
    """Mixture of experts: number of experts per MoE layer, over all ranks. Default: dense layers only."""
    moe_layer_freq: tuple[Annotated[int, Range(at_least=0, at_most=1)], ...] | None = None
    """One number per layer: 1 for an MoE layer, 0 for a dense layer. Default: every layer is an MoE layer."""
    moe_ffn_hidden_size: Count | None = None
    """Width of an expert. Default: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Count | None = None
    """Total width of the shared experts, which process every token. Default: no shared expert."""
    moe_router_topk: Count = 2
    """Number of experts that process each token."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """Function that turns the router's logits into scores."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax to all experts before choosing moe_router_topk of them, instead of to the chosen ones."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor by which the weights of the chosen experts are multiplied. Default: 1."""
    moe_router_num_groups: Count | None = None
    """Number of groups of experts for group-limited routing, as in DeepSeek-V3. Requires moe_router_group_topk."""
    moe_router_group_topk: Count | None = None
    """Number of groups from which the experts of a token are chosen. Requires moe_router_num_groups."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Loss that balances the load of the experts: over the tokens of a microbatch (aux_loss), of each sequence
    (seq_aux_loss), or none."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss. Megatron-LM recommends 1e-2."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Coefficient of the z-loss on the router's logits (ST-MoE recommends 1e-3). Default: no z-loss."""
    moe_router_enable_expert_bias: bool = False
    """Balance the load without a loss: add to the scores a bias per expert that follows its load, as in DeepSeek-V3.
    Requires moe_router_score_function = sigmoid."""
    moe_router_bias_update_rate: PositiveFloat = 1e-3
    """Change of an expert's bias per step."""
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Maximum number of tokens of an expert, as a multiple of its even share. Further tokens skip it. Default: no
    limit (dropless)."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the input of each expert to its capacity, so that shapes are static. Requires
    moe_expert_capacity_factor."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens to drop above the capacity: those with the lowest scores, or the last ones."""
    mtp_num_layers: Count | None = None
    """Multi-token prediction (MTP, as in DeepSeek-V3): number of additional layers, each of which predicts one token
    further ahead. They train with the model; evaluation and inference do not use them. Default: none."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean MTP loss in the gradients. The logged loss is the main loss. Used only with mtp_num_layers."""
    vocab_size: Count | None = None
    """Size of the tokenizer's vocabulary. Default: taken from data.tokenizer."""
    padded_vocab_size: Count | None = None
    """Number of rows of the embedding. Default: vocab_size rounded up to a multiple of 128, for any layout."""
    layer_spec: str | None = None
    """Custom transformer layers: a function that returns their spec, as `package.module:function` or
    `file.py:function`."""
    model_provider: str | None = None
    """Custom model to use in place of Megatron-Core's GPTModel, as `package.module:class` or `file.py:class`."""


@config_section
class ParallelismConfig:
    """Model parallelism. The data-parallel size is the world size divided by TP x PP x CP."""

    tensor_model_parallel_size: Count = 1
    """Tensor-parallel size (TP): number of ranks that share each layer."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline-parallel size (PP): number of pipeline stages."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Virtual pipeline size (VPP): number of model chunks per pipeline stage, for the interleaved schedule.
    Default: 1."""
    num_layers_in_first_pipeline_stage: Count | None = None
    """Number of layers on the first pipeline stage. The other stages share the remaining layers evenly. Default: all
    stages have the same number of layers."""
    num_layers_in_last_pipeline_stage: Count | None = None
    """Number of layers on the last pipeline stage, which also computes the loss."""
    account_for_embedding_in_pipeline_split: bool = False
    """Count the embedding as a layer when the layers are divided over the pipeline stages."""
    account_for_loss_in_pipeline_split: bool = False
    """Count the loss as a layer when the layers are divided over the pipeline stages."""
    pipeline_model_parallel_layout: str | None = None
    """Layers of each pipeline stage, as text such as Et*7|t*8|t*8|t*7L: E embedding, t layer, m MTP layer, L loss,
    | next stage, t*3 and (tt|)*2 repetitions. With an interleaved schedule, the first virtual stages of all stages come
    first."""
    context_parallel_size: Count = 1
    """Context-parallel size (CP): number of ranks that share each sequence."""
    expert_model_parallel_size: Count = 1
    """Expert-parallel size (EP): number of ranks that share the experts of each MoE layer. They are ranks of the
    data-parallel dimension, so EP x ETP must divide world size / PP."""
    expert_tensor_parallel_size: Count | None = None
    """Expert-tensor-parallel size (ETP): number of ranks that share each expert. Default: TP."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather"] = "alltoall"
    """Communication that brings tokens to their experts."""
    moe_grouped_gemm: bool | None = None
    """Compute all experts of a rank in one grouped matrix product. Default: true with Transformer Engine."""
    cp_comm_type: Literal["p2p", "all_gather", "a2a", "a2a+p2p"] | None = None
    """Exchange of keys and values between context-parallel ranks: around a ring (p2p), gathered (all_gather), by
    attention heads (a2a), or by heads in groups of ranks and around a ring of groups (a2a+p2p). Default: p2p, or
    all_gather with torch's kernels, window_size or reset_attention_mask."""
    hierarchical_context_parallel_sizes: tuple[Count, ...] | None = None
    """With a2a+p2p: number of ranks in a group and number of groups. Their product is the context-parallel size."""
    sequence_parallel: bool = False
    """Shard the activations between tensor-parallel regions along the sequence. Requires TP > 1."""
    num_distributed_optimizer_instances: Count = 1
    """Number of groups of data-parallel ranks that each hold the complete optimizer state. More instances need more
    memory, and reduce the communication between groups. It must divide DP x CP."""
    overlap_grad_reduce: bool = False
    """Overlap the data-parallel gradient reduction with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated parameters with the next forward pass. Requires overlap_grad_reduce."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with matrix products. Requires sequence_parallel and Transformer Engine."""
    use_sharp: bool = False
    """Reduce data-parallel gradients in the InfiniBand switches (SHARP). Requires GPUs."""


@config_section
class TrainingConfig:
    """Batch size, length, precision, recomputation and evaluation."""

    micro_batch_size: Count
    """Number of samples in one forward pass of a data-parallel rank."""
    global_batch_size: Count
    """Number of samples in one optimizer step over all ranks."""
    train_iters: Count
    """Total number of optimizer steps."""
    seed: NonNegative = 1234
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
    transformer_impl: Literal["transformer_engine", "torch"] | None = None
    """Kernels of the transformer layers. Default: transformer_engine if it is installed, otherwise torch."""
    cross_entropy_fusion_impl: Literal["te", "native"] | None = None
    """Fused cross entropy: Transformer Engine's (te) or Megatron-Core's (native). Default: te, or native for fp16."""
    cuda_graph_impl: Literal["none", "transformer_engine"] = "none"
    """CUDA-graph backend for the transformer layers. Helps when kernel launches are the bottleneck. Requires bf16 and
    no dropout."""
    deterministic_mode: bool = False
    """Use only kernels with bitwise reproducible results. Slower."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations to recompute in the backward pass: selective (recompute_modules), full (entire layers), or null for
    none."""
    recompute_modules: tuple[RecomputeModule, ...] | None = None
    """With selective recomputation: parts of each layer to recompute. core_attn, mlp and moe keep only their input;
    layernorm, moe_act (the activation function of experts) and mla_up_proj discard their output. Default:
    [core_attn]."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full recomputation: recompute all layers in groups of recompute_num_layers (uniform), or only the first
    recompute_num_layers of each stage (block)."""
    recompute_num_layers: Count | None = None
    """Number of layers per group (uniform) or per stage (block)."""
    eval_interval: Count | None = None
    """Optimizer steps between evaluations. Default: evaluate only at the end."""
    eval_iters: NonNegative = 10
    """Number of global batches per evaluation; 0 disables evaluation."""
    distributed_timeout_minutes: Count = 60
    """Timeout of collectives in minutes until the first step is complete, while indices and weights are loaded. The job
    ends if a collective takes longer."""
    distributed_timeout_seconds_after_init: Count = 600
    """Timeout of collectives in seconds after the first step. The job ends if a collective takes longer."""
    loss_spike_factor: PositiveFloat | None = 2.0
    """Report a loss above this factor times the median of the last 100 steps, with its samples; null disables this."""
    skip_loss_spikes: NonNegative = 0
    """Maximum number of loss-spike batches to exclude from training over the entire run; 0 trains on all batches."""


@config_section
class ParameterGroup:
    """Multipliers for parameters selected by name."""

    match: str
    """Shell pattern for parameter names in the unsharded model, such as `embedding.*` or `decoder.layers.0.*`."""
    wd_mult: NonNegativeFloat = 1.0
    """Factor for weight_decay. Biases and normalization weights never have weight decay."""
    lr_mult: NonNegativeFloat = 1.0
    """Factor for the learning rate."""


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
    lr_schedule: str | None = None
    """Custom decay function in place of lr_decay_style, as `package.module:function` or `file.py:function`."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_warmup_iters: NonNegative | None = None
    """Number of linear warm-up steps. Default without lr_warmup_fraction: the steps for 375M tokens, but at most a
    tenth of the run."""
    lr_warmup_fraction: Fraction | None = None
    """Length of the warm-up as a fraction of lr_decay_iters, in place of lr_warmup_iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay. It does not apply to biases and normalization weights."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
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
    initial_loss_scale: PositiveFloat = 2.0**32
    """Initial value of the adaptive loss scale for fp16."""
    min_loss_scale: PositiveFloat = 1.0
    """Minimum loss scale for fp16. The run ends if gradients overflow at this scale or at a fixed loss_scale."""
    loss_scale_window: Count = 1000
    """Number of fp16 steps without overflow after which the loss scale doubles."""
    hysteresis: Count = 2
    """Number of overflows, since the fp16 loss scale last doubled, after which it is halved. Each further overflow
    halves it again."""


@config_section
class Dataset:
    """One tokenized corpus in a blend."""

    prefix: str
    """Path of the .bin/.idx pair without the suffix."""
    weight: PositiveFloat | None = None
    """Weight in the blend. If no dataset has a weight, each is weighted by its number of tokens in the split."""


@config_section
class BlendConfig:
    """Source of training, validation and test samples: exactly one of `datasets`, `train` (with `valid`, `test`) and
    `mock`."""

    datasets: tuple[Dataset, ...] = ()
    """Option 1: one blend, divided by `split`."""
    split: str = "99990,8,2"
    """Proportions of train, valid and test for `datasets`. The documents of each dataset are divided in order."""
    train: tuple[Dataset, ...] = ()
    """Option 2: a blend for each split. `train` is required, `valid` and `test` are optional. A pair may be in only
    one split."""
    valid: tuple[Dataset, ...] = ()
    """Validation blend of option 2."""
    test: tuple[Dataset, ...] = ()
    """Test blend of option 2, evaluated once after the last step."""
    mock: bool = False
    """Option 3: synthetic samples, for testing a cluster without data."""
    reset_attention_mask: bool = False
    """Attend only to tokens of the same document. A document ends after the end-of-document token. Default: attend to
    all earlier tokens of the sample."""
    reset_position_ids: bool = False
    """Count positions from the beginning of each document. This changes learned positions; rotary embeddings depend
    only on distances. Default: count from the beginning of the sample."""
    eod_mask_loss: bool = False
    """Leave the prediction after the end-of-document token, the next document's first token, out of the loss."""
    eod_id: NonNegative | None = None
    """ID of the end-of-document token, for the three keys above. Default: that of data.tokenizer."""
    num_workers: NonNegative = 2
    """Number of data loader processes per rank; 0 loads in the training process."""
    cache_dir: str | None = None
    """Directory of the sample indices. Default: `index-cache` in the run directory."""

    @property
    def needs_eod(self) -> bool:
        """True if the trainer must know the end-of-document token."""
        return self.reset_attention_mask or self.reset_position_ids or self.eod_mask_loss


@config_section
class CheckpointConfig:
    """Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at any TP/PP/DP."""

    save: str | None = None
    """Directory for checkpoints. Default: `checkpoints` in the run directory."""
    load: str | None = None
    """Directory of checkpoints (hpcgen's or Megatron-LM's) to start from if `save` contains none, or one `iter_...`
    directory in it. Default: start from random weights."""
    finetune: bool = False
    """Load only the weights from `load`. The iteration, optimizer state and data order start from the beginning."""
    save_interval: Count | None = None
    """Optimizer steps between checkpoints. A checkpoint is always saved at the last step and when the job is asked to
    stop."""
    save_interval_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, in addition to or in place of save_interval. Default without save_interval: 30."""
    async_save: bool = True
    """Write checkpoints in the background, one at a time, while training continues; false waits for the storage."""
    keep_last: Count | None = None
    """Number of newest checkpoints to keep. Older ones are removed when a new one is complete. Default: keep all."""
    keep_every: Count | None = None
    """Always keep checkpoints whose iteration is a multiple of this number."""
    changed: tuple[str, ...] = ()
    """Names of hyperparameters, such as optimizer.lr, that may differ from the checkpoint's. The files that they name
    may differ as well."""
    discard_up_to: NonNegative | None = None
    """Start over if all checkpoints are gone and the last one was at this iteration or earlier. Default: refuse to
    start over."""


@config_section
class LoggingConfig:
    """Metrics, TensorBoard, Weights & Biases and profiling."""

    log_interval: Count = 1
    """Optimizer steps between entries in metrics.jsonl and in the log."""
    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard` in the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project to log to. WANDB_API_KEY comes from the environment; without it, W&B runs offline."""
    wandb_entity: str | None = None
    """Weights & Biases team or user. Default: your default entity."""
    wandb_exp_name: str | None = None
    """Name of the run in Weights & Biases. Default: `name`."""
    profile_step_start: NonNegative | None = None
    """First iteration to record with torch's profiler; null disables profiling."""
    profile_step_end: Count | None = None
    """Iteration before which profiling stops. Default: profile_step_start + 2."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """Ranks to profile."""
    record_memory_history: bool = False
    """Write a GPU memory snapshot with allocation stacks at the end of profiling."""


@config_section
class TrainerConfig:
    """Complete configuration of one training job. The trainer reads nothing from the run file."""

    name: str
    """Name of the run."""
    run_dir: str
    """Absolute path of the directory that holds everything this run writes."""
    device: Literal["cuda", "cpu"]
    """Device that the ranks compute on. The trainer never falls back from cuda to cpu."""
    world_size: Count
    """Number of ranks that the layout was planned for. The trainer refuses any other number."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in `precision` (TFLOP/s), for MFU; null leaves MFU out."""
    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    evaluation_every: Count | None = None
    """Keep checkpoints whose iteration is a multiple of this number until they are evaluated. Default: none."""


class ConfigError(TrainerError):
    """The configuration is invalid. The message says where and why."""


T = TypeVar("T")


def read(path: Path) -> TrainerConfig:
    """Reads the trainer's JSON file.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit TrainerConfig.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return from_dict(TrainerConfig, document, where=str(path))


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain data, which `json.dumps` accepts and `from_dict` reads back."""
    result: dict[str, Any] = dataclasses.asdict(config)
    return result


def fingerprint(config: TrainerConfig) -> str:
    """SHA-256 of all values of `config` that affect training and differ from their defaults.

    A resolved configuration keeps it when written as JSON and read back, and when a later version has more keys.
    """
    values = _non_defaults(config)
    values.pop("evaluation_every", None)
    text = json.dumps(values, sort_keys=True, default=dataclasses.asdict)
    return hashlib.sha256(text.encode()).hexdigest()


def _non_defaults(section: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = _non_defaults(value)
        elif value != field.default:
            values[field.name] = value
    return values


def from_dict(cls: type[T], document: Any, where: str) -> T:
    """Builds `cls` from plain data, checking keys, types and ranges.

    Raises:
        ConfigError: the first invalid key or value, with its dotted path after `where`.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"{where}: expected a mapping, got {document!r}")
    hints = field_hints(typing.cast(type, cls))
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in document.keys() - fields.keys():
        raise ConfigError(f"{where}: unknown key {key!r}; known are {', '.join(sorted(fields))}")
    values = {}
    for name, field in fields.items():
        if name in document:
            values[name] = _value(hints[name], document[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{where}: {name} is missing")
    return cls(**values)


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Type of each field of a dataclass, with its constraints. Cached, since evaluating the annotations is slow."""
    return typing.get_type_hints(cls, include_extras=True)


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, *metadata = typing.get_args(hint)
        value = _value(inner, value, where)
        for limits in metadata:
            if isinstance(limits, Range) and (reason := limits.reason(value)):
                raise ConfigError(f"{where} = {value!r} {reason}")
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        [inner] = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} = {value!r} must be a list")
        inner = typing.get_args(hint)[0]
        return tuple(_value(inner, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise ConfigError(f"{where} = {value!r} must be a mapping")
        of_key, of_value = typing.get_args(hint)
        return {
            _value(of_key, key, where): _value(of_value, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(hint):
            raise ConfigError(f"{where} = {value!r} must be one of {typing.get_args(hint)}")
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    if hint is Any:
        return value
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}")
    return float(value) if hint is float else value
