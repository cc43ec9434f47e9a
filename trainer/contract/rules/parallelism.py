"""Rules for model parallelism and the world size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from trainer.contract.attention import attention_of
from trainer.contract.model.layout import model_parallel_size
from trainer.contract.model.pipeline import ACCOUNTED_KEYS, LAYOUT, split_problems, uneven_keys
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, divisors, indivisible, multiples

TP = "parallelism.tensor_model_parallel_size"
PP = "parallelism.pipeline_model_parallel_size"
VPP = "parallelism.virtual_pipeline_model_parallel_size"
CP = "parallelism.context_parallel_size"


def tensor_parallel_divides_heads(facts: Facts) -> Iterator[Problem]:
    """num_attention_heads % TP == 0 (megatron/core/transformer/transformer_config.py, __post_init__)."""
    yield from _tensor_parallel_divides(facts, "num_attention_heads", facts.model.num_attention_heads)


def tensor_parallel_fits_query_groups(facts: Facts) -> Iterator[Problem]:
    """num_query_groups % TP == 0 or TP % num_query_groups == 0.

    Source: megatron/core/transformer/transformer_config.py, TransformerConfig.__post_init__.
    """
    size = facts.parallelism.tensor_model_parallel_size
    groups = facts.resolved_model.num_query_groups
    assert groups is not None
    if groups % size and size % groups:
        yield Problem(
            path=TP,
            reason=f"neither divides model.num_query_groups = {groups} nor is a multiple of it "
            f"({groups} / {size})",
            candidates=divisors(facts.model.num_attention_heads, near=size),
            about=("model.num_query_groups",),
        )


def tensor_parallel_divides_projection(facts: Facts) -> Iterator[Problem]:
    """(num_attention_heads + 2 x num_query_groups) x kv_channels % TP == 0 (tensor_parallel/layers.py, `divide`).

    It only fails if TP > num_query_groups (megatron/core/transformer/attention.py, SelfAttention: linear_qkv). Latent
    attention divides heads only.
    """
    model, size = facts.resolved_model, facts.parallelism.tensor_model_parallel_size
    heads, groups, width = model.num_attention_heads, model.num_query_groups, model.kv_channels
    assert groups is not None
    assert width is not None
    rows = (heads + 2 * groups) * width
    if attention_of(model).has_complete_heads and rows % size:
        yield Problem(
            path=TP,
            reason="does not divide (model.num_attention_heads + 2 x model.num_query_groups) x model.kv_channels = "
            f"({heads} + 2 x {groups}) x {width} = {rows} ({rows} / {size})",
            candidates=divisors(heads, near=size),
            about=("model.num_attention_heads", "model.num_query_groups", "model.kv_channels"),
        )


def tensor_parallel_divides_mlp(facts: Facts) -> Iterator[Problem]:
    """ffn_hidden_size % TP == 0 in dense layers (megatron/core/tensor_parallel/layers.py, asserted by `divide`)."""
    ffn_hidden_size = facts.resolved_model.ffn_hidden_size
    assert ffn_hidden_size is not None
    if facts.has_dense_layers:
        yield from _tensor_parallel_divides(facts, "ffn_hidden_size", ffn_hidden_size)


def tensor_parallel_divides_vocabulary(facts: Facts) -> Iterator[Problem]:
    """padded_vocab_size % TP == 0 (megatron/core/tensor_parallel/utils.py, VocabUtility).

    Megatron-LM pads to a multiple of TP; here the padded size does not depend on the layout.
    """
    padded_vocab_size = facts.resolved_model.padded_vocab_size
    if padded_vocab_size is not None:
        yield from _tensor_parallel_divides(facts, "padded_vocab_size", padded_vocab_size)


def _tensor_parallel_divides(facts: Facts, key: str, value: int) -> Iterator[Problem]:
    size = facts.parallelism.tensor_model_parallel_size
    if value % size:
        yield indivisible(TP, size, f"model.{key}", value)


def sequence_parallel_needs_tensor_parallel(facts: Facts) -> Iterator[Problem]:
    """sequence_parallel needs TP > 1 (megatron/core/model_parallel_config.py, __post_init__).

    Megatron-LM's command line silently disables it; a run file must state what will run.
    """
    if facts.parallelism.sequence_parallel and facts.parallelism.tensor_model_parallel_size == 1:
        yield Problem(
            path="parallelism.sequence_parallel",
            reason=f"requires {TP} > 1, but it is 1",
            candidates=[False],
            about=("parallelism.tensor_model_parallel_size",),
        )


def pipeline_divides_layers(facts: Facts) -> Iterator[Problem]:
    """num_layers % PP == 0 (megatron/core/transformer/transformer_block.py, get_num_layers_to_build)."""
    num_layers, stages = facts.model.num_layers, facts.parallelism.pipeline_model_parallel_size
    if num_layers % stages and not uneven_keys(facts.parallelism):
        # with these two, the first and the last stage have one layer less than the others
        is_even = num_layers >= stages and (num_layers + 2) % stages == 0
        settings = tuple(Setting(f"parallelism.{key}", True) for key in ACCOUNTED_KEYS) if is_even else ()
        yield Problem(
            path=PP,
            reason=f"does not divide model.num_layers = {num_layers} ({num_layers} / {stages})",
            candidates=divisors(num_layers, near=stages),
            about=("model.num_layers", f"parallelism.{LAYOUT}"),
            settings=settings,
            hint="" if settings or num_layers < stages else f"divide the layers unevenly with {LAYOUT}",
        )


def uneven_pipeline_has_all_layers(facts: Facts) -> Iterator[Problem]:
    """The keys for an uneven pipeline divide all layers (sources: trainer.contract.model.pipeline)."""
    for problem in split_problems(facts.model.num_layers, facts.parallelism, facts.model.mtp_num_layers):
        key = problem.path.removeprefix("parallelism.")
        counts = _counts_that_fit(facts, key) if key.startswith("num_layers") else ()
        yield dataclasses.replace(problem, candidates=counts, offers=4)


def _counts_that_fit(facts: Facts, key: str) -> list[int]:
    """Numbers of layers for a stage with which all layers can be divided, nearest to the given number first."""
    num_layers, given = facts.model.num_layers, getattr(facts.parallelism, key)
    fitting = (
        count for count in range(1, num_layers) if facts.with_value(f"parallelism.{key}", count).chunk_layers
    )
    return sorted(fitting, key=lambda count: abs(count - given))


def interleaving_needs_pipeline(facts: Facts) -> Iterator[Problem]:
    """VPP > 1 needs PP > 1 (megatron/core/parallel_state.py, initialize_model_parallel).

    Megatron-LM requires PP > 2 without overlapped pipeline communication; the trainer always overlaps it.
    """
    if facts.parallelism.num_chunks > 1 and facts.parallelism.pipeline_model_parallel_size == 1:
        yield Problem(
            path=VPP,
            reason=f"requires {PP} > 1, but it is 1",
            candidates=[None],
            about=("parallelism.pipeline_model_parallel_size",),
        )


def chunks_divide_stage(facts: Facts) -> Iterator[Problem]:
    """(num_layers / PP) % VPP == 0.

    Source: megatron/core/transformer/transformer_block.py, get_num_layers_to_build.
    """
    stages = facts.parallelism.pipeline_model_parallel_size
    layers_per_stage, layers_left = divmod(facts.model.num_layers, stages)
    if uneven_keys(facts.parallelism):
        return
    if layers_left == 0 and layers_per_stage % facts.parallelism.num_chunks:
        yield Problem(
            path=VPP,
            reason=f"does not divide the layers of a stage, model.num_layers / {PP} = "
            f"{facts.model.num_layers} / {stages} = {layers_per_stage} "
            f"({layers_per_stage} / {facts.parallelism.num_chunks})",
            candidates=[d for d in divisors(layers_per_stage, near=facts.parallelism.num_chunks) if d > 1]
            or [None],
            about=("model.num_layers", "parallelism.pipeline_model_parallel_size"),
        )


def context_parallel_divides_sequence(facts: Facts) -> Iterator[Problem]:
    """seq_length % (2 x CP) == 0 when CP > 1 (megatron/training/arguments.py, validate_args).

    Each rank takes one slice from the front and one from the back, which balances the work of the causal mask.
    """
    seq_length, size = facts.model.seq_length, facts.parallelism.context_parallel_size
    if size > 1 and seq_length % (2 * size):
        yield Problem(
            path=CP,
            reason=f"divides each sequence into 2 x {size} slices, but model.seq_length = {seq_length} "
            f"is not a multiple of {2 * size} ({seq_length} / {2 * size})",
            candidates=divisors(max(1, seq_length // 2), near=size),
            about=("model.seq_length",),
        )


def sequence_parallel_divides_sequence(facts: Facts) -> Iterator[Problem]:
    """seq_length % (CP x TP) == 0 with sequence_parallel (hpcgen's rule: Core's first reduce-scatter fails)."""
    axes = facts.parallelism
    ranks = axes.context_parallel_size * axes.tensor_model_parallel_size
    if axes.sequence_parallel and facts.model.seq_length % ranks:
        yield Problem(
            path="model.seq_length",
            reason=f"is not a multiple of CP x TP = {axes.context_parallel_size} x "
            f"{axes.tensor_model_parallel_size} = {ranks}, which parallelism.sequence_parallel = true requires "
            f"({facts.model.seq_length} / {ranks})",
            candidates=multiples(ranks, near=facts.model.seq_length),
            offers=2,
            about=("parallelism.sequence_parallel",),
        )


def model_parallel_divides_world(facts: Facts) -> Iterator[Problem]:
    """world_size % (TP x PP x CP) == 0; the quotient is DP.

    Source: megatron/core/parallel_state.py, initialize_model_parallel.
    """
    if facts.data_parallel_size is not None:
        return
    axes = facts.parallelism
    needed = model_parallel_size(axes)
    unit = needed // math.gcd(needed, facts.world.ranks_each)
    more_tasks = ""
    if facts.device == "cpu" and facts.world.path.endswith(".nodes"):
        tasks = needed // math.gcd(needed, facts.world.count)
        more_tasks = f"set {facts.world.path.replace('.nodes', '.ntasks_per_node')} to {tasks}, or "
    yield Problem(
        path=facts.world.path,
        reason=f"results in {facts.world}, which TP x PP x CP = {axes.tensor_model_parallel_size} x "
        f"{axes.pipeline_model_parallel_size} x {axes.context_parallel_size} = {needed} does not divide "
        f"({facts.world.size} / {needed})",
        candidates=multiples(unit, near=facts.world.count),
        offers=2,
        hint=f"{more_tasks}choose parallel sizes whose product divides {facts.world.size}",
    )


def tensor_parallel_overlap_needs_sequence_parallel(facts: Facts) -> Iterator[Problem]:
    """tp_comm_overlap needs Transformer Engine and sequence_parallel.

    Source: megatron/training/arguments.py, validate_args.
    """
    if not facts.parallelism.tp_comm_overlap:
        return
    for is_missing, key, reason, advice in (
        (
            facts.engine_problem,
            "training.transformer_impl",
            f"requires Transformer Engine, but {facts.engine_problem}",
            "",
        ),
        (
            not facts.parallelism.sequence_parallel,
            "parallelism.sequence_parallel",
            "requires parallelism.sequence_parallel = true, but it is false",
            f"set sequence_parallel to true, with {TP} above 1",
        ),
    ):
        if is_missing:
            yield Problem(
                path="parallelism.tp_comm_overlap",
                reason=reason,
                candidates=[False],
                hint=advice,
                about=(key,),
            )
            return


def param_gather_overlap_needs_grad_reduce_overlap(facts: Facts) -> Iterator[Problem]:
    """overlap_param_gather needs overlap_grad_reduce (megatron/training/arguments.py, validate_args)."""
    if facts.parallelism.overlap_param_gather and not facts.parallelism.overlap_grad_reduce:
        yield Problem(
            path="parallelism.overlap_param_gather",
            reason="requires parallelism.overlap_grad_reduce = true, but it is false",
            candidates=[False],
            settings=(Setting("parallelism.overlap_grad_reduce", True),),
            about=("parallelism.overlap_grad_reduce",),
        )


def optimizer_instances_divide_ranks(facts: Facts) -> Iterator[Problem]:
    """(DP x CP) % num_distributed_optimizer_instances == 0.

    Source: megatron/core/parallel_state.py, initialize_model_parallel.
    """
    data_parallel, instances = facts.data_parallel_size, facts.parallelism.num_distributed_optimizer_instances
    if data_parallel is None:
        return
    context_parallel = facts.parallelism.context_parallel_size
    ranks = data_parallel * context_parallel
    if ranks % instances:
        yield Problem(
            path="parallelism.num_distributed_optimizer_instances",
            reason=f"does not divide DP x CP = {data_parallel} x {context_parallel} = {ranks} ({ranks} / {instances})",
            candidates=divisors(ranks, near=instances),
        )


RULES: tuple[Rule, ...] = (
    tensor_parallel_divides_heads,
    tensor_parallel_fits_query_groups,
    tensor_parallel_divides_projection,
    tensor_parallel_divides_mlp,
    tensor_parallel_divides_vocabulary,
    sequence_parallel_needs_tensor_parallel,
    pipeline_divides_layers,
    uneven_pipeline_has_all_layers,
    interleaving_needs_pipeline,
    chunks_divide_stage,
    context_parallel_divides_sequence,
    sequence_parallel_divides_sequence,
    model_parallel_divides_world,
    optimizer_instances_divide_ranks,
    param_gather_overlap_needs_grad_reduce_overlap,
    tensor_parallel_overlap_needs_sequence_parallel,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
