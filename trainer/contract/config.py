"""The trainer's configuration as plain dataclasses. hpcgen writes it and the trainer reads it.

Names are Megatron-Core's; where Core has none, they are Megatron-LM's flags. hpcgen fills these sections from a run
file and writes them to a JSON file, which the trainer reads with `read`. The string under a field is its documentation:
`hpcgen init` and the JSON Schema print it.
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
    """Interval of allowed numbers. `at_least` and `at_most` are closed bounds; `above` and `below` are open ones."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def reason(self, value: float) -> str | None:
        """Reason why `value` is not allowed, phrased to follow the value. None if it is allowed."""
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


@config_section
class ModelConfig:
    """Shape of the GPT. The names are arguments of Megatron-Core's TransformerConfig and GPTModel."""

    num_layers: Count
    """Number of transformer layers."""
    hidden_size: Count
    """Width of the residual stream."""
    num_attention_heads: Count
    """Attention heads per layer."""
    seq_length: Count
    """Tokens in one training sample."""
    ffn_hidden_size: Count | None = None
    """Width of the MLP; null means 4 x hidden_size."""
    num_query_groups: Count | None = None
    """Key/value heads of grouped-query attention; null means one per attention head."""
    kv_channels: Count | None = None
    """Width of one attention head; null means hidden_size / num_attention_heads."""
    max_position_embeddings: Count | None = None
    """Maximum number of positions; null means seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """Position embeddings: a learned table (GPT-3) or rotary embeddings (Llama)."""
    rotary_base: Count = 10000
    """Base of the rotary frequencies; used only with rope."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """Normalization of every layer and of the output."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in the normalization."""
    swiglu: bool = False
    """Uses a gated MLP with SiLU (Llama) instead of GELU (GPT-3)."""
    add_bias_linear: bool = True
    """Adds biases to the linear layers."""
    untie_embeddings_and_output_weights: bool = False
    """Uses a separate output matrix; false shares the embedding's."""
    attention_dropout: Fraction = 0.0
    """Dropout after the attention softmax."""
    hidden_dropout: Fraction = 0.0
    """Dropout on the residual branches and the embedding."""
    init_method_std: PositiveFloat | None = None
    """Standard deviation of the initial weights; null means sqrt(2 / (5 x hidden_size))."""
    vocab_size: Count | None = None
    """Size of the tokenizer's vocabulary; null means that hpcgen reads it from data.tokenizer."""
    padded_vocab_size: Count | None = None
    """Rows of the embedding; null means vocab_size rounded up to a multiple of 128, in every layout."""
    layer_spec: str | None = None
    """Function that returns the spec of your own layers: `package.module:function` or `file.py:function`."""
    model_provider: str | None = None
    """Your own model, called instead of Megatron-Core's GPTModel: `package.module:class` or `file.py:class`."""


@config_section
class ParallelismConfig:
    """Split of the model over ranks. The data-parallel size is what remains of the world size."""

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Model chunks on each pipeline stage (VPP, interleaved schedule); null means one."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence (CP)."""
    sequence_parallel: bool = False
    """Shards the activations between tensor-parallel regions along the sequence; requires TP > 1."""
    overlap_grad_reduce: bool = False
    """Reduces gradients over data-parallel ranks while the backward pass runs."""
    overlap_param_gather: bool = False
    """Gathers updated parameters while the next forward pass runs; requires overlap_grad_reduce."""
    tp_comm_overlap: bool = False
    """Overlaps tensor-parallel communication with computation; requires sequence_parallel and Transformer Engine."""
    use_sharp: bool = False
    """Reduces the gradients of data-parallel ranks in the InfiniBand switches (SHARP); requires GPUs."""


@config_section
class TrainingConfig:
    """Batch, length, precision, recomputation and evaluation."""

    micro_batch_size: Count
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: Count
    """Samples in one optimizer step over all ranks."""
    train_iters: Count
    """Optimizer steps of the complete run."""
    seed: NonNegative = 1234
    """Seed of the initial weights, the data order and dropout."""
    rampup_batch_size: tuple[Count, ...] | None = None
    """Batch-size ramp-up [start, increment, samples]: from start to global_batch_size over this many samples."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep fp32 master weights and gradients; fp16 scales the loss; fp32 is for tests and CPUs."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """FP8 matrix products in the layers (hybrid: e5m2 for gradients); requires Transformer Engine. null: no FP8."""
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    """FP8 scaling: from the current tensor (tensorwise) or from the maxima of earlier steps (delayed)."""
    fp8_amax_history_len: Count = 1024
    """Number of steps in the history of maxima for delayed scaling."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Value that delayed scaling takes from the history: the largest or the most recent maximum."""
    transformer_impl: Literal["transformer_engine", "torch"] | None = None
    """Kernels of the layers; null means Transformer Engine if it is installed, else torch."""
    cross_entropy_fusion_impl: Literal["te", "native"] | None = None
    """Fused cross entropy of Transformer Engine (te) or Megatron-Core (native); null means te, or native for fp16."""
    cuda_graph_impl: Literal["none", "transformer_engine"] = "none"
    """CUDA-graph backend of the layers. Helps when kernel launches are the bottleneck. Requires bf16 and no dropout."""
    deterministic_mode: bool = False
    """Uses only kernels with bitwise reproducible results; slower."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations to recompute in the backward pass: core attention (selective), all layers (full), or none (null)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For full: all layers in groups of recompute_num_layers (uniform), or only the first ones of a stage (block)."""
    recompute_num_layers: Count | None = None
    """Layers per group (uniform) or per stage (block)."""
    eval_interval: Count | None = None
    """Optimizer steps between evaluations; null means only at the end."""
    eval_iters: NonNegative = 10
    """Global batches per evaluation; 0 turns evaluation off."""
    distributed_timeout_minutes: Count = 60
    """Timeout of collectives until the first step is done, while indices and weights load (minutes)."""
    distributed_timeout_seconds_after_init: Count = 600
    """Timeout of collectives after the first step (seconds)."""
    loss_spike_factor: PositiveFloat | None = 2.0
    """Reports a loss above this multiple of the median of the last 100 steps, with its samples; null means never."""
    skip_loss_spikes: NonNegative = 0
    """Maximum number of such batches in the complete run that are excluded from training; 0 trains on all of them."""


@config_section
class ParameterGroup:
    """Hyperparameters for parameters selected by name."""

    match: str
    """Shell pattern for names in the complete model, such as `embedding.*` or `decoder.layers.0.*`."""
    wd_mult: NonNegativeFloat = 1.0
    """Multiplier of weight_decay; biases and normalization weights have no decay in any group."""
    lr_mult: NonNegativeFloat = 1.0
    """Multiplier of the learning rate."""


@config_section
class OptimizerConfig:
    """AdamW and the learning-rate schedule. The distributed optimizer is always on."""

    lr: PositiveFloat
    """Peak learning rate."""
    min_lr: NonNegativeFloat | None = None
    """Learning rate at the end of the decay; null means a tenth of lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up; WSD is constant, then decays in the last lr_wsd_decay_iters."""
    lr_decay_iters: Count | None = None
    """Step at which the decay ends; null means train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""
    lr_wsd_decay_iters: Count | None = None
    """Steps of WSD's decay; null means a tenth of lr_decay_iters."""
    lr_schedule: str | None = None
    """Your own decay function, instead of lr_decay_style: `package.module:function` or `file.py:function`."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """Learning rate at the start of the warm-up."""
    lr_warmup_iters: NonNegative | None = None
    """Steps of linear warm-up; null, without lr_warmup_fraction, means 375M tokens, at most a tenth of the run."""
    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of lr_decay_iters, instead of lr_warmup_iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay. Does not apply to biases and normalization weights."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Groups of parameters with their own weight decay or learning rate; the first match applies."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Maximum global gradient norm; 0 turns clipping off."""
    loss_scale: PositiveFloat | None = None
    """Fixed loss scale for fp16; null means an adaptive scale."""
    initial_loss_scale: PositiveFloat = 2.0**32
    """Initial adaptive loss scale for fp16."""
    min_loss_scale: PositiveFloat = 1.0
    """Smallest loss scale for fp16. An overflow at this scale, or at a fixed loss_scale, ends the run."""
    loss_scale_window: Count = 1000
    """Steps of fp16 without overflow before the scale doubles."""
    hysteresis: Count = 2
    """Count of fp16 overflows from which each one halves the scale. The count restarts when the scale doubles."""


@config_section
class Dataset:
    """One tokenized corpus in a blend."""

    prefix: str
    """Path of the .bin/.idx pair without the extension."""
    weight: PositiveFloat | None = None
    """Weight in the blend; null for all datasets means their numbers of tokens in the split."""


@config_section
class BlendConfig:
    """Source of the training, validation and test samples. Use exactly one of `datasets`, `train` and `mock`."""

    datasets: tuple[Dataset, ...] = ()
    """One blend for all splits, divided by `split`."""
    split: str = "99990,8,2"
    """Weights of train, valid and test. The documents of each dataset in `datasets` are divided in this order."""
    train: tuple[Dataset, ...] = ()
    """Training blend, for one blend per split. `valid` and `test` may be empty; no pair may be in two splits."""
    valid: tuple[Dataset, ...] = ()
    """Validation blend, used with `train`."""
    test: tuple[Dataset, ...] = ()
    """Test blend, used with `train`; evaluated once, after the last step."""
    mock: bool = False
    """Uses generated samples, to test a cluster without data."""
    num_workers: NonNegative = 2
    """Data loader processes per rank; 0 loads in the training process."""
    cache_dir: str | None = None
    """Directory of the sample indices; null means `index-cache` in the run directory."""


@config_section
class CheckpointConfig:
    """Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at any TP/PP/DP."""

    save: str | None = None
    """Directory of the checkpoints; null means `checkpoints` in the run directory."""
    load: str | None = None
    """Checkpoints (the trainer's or Megatron-LM's) to start from if `save` has none; null means random weights."""
    finetune: bool = False
    """Loads only the weights from `load`: starts at iteration 0 with a new optimizer state and the first sample."""
    save_interval: Count | None = None
    """Optimizer steps between checkpoints; the last step and a stop always save."""
    save_interval_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, instead of or in addition to save_interval; 30 if both are null."""
    async_save: bool = True
    """Writes one checkpoint at a time while training continues; false waits for the storage."""
    keep_last: Count | None = None
    """Number of newest checkpoints to keep. Older ones are removed once a new one is complete. null keeps all."""
    keep_every: Count | None = None
    """Never removes checkpoints whose iteration is a multiple of this."""
    changed: tuple[str, ...] = ()
    """Names of hyperparameters, such as optimizer.lr, that may differ from the checkpoint; so may files they name."""
    discard_up_to: NonNegative | None = None
    """Allows a run without checkpoints to start over if its last saved iteration is at most this; null refuses."""


@config_section
class LoggingConfig:
    """Logs, metrics and profiles of a run."""

    log_interval: Count = 1
    """Optimizer steps between lines in metrics.jsonl and in the log."""
    tensorboard: bool = True
    """Writes TensorBoard event files to `tensorboard` in the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project. Without WANDB_API_KEY in the environment, its files stay in the run directory."""
    wandb_entity: str | None = None
    """Weights & Biases team or user; null means your default."""
    wandb_exp_name: str | None = None
    """Name of the Weights & Biases run; null means `name`."""
    profile_step_start: NonNegative | None = None
    """First iteration to record with torch's profiler; null records none."""
    profile_step_end: Count | None = None
    """Iteration before which the profiler stops; null means profile_step_start + 2."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """Ranks to profile."""
    record_memory_history: bool = False
    """Writes a snapshot of GPU memory, with the stacks of its allocations, at the end of the profile."""


@config_section
class TrainerConfig:
    """Resolved configuration of one training job. The trainer needs nothing else from the run file."""

    name: str
    """Name of the run."""
    run_dir: str
    """Absolute path of the directory that holds everything this run writes."""
    device: Literal["cuda", "cpu"]
    """Device of every rank; the trainer never falls back from cuda to cpu."""
    world_size: Count
    """Number of ranks in the planned layout; the trainer refuses any other number."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in `precision` (TFLOP/s), for MFU; null omits MFU."""
    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)


class ConfigError(TrainerError):
    """The configuration is invalid; the message says where and why."""


T = TypeVar("T")


def read(path: Path) -> TrainerConfig:
    """Reads the trainer's configuration file.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit TrainerConfig.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    return from_dict(TrainerConfig, document, where=str(path))


def to_dict(config: Any) -> dict[str, Any]:
    """Configuration as plain data, ready for `json.dumps`. `from_dict` is the inverse."""
    result: dict[str, Any] = dataclasses.asdict(config)
    return result


def fingerprint(config: TrainerConfig) -> str:
    """SHA-256 over all values of `config`. Unchanged when a resolved configuration is written to JSON and read back."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


def from_dict(cls: type[T], document: Any, where: str) -> T:
    """Builds `cls` from plain data, and checks keys, types and ranges.

    Raises:
        ConfigError: the first invalid value, with its dotted path after `where`.
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
    """Type of each field of a dataclass, with its constraints. Cached, because evaluating the hints is slow."""
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
        key_hint, value_hint = typing.get_args(hint)
        return {
            _value(key_hint, key, where): _value(value_hint, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(hint):
            raise ConfigError(f"{where} = {value!r} must be one of {typing.get_args(hint)}")
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where)
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}")
    return float(value) if hint is float else value
