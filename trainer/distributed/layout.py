"""The few rules of a configuration that would end in a wrong result or far from their cause.

hpcgen checks all rules, with hints, before a job is queued; these are for a configuration written by hand.
"""

from __future__ import annotations

from trainer.contract.batch_size import batch_sizes, rampup_problem
from trainer.contract.config import ConfigError, TrainerConfig


def check_layout(config: TrainerConfig) -> None:
    """Checks what one number of the resolved `config` must be a multiple of, at every batch size of the run.

    Raises:
        ConfigError: the first rule that is broken, with its numbers; also of layers recorded as CUDA graphs.
    """
    model, layout, training = config.model, config.parallelism, config.training
    tp, pp, cp = (
        layout.tensor_model_parallel_size,
        layout.pipeline_model_parallel_size,
        layout.context_parallel_size,
    )
    vpp = layout.virtual_pipeline_model_parallel_size
    _divides(config.world_size, "world_size", tp * pp * cp, f"TP x PP x CP = {tp} x {pp} x {cp}")
    dp = config.world_size // (tp * pp * cp)
    micro = training.micro_batch_size
    if problem := rampup_problem(training):
        raise ConfigError(f"training.rampup_batch_size = {list(training.rampup_batch_size)} {problem}")
    for size in batch_sizes(training):
        _divides(size, "global_batch_size", micro * dp, f"micro_batch_size x DP = {micro} x {dp}")
        if vpp is not None:
            num_microbatches = size // (micro * dp)
            _divides(num_microbatches, f"micro-batches of a global_batch_size of {size}", pp, "PP")
    _divides(model.num_layers, "num_layers", pp * (vpp or 1), f"PP x VPP = {pp} x {vpp or 1}")
    _divides(model.num_attention_heads, "num_attention_heads", tp, "TP")
    _divides(model.padded_vocab_size, "padded_vocab_size", tp, "TP")
    if cp > 1:
        _divides(model.seq_length, "seq_length", 2 * cp, "2 x CP")
    if vpp is not None and pp == 1:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size = {vpp} needs pipeline_model_parallel_size > 1"
        )
    if training.cuda_graph_impl != "none":
        _check_graphs(config)


def _check_graphs(config: TrainerConfig) -> None:
    training, model = config.training, config.model
    for is_wrong, why in (
        (
            training.transformer_impl == "torch",
            "transformer_impl = torch: Core records the layers of the other",
        ),
        (training.precision != "bf16", f"precision = {training.precision}: Core records bf16"),
        (
            model.attention_dropout > 0 or model.hidden_dropout > 0,
            "dropout: each step seeds its generators anew, and a graph would go on with its own",
        ),
        (training.recompute_granularity == "full", "recompute_granularity = full"),
        (
            training.rampup_batch_size is not None and config.parallelism.pipeline_model_parallel_size > 1,
            "rampup_batch_size in a pipeline: its graphs are of one number of micro-batches",
        ),
    ):
        if is_wrong:
            raise ConfigError(f"training.cuda_graph_impl = {training.cuda_graph_impl} does not go with {why}")


def _divides(number: int, name: str, divisor: int, what: str) -> None:
    if number % divisor:
        raise ConfigError(f"{name} = {number} is not a multiple of {what} ({divisor})")
