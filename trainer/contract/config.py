"""The configuration that hpcgen writes and the trainer reads, as plain dataclasses.

Both sides import this module, so it needs nothing but the standard library. Names are Megatron-Core's
(or, where Core has none, Megatron-LM's flags). The trainer reads a JSON file with these sections
(`read`); hpcgen fills the same sections from a run file. A string under a field is its documentation:
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
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

FORBID_UNKNOWN_KEYS: dict[str, Any] = {"extra": "forbid"}
"""Read by pydantic, where hpcgen validates these classes; plain data here."""


@dataclass(frozen=True)
class Range:
    """The closed interval a number must lie in; `above` and `below` are the open ends."""

    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None

    def reason(self, value: float) -> str | None:
        """Why `value` is outside, in words that follow the value; None inside."""
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


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the GPT. The names are Megatron-Core's TransformerConfig and GPTModel arguments."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    num_layers: Count
    """Transformer layers."""
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
    """Longest position the model knows; null means seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope"] = "learned_absolute"
    """How positions enter: a learned table (GPT-3) or rotary embeddings (Llama)."""
    rotary_base: Count = 10000
    """Base of the rotary frequencies; only read with rope."""
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    """The normalisation of every layer and of the output."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Added to the variance in the normalisation."""
    swiglu: bool = False
    """A gated MLP with SiLU (Llama) in place of GELU (GPT-3)."""
    add_bias_linear: bool = True
    """Biases in the linear layers."""
    untie_embeddings_and_output_weights: bool = False
    """A separate output matrix; false shares the embedding's."""
    attention_dropout: Fraction = 0.0
    """Dropout after the attention softmax."""
    hidden_dropout: Fraction = 0.0
    """Dropout on the residual branches and the embedding."""
    init_method_std: PositiveFloat | None = None
    """Standard deviation of the initial weights; null means sqrt(2 / (5 x hidden_size))."""
    vocab_size: Count | None = None
    """Tokens the tokenizer knows; null means that hpcgen asks data.tokenizer."""
    padded_vocab_size: Count | None = None
    """Rows of the embedding; null rounds vocab_size up to a multiple of 128, whatever the layout."""
    layer_spec: str | None = None
    """Your own transformer layers: `package.module:function` or `file.py:function` of what gives their spec."""
    model_provider: str | None = None
    """Your own model: `package.module:class` or `file.py:class`, called in place of Megatron-Core's GPTModel."""


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """How the model is cut over ranks; data parallelism is what remains of the world size."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    tensor_model_parallel_size: Count = 1
    """Ranks that share each layer (TP)."""
    pipeline_model_parallel_size: Count = 1
    """Pipeline stages (PP)."""
    virtual_pipeline_model_parallel_size: Count | None = None
    """Model chunks on each pipeline stage (VPP, interleaved schedule); null means one."""
    context_parallel_size: Count = 1
    """Ranks that share each sequence (CP)."""
    sequence_parallel: bool = False
    """Shards the activations between tensor-parallel regions along the sequence; needs TP > 1."""
    overlap_grad_reduce: bool = False
    """Reduces gradients over data-parallel ranks while the backward pass still runs."""
    overlap_param_gather: bool = False
    """Gathers updated parameters while the next forward pass runs; needs overlap_grad_reduce."""
    tp_comm_overlap: bool = False
    """Hides tensor-parallel communication behind matrix products; needs sequence_parallel and Transformer Engine."""
    use_sharp: bool = False
    """Lets the InfiniBand switches add up the gradients of data-parallel ranks (SHARP); needs GPUs."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Batch, length, precision, recomputation and evaluation."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    micro_batch_size: Count
    """Samples in one forward pass of one data-parallel rank."""
    global_batch_size: Count
    """Samples in one optimizer step over all ranks."""
    train_iters: Count
    """Optimizer steps of the whole run."""
    seed: NonNegative = 1234
    """Seed of the initial weights, the data order and dropout."""
    rampup_batch_size: tuple[Count, ...] | None = None
    """[start, increment, samples]: the global batch grows from start to global_batch_size over so many samples."""
    precision: Literal["bf16", "fp16", "fp32"] = "bf16"
    """bf16 and fp16 keep fp32 master weights and gradients; fp16 scales the loss; fp32 is for tests and CPUs."""
    fp8: Literal["e4m3", "hybrid"] | None = None
    """Matrix products of the layers in FP8 (hybrid: e5m2 for gradients); needs Transformer Engine. null: none."""
    fp8_recipe: Literal["tensorwise", "delayed"] = "tensorwise"
    """FP8 scales from the tensor at hand (tensorwise: current scaling), or from maxima of earlier steps (delayed)."""
    fp8_amax_history_len: Count = 1024
    """Steps whose maxima delayed scaling looks at."""
    fp8_amax_compute_algo: Literal["max", "most_recent"] = "max"
    """Which of those maxima delayed scaling takes."""
    transformer_impl: Literal["transformer_engine", "torch"] | None = None
    """The kernels of the layers; null takes Transformer Engine where it is installed, else torch's."""
    cross_entropy_fusion_impl: Literal["te", "native"] | None = None
    """The fused cross entropy: Transformer Engine's or Megatron-Core's; null takes te but for fp16."""
    cuda_graph_impl: Literal["none", "transformer_engine"] = "none"
    """Who records the layers as CUDA graphs, for GPUs that wait for their host; for bf16 without dropout."""
    deterministic_mode: bool = False
    """Only kernels that give the same bits each time; slower."""
    recompute_granularity: Literal["selective", "full"] | None = None
    """Activations computed again in the backward pass: core attention only, whole layers, or none (null)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """For full: groups of recompute_num_layers (uniform), or the first ones of a stage (block)."""
    recompute_num_layers: Count | None = None
    """Layers per group (uniform) or per stage (block)."""
    eval_interval: Count | None = None
    """Optimizer steps between evaluations; null means only at the end."""
    eval_iters: NonNegative = 10
    """Global batches per evaluation; 0 turns evaluation off."""
    distributed_timeout_minutes: Count = 60
    """A collective that takes longer ends the job, until the first step is done: indices and weights load (minutes)."""
    distributed_timeout_seconds_after_init: Count = 600
    """The same from the first step on (seconds)."""
    loss_spike_factor: PositiveFloat | None = 2.0
    """A loss above this many times the median of the last 100 steps is reported with its samples; null: never."""
    skip_loss_spikes: NonNegative = 0
    """How many such batches in the whole run are left out of training; 0 trains on them."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup:
    """Parameters by name, and what they are trained with."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    match: str
    """Shell pattern of names in the whole model, as `embedding.*` or `decoder.layers.0.*`."""
    wd_mult: NonNegativeFloat = 1.0
    """Times weight_decay; biases and normalisation weights have none in any group."""
    lr_mult: NonNegativeFloat = 1.0
    """Times the learning rate."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and the learning-rate schedule. The distributed optimizer is always on."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    lr: PositiveFloat
    """The peak learning rate."""
    min_lr: NonNegativeFloat | None = None
    """The rate that the decay ends at; null means a tenth of lr."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "cosine"
    """Shape of the decay after the warm-up; WSD is constant, then decays in the last lr_wsd_decay_iters."""
    lr_decay_iters: Count | None = None
    """Step at which the decay ends; null means train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of WSD's decay."""
    lr_wsd_decay_iters: Count | None = None
    """Steps of WSD's decay; null means a tenth of lr_decay_iters."""
    lr_schedule: str | None = None
    """Your own decay in place of lr_decay_style: `package.module:function` or `file.py:function`."""
    lr_warmup_init: NonNegativeFloat = 0.0
    """The rate that the warm-up starts from."""
    lr_warmup_iters: NonNegative | None = None
    """Steps of linear warm-up; null, without lr_warmup_fraction, means 375M tokens, at most a tenth of the run."""
    lr_warmup_fraction: Fraction | None = None
    """Warm-up as a fraction of lr_decay_iters, in place of lr_warmup_iters."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay; biases and normalisation weights have none."""
    parameter_groups: tuple[ParameterGroup, ...] = ()
    """Parameters with a weight decay or a rate of their own; the first group that matches counts."""
    adam_beta1: Fraction = 0.9
    """Decay of the first moment."""
    adam_beta2: Fraction = 0.95
    """Decay of the second moment."""
    adam_eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    loss_scale: PositiveFloat | None = None
    """A fixed loss scale for fp16; null adapts it."""
    initial_loss_scale: PositiveFloat = 2.0**32
    """The adaptive scale of fp16 to start from."""
    min_loss_scale: PositiveFloat = 1.0
    """Gradients of fp16 that overflow at this scale, or at a fixed loss_scale, end the run."""
    loss_scale_window: Count = 1000
    """Steps of fp16 without overflow after which the scale doubles."""
    hysteresis: Count = 2
    """Overflows of fp16 after which each one halves the scale, until it has doubled."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One tokenized corpus in a blend."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    prefix: str
    """Path of the .bin/.idx pair without the extension."""
    weight: PositiveFloat | None = None
    """Share of the blend; null in all of them weighs by the tokens that each has in the split."""


@dataclass(frozen=True, kw_only=True)
class BlendConfig:
    """Where training, validation and test samples come from: exactly one of three ways."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    datasets: tuple[Dataset, ...] = ()
    """First way: one blend, cut by `split`."""
    split: str = "99990,8,2"
    """Weights of train, valid and test, by which the documents of each dataset in `datasets` are cut in order."""
    train: tuple[Dataset, ...] = ()
    """Second way: a blend per split. Train is needed, valid and test may be empty; no pair may be in two."""
    valid: tuple[Dataset, ...] = ()
    """The validation blend of the second way."""
    test: tuple[Dataset, ...] = ()
    """The test blend of the second way; evaluated once, after the last step."""
    mock: bool = False
    """Third way: made-up samples, to try a cluster without data."""
    num_workers: NonNegative = 2
    """Loader processes per rank; 0 loads in the training process."""
    cache_dir: str | None = None
    """Directory of the sample indices; null means `index-cache` in the run directory."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at any TP/PP/DP."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    save: str | None = None
    """Directory of the checkpoints; null means `checkpoints` in the run directory."""
    load: str | None = None
    """Directory of checkpoints to start from while `save` holds none (ours or Megatron-LM's); null: random weights."""
    finetune: bool = False
    """Takes only the weights of `load`: iteration 0, a new optimizer state, the data from its start."""
    save_interval: Count | None = None
    """Optimizer steps between checkpoints; the last step and a stop always save."""
    save_interval_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, beside or in place of save_interval; null with save_interval null means 30."""
    async_save: bool = True
    """Writes while training goes on, one checkpoint at a time; false waits for the storage."""
    keep_last: Count | None = None
    """Newest checkpoints to keep; older ones are removed once a new one is complete. Null keeps all."""
    keep_every: Count | None = None
    """Checkpoints of iterations that are a multiple of this stay for good, as pinned ones do."""
    changed: tuple[str, ...] = ()
    """Hyperparameters that may differ from the checkpoint's, by name, as optimizer.lr; so may the files they name."""
    discard_up_to: NonNegative | None = None
    """Starts over when no checkpoint is left of a run that saved no later iteration than this. Null: refuses."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What the trainer writes while it runs."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    log_interval: Count = 1
    """Optimizer steps between lines of metrics.jsonl and of the log."""
    tensorboard: bool = True
    """TensorBoard event files in `tensorboard` in the run directory."""
    wandb_project: str | None = None
    """Project of Weights & Biases to log to; WANDB_API_KEY comes from the environment, without it files stay here."""
    wandb_entity: str | None = None
    """Team or user of that project; null means your default."""
    wandb_exp_name: str | None = None
    """Name of the run there; null means `name`."""
    profile_step_start: NonNegative | None = None
    """First iteration that torch's profiler records; null records none."""
    profile_step_end: Count | None = None
    """The iteration before which it stops; null means two after profile_step_start."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """Ranks that are profiled."""
    record_memory_history: bool = False
    """Writes a snapshot of the GPU's memory, with the stacks that allocated it, at the end of the profile."""


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The resolved configuration of one training job: nothing in it is left to be derived from a run file."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    name: str
    """Name of the run."""
    run_dir: str
    """Absolute path of the directory that holds everything this run writes."""
    device: Literal["cuda", "cpu"]
    """What the ranks compute on; the trainer refuses to fall back from cuda to cpu."""
    world_size: Count
    """Ranks the layout was planned for; the trainer refuses another number."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in `precision` (TFLOP/s), for MFU; null leaves MFU out."""
    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)


class ConfigError(Exception):
    """The configuration file is not what the trainer can run; the message says where and why."""


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
    """The plain data of a configuration, as `json.dumps` takes it and `from_dict` reads it back."""
    result: dict[str, Any] = dataclasses.asdict(config)
    return result


def fingerprint(config: TrainerConfig) -> str:
    """SHA-256 of every value of `config`: equal for a resolved configuration and what is read of its JSON."""
    return hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest()


def from_dict(cls: type[T], document: Any, where: str) -> T:
    """Builds `cls` from plain data, checking keys, types and ranges.

    Raises:
        ConfigError: the first thing that does not fit, with its dotted path after `where`.
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
    """The type of each field of a dataclass, with its constraints. Reading them costs more than a small document."""
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
    accepted = (int, float) if hint is float else (hint,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{where} = {value!r} must be of type {hint.__name__}")
    return float(value) if hint is float else value
