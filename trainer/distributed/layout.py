"""Checks the few rules whose violation would lead to a wrong result, or to an error far from its cause.

hpcgen checks all rules, with hints, before a job is queued. These are for configurations that are written by hand.
"""

from __future__ import annotations

from trainer.contract.config import ConfigError, ModelConfig, TrainerConfig
from trainer.contract.model.batch_size import batch_sizes, rampup_problem
from trainer.contract.model.experts import expert_tensor_parallel_size
from trainer.contract.model.pipeline import chunk_layers, mtp_chunk, split_problems, uneven_keys


def check_layout(config: TrainerConfig, *, trains: bool = True) -> None:
    """Check the divisibility rules of the resolved `config`, for every batch size of the run, and those of CUDA graphs.

    With `trains` false, the model is only used for inference.

    Raises:
        ConfigError: the first rule that is violated, with its numbers.
    """
    _check_ranks_and_batches(config)
    _check_pipeline(config)
    _check_own_layers(config.model, config)
    _check_tensors(config)
    _check_experts(config, trains)
    if trains:
        _check_gradients(config)
    _check_recomputation(config)
    if config.training.cuda_graph_impl != "none":
        _check_graphs(config)


def _check_ranks_and_batches(config: TrainerConfig) -> None:
    """Check that all data-parallel ranks get complete microbatches, and a multiple of PP if stages are interleaved."""
    layout, training = config.parallelism, config.training
    tp, pp, cp = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
    )
    _require_multiple(config.world_size, "world_size", tp * pp * cp, f"TP x PP x CP = {tp} x {pp} x {cp}")
    dp = config.world_size // (tp * pp * cp)
    micro = training.micro_batch_size
    if problem := rampup_problem(training):
        raise ConfigError(f"training.rampup_batch_size = {list(training.rampup_batch_size)} {problem}")
    for size in batch_sizes(training):
        _require_multiple(size, "global_batch_size", micro * dp, f"micro_batch_size x DP = {micro} x {dp}")
        if layout.virtual_pipeline_model_parallel_size is not None:
            num_microbatches = size // (micro * dp)
            _require_multiple(num_microbatches, f"microbatches of a global_batch_size of {size}", pp, "PP")


def _check_pipeline(config: TrainerConfig) -> None:
    """Check that the pipeline stages, or their virtual stages, hold all layers."""
    model, layout = config.model, config.parallelism
    pp, vpp = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    for key, reason, hint in split_problems(model.num_layers, layout, model.mtp_num_layers):
        raise ConfigError(f"parallelism.{key} = {getattr(layout, key)} {reason}{hint and f'; {hint}'}")
    if not uneven_keys(layout):
        _require_multiple(model.num_layers, "num_layers", pp * (vpp or 1), f"PP x VPP = {pp} x {vpp or 1}")
    if vpp is not None and pp == 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size = {vpp} needs pipeline_model_parallel_size > 1"
        )


def _check_own_layers(model: ModelConfig, config: TrainerConfig) -> None:
    """Check that the MTP layers, which have the parts of the layer before them, are not without the user's."""
    chunks = chunk_layers(model.num_layers, config.parallelism, model.mtp_num_layers)
    if model.layer_spec is None or model.mtp_num_layers is None or chunks is None:
        return
    if not chunks[mtp_chunk(config.parallelism)]:
        raise ConfigError(
            f"model.layer_spec = {model.layer_spec} would not change the MTP layers, which have the parts of the last "
            "layer on their pipeline stage, but there is none. Move a layer to that stage"
        )


def _check_tensors(config: TrainerConfig) -> None:
    """Check that TP divides heads and embedding, and CP the sequence."""
    model, layout = config.model, config.parallelism
    tp, cp = layout.tensor_model_parallel_size, layout.context_parallel_size
    _require_multiple(model.num_attention_heads, "num_attention_heads", tp, "TP")
    _require_multiple(model.padded_vocab_size, "padded_vocab_size", tp, "TP")
    if cp > 1:
        _require_multiple(model.seq_length, "seq_length", 2 * cp, "2 x CP")


def _check_experts(config: TrainerConfig, trains: bool) -> None:
    """Check the layout of experts: EP x ETP of the ranks of a pipeline stage, which are also TP x CP x DP."""
    model, layout = config.model, config.parallelism
    tp, pp, ep = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.expert_model_parallel_size,
    )
    etp = expert_tensor_parallel_size(layout)
    if model.num_moe_experts is None:
        for key in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (getattr(layout, key) or 1) > 1:
                raise ConfigError(f"parallelism.{key} = {getattr(layout, key)} needs model.num_moe_experts")
        return
    assert model.moe_ffn_hidden_size
    _require_multiple(config.world_size, "world_size", etp * ep * pp, f"ETP x EP x PP = {etp} x {ep} x {pp}")
    _require_multiple(model.num_moe_experts, "num_moe_experts", ep, "EP")
    _require_multiple(model.moe_ffn_hidden_size, "moe_ffn_hidden_size", etp, "ETP")
    expert_dp = config.world_size // (etp * ep * pp)
    instances = layout.num_distributed_optimizer_instances
    ranks = "number of ranks with the same experts"
    _require_multiple(expert_dp, ranks, instances, "num_distributed_optimizer_instances")
    if trains and tp > 1 and not layout.sequence_parallel:
        # Otherwise all TP ranks would send the same tokens to the experts (moe_layer.py, MoELayer.forward).
        raise ConfigError(
            f"parallelism.sequence_parallel = false does not work with experts and TP = {tp}. Set it to true"
        )
    if etp > 1 and model.add_bias_linear:
        advice = "Set it to false" if trains else "Use TP = 1, and pipeline stages to divide the model"
        raise ConfigError(f"model.add_bias_linear = true does not work with ETP = {etp}. {advice}")


def _check_gradients(config: TrainerConfig) -> None:
    """Check that Megatron-Core adds up all gradients."""
    model, layout = config.model, config.parallelism
    tp = layout.tensor_model_parallel_size
    if model.multi_latent_attention and tp > 1 and not layout.sequence_parallel:
        raise ConfigError(
            f"multi_latent_attention with tensor_model_parallel_size = {tp} requires sequence_parallel = true. "
            "Otherwise, Megatron-Core does not add up the gradients of the key that all heads share"
        )


def _check_recomputation(config: TrainerConfig) -> None:
    if "mlp" in (config.training.recompute_modules or ()) and config.model.add_bias_linear:
        # Core's checkpoint of the MLP returns the bias, so its backward pass would never end.
        raise ConfigError(
            "training.recompute_modules contains mlp, but megatron-core cannot recompute an MLP with biases. Set "
            "model.add_bias_linear to false or remove mlp"
        )


def _check_graphs(config: TrainerConfig) -> None:
    training, model = config.training, config.model
    for is_wrong, why in (
        (
            training.transformer_impl == "torch",
            "transformer_impl = torch: Core only records Transformer Engine's layers",
        ),
        (training.precision != "bf16", f"precision = {training.precision}: Core only records bf16"),
        (
            model.attention_dropout > 0 or model.hidden_dropout > 0,
            "dropout: each step seeds its generators, but a graph would keep using its own state",
        ),
        (
            model.num_moe_experts is not None,
            "num_moe_experts: graphs have fixed numbers of tokens per expert",
        ),
        (training.recompute_granularity == "full", "recompute_granularity = full"),
        (model.multi_latent_attention, "multi_latent_attention, which is not tested"),
        (model.mtp_num_layers is not None, "mtp_num_layers, which is not tested"),
        (
            training.rampup_batch_size is not None and config.parallelism.pipeline_model_parallel_size > 1,
            "rampup_batch_size in a pipeline: graphs are for a fixed number of microbatches",
        ),
        (
            config.data.reset_attention_mask,
            "data.reset_attention_mask: graphs have fixed shapes, but the number of documents varies",
        ),
    ):
        if is_wrong:
            raise ConfigError(
                f"training.cuda_graph_impl = {training.cuda_graph_impl} does not work with {why}"
            )


def _require_multiple(number: int, name: str, divisor: int, what: str) -> None:
    if number % divisor:
        raise ConfigError(f"{name} = {number} is not a multiple of {what} ({divisor})")
