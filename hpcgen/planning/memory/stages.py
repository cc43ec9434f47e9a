"""Memory of the devices of a pipeline stage: all terms, at the moment when the most memory is in use."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections import Counter

from hpcgen.planning.frozen import frozen_shares
from hpcgen.planning.memory.adapters import adapter_bytes, unkept_bytes
from hpcgen.planning.memory.attention import Part, attention_part
from hpcgen.planning.memory.kernels import kernel_bytes
from hpcgen.planning.memory.mlp import mlp_part
from hpcgen.planning.memory.output import loss_bytes, mtp_bytes, recomputes_mtp
from hpcgen.planning.memory.parameters import layer_kinds, parameter_bytes, table_parameter_count
from hpcgen.planning.setup import Setup, once_per_setup
from trainer.contract.attention.visibility import hides_tokens
from trainer.contract.model.experts import moe_layer_pattern
from trainer.contract.model.layout import Layout
from trainer.contract.model.model_size import last_layer_has_experts
from trainer.contract.model.pipeline import mtp_chunk, mtp_stage
from trainer.contract.record import record, replaced

GIB = 1024**3


@record
class MemoryEstimate:
    """Bytes on the device with the most memory in use, without fragmentation, NCCL and CUDA itself.

    The counterpart on a GPU is torch.cuda.max_memory_allocated.
    """

    parameter_bytes: int
    """Weights, gradients and optimizer state."""
    activation_bytes: int
    """Activations kept for the backward passes of the microbatches in flight, the logits, and gradients of both."""
    kernel_bytes: int
    """Buffers that libraries keep for their kernels."""
    gradient_bytes: int
    """The gradients in `parameter_bytes`."""
    optimizer_bytes: int
    """The state of the optimizer in `parameter_bytes`."""
    moment_bytes: int
    """Part of `activation_bytes` that exists only during a pass: logits, gradients, recomputed activations."""

    @property
    def total_gib(self) -> float:
        """Total in GiB."""
        return (self.parameter_bytes + self.activation_bytes + self.kernel_bytes) / GIB


@record
class Layer:
    """Memory of a layer. Bytes per token."""

    attention: Part
    mlp: Part

    @classmethod
    def of(cls, setup: Setup, *, has_experts: bool) -> Layer:
        """A dense layer, or one with experts."""
        parts = {"self_attention": attention_part(setup), "mlp": mlp_part(setup, has_experts=has_experts)}
        for module, part in parts.items():
            adapters = adapter_bytes(setup, module, has_experts=has_experts)
            parts[module] = replaced(
                part, kept=part.kept + adapters.kept, working=part.working + adapters.working
            )
        return cls(parts["self_attention"], parts["mlp"])

    @functools.cached_property
    def kept(self) -> float:
        """Activations from the forward to the backward pass."""
        return self.attention.kept + self.mlp.kept

    @functools.cached_property
    def computing(self) -> float:
        """Peak of the temporary memory in its forward or backward pass.

        The MLP has released its activations when the attention is at its peak.
        """
        mlp, attention = (part.recomputed + part.working for part in (self.mlp, self.attention))
        return max(mlp, attention - self.mlp.kept)


def estimate_memory(setup: Setup) -> MemoryEstimate:
    """The estimate for the stage that needs the most memory. Tests compare it with GPU measurements."""
    return max(
        (estimate_stage(setup, stage) for stage in _fullest_stages(setup)),
        key=lambda estimate: estimate.total_gib,
    )


def _fullest_stages(setup: Setup) -> list[int]:
    """The stages without those that certainly need at most as much memory as the stage before them.

    If both have the same layers in equal chunks and nothing else, the later one has fewer microbatches in flight.
    With frozen weights, it may train more of them.
    """
    kinds, mtp = layer_kinds(setup), mtp_stage(setup.parallelism)
    if setup.training.freeze or not setup.trains_weights:
        return list(range(len(kinds)))
    ends = {0, 1, mtp, mtp + 1, len(kinds) - 1}
    return [
        stage
        for stage, chunks in enumerate(kinds)
        if stage in ends or chunks != kinds[stage - 1] or len(set(map(len, chunks))) > 1
    ]


def estimate_stage(setup: Setup, stage: int) -> MemoryEstimate:
    """The estimate for the devices of one pipeline stage."""
    layout = setup.layout
    is_last = stage == layout.pipeline_model_parallel_size - 1
    kinds = set(itertools.chain.from_iterable(layer_kinds(setup)[stage]))
    if _has_mtp(setup, stage):
        kinds.add(last_layer_has_experts(setup.model))
    layers = {has_experts: _layers(setup)[has_experts] for has_experts in kinds}
    parameters, (activations, moment) = parameter_bytes(setup, stage), _activation_bytes(setup, stage, layers)
    return MemoryEstimate(
        parameter_bytes=int(sum(parameters)),
        activation_bytes=activations + _mask_bytes(setup),
        kernel_bytes=kernel_bytes(setup, kinds=kinds, has_output_layer=is_last),
        gradient_bytes=int(parameters.gradients),
        optimizer_bytes=int(parameters.optimizer),
        moment_bytes=moment,
    )


@once_per_setup
def _layers(setup: Setup) -> dict[bool, Layer]:
    """A layer with experts (True) and a dense one (False), if the model has them."""
    kinds = set(moe_layer_pattern(setup.model))
    return {has_experts: Layer.of(setup, has_experts=has_experts) for has_experts in kinds}


def _num_mtp(setup: Setup) -> int:
    return setup.model.mtp_num_layers or 0


def _has_mtp(setup: Setup, stage: int) -> bool:
    """True if the MTP layers are on this stage, in its last model chunk."""
    return setup.model.mtp_num_layers is not None and stage == mtp_stage(setup.parallelism)


def _activation_bytes(setup: Setup, stage: int, layers: dict[bool, Layer]) -> tuple[int, int]:
    """Kept activations of the microbatches in flight with what the most demanding moment of their passes adds, and the
    latter alone.
    """
    pattern = moe_layer_pattern(setup.model)
    chunks = [
        _kept_bytes(setup, [layers[pattern[number]] for number in numbers]) - unkept_bytes(setup, numbers)
        for numbers in _layers_with_gradients(setup, stage)
    ]
    is_last = stage == setup.layout.pipeline_model_parallel_size - 1
    moments = [[_layer_moment(setup, stage, backward, layers)] for backward in range(len(chunks))]
    after_layers: list[float] = [loss_bytes(setup)] if is_last else []
    if _has_mtp(setup, stage):
        layer = layers[last_layer_has_experts(setup.model)]
        of_mtp = mtp_bytes(setup, layer.kept)
        chunks[-1] += of_mtp + _final_norm_bytes(setup, stage)
        after_layers += _mtp_moments(setup, stage, layer)
        moments[-1][0] -= setup.tokens * of_mtp
    moments[-1] += after_layers
    if stage == 0:
        moments[0].append(_embedding_moment(setup) - setup.tokens * chunks[0])
    added = [max(of_chunk) for of_chunk in moments]
    most, moment = max(
        (setup.tokens * sum(map(operator.mul, numbers, chunks)) + added[backward], added[backward])
        for backward, numbers in decisive_moments(setup.layout, stage)
    )
    return int(most + setup.tokens * _exchanged_bytes(setup, stage)), int(moment)


def _layers_with_gradients(setup: Setup, stage: int) -> list[range]:
    """The numbers of the layers of each model chunk that keep activations for the backward pass.

    The first layers keep none if nothing is trained up to them. On later stages of a pipeline, all do, because Core's
    tensors for received hidden states have gradients.
    """
    first, *others = setup.layout.layers_of_stage(stage)
    return [first[frozen_shares(setup).num_unreached if stage == 0 else 0 :], *others]


def _layer_moment(setup: Setup, stage: int, backward: int, layers: dict[bool, Layer]) -> float:
    """Bytes that are added while a layer is computed, or a group of layers with full recomputation. `backward` is the
    model chunk whose backward pass starts.
    """
    recomputed = _recomputed_at_once(setup, len(setup.layout.layers_of_stage(stage)[backward]))
    size = max((recomputed * layer.kept + layer.computing for layer in layers.values()), default=0.0)
    return setup.tokens * size + (_waiting_gradient_bytes(setup) if stage == 0 else 0)


def _mtp_moments(setup: Setup, stage: int, layer: Layer) -> list[float]:
    """Bytes that are added in the backward passes of the MTP layers, which are like `layer`, and when these have ended.

    The gradient of the embedding from one MTP layer, or that of an output layer that shares it, waits for that of the
    next MTP layer. The last one comes when the activations of all MTP layers are released.
    """
    is_last = stage == setup.layout.pipeline_model_parallel_size - 1
    shares = is_last and not setup.model.untie_embeddings_and_output_weights
    gradients, of_table = min(_num_mtp(setup) + shares, 2), _table_gradient_bytes(setup)
    computing = layer.computing + (layer.kept if recomputes_mtp(setup) else 0)
    after = 2 * setup.hidden_bytes - mtp_bytes(setup, layer.kept)
    return [
        setup.tokens * computing + (gradients - 1) * of_table,
        setup.tokens * after + gradients * of_table,
    ]


def _final_norm_bytes(setup: Setup, stage: int) -> float:
    """Bytes per token of the inputs of all final norms, for MTP layers on the stage before the loss.

    Otherwise, `loss_bytes` counts them.
    """
    is_last = stage == setup.layout.pipeline_model_parallel_size - 1
    return 0.0 if is_last else (1 + _num_mtp(setup)) * setup.sharded_hidden_bytes


def _embedding_moment(setup: Setup) -> float:
    """Bytes that are added at the end of the backward pass of a microbatch, which has released its activations.

    In addition to the gradient of the embedding, its output has one, by position and by sample. Sequence parallelism
    does not divide them, since a rank has some rows of the embedding for all tokens. A pipeline still has the gradient
    that it received.
    """
    is_pipeline = setup.layout.pipeline_model_parallel_size > 1
    gradients = 2 * setup.hidden_bytes + (setup.sharded_hidden_bytes if is_pipeline else 0)
    return setup.tokens * gradients + _table_gradient_bytes(setup) + _waiting_gradient_bytes(setup)


def _table_gradient_bytes(setup: Setup) -> float:
    """The gradient of the embedding, in the precision of the model, before it is added to the fp32 buffer."""
    return setup.value_bytes * table_parameter_count(setup) if not frozen_shares(setup).embedding else 0.0


def _waiting_gradient_bytes(setup: Setup) -> float:
    """The gradient of an embedding that the output layer or MTP layers share without a copy, on a single stage.

    Their part exists until the backward pass reaches the embedding itself, since autograd adds both.
    """
    model = setup.model
    shares = not model.untie_embeddings_and_output_weights or model.mtp_num_layers is not None
    is_single = setup.layout.pipeline_model_parallel_size == 1
    return _table_gradient_bytes(setup) if shares and is_single else 0.0


def _kept_bytes(setup: Setup, layers: list[Layer]) -> float:
    """Bytes per token that the layers of a model chunk keep.

    With full recomputation, groups of recompute_num_layers have one stored input each (uniform), or the first
    recompute_num_layers of every chunk have a stored input per layer (block).
    """
    number = setup.training.recompute_num_layers or 1
    if not setup.recomputes_layers:
        return sum(layer.kept for layer in layers) + _graph_bytes(setup, len(layers))
    if setup.training.recompute_method == "uniform":
        return math.ceil(len(layers) / number) * setup.sharded_hidden_bytes
    first, rest = layers[:number], layers[number:]
    return len(first) * setup.sharded_hidden_bytes + sum(layer.kept for layer in rest)


def _graph_bytes(setup: Setup, num_layers: int) -> float:
    """Bytes per token that the CUDA graphs of a model chunk keep in a pipeline.

    Each layer was seen to keep one more hidden state, and so was each chunk, whose input is received and then copied to
    that of its first graph (benchmarks/planner/data/own.csv, gpt-pp2-*).
    """
    is_pipeline = setup.layout.pipeline_model_parallel_size > 1
    if setup.training.cuda_graph_impl == "none" or not is_pipeline:
        return 0.0
    return (num_layers + 1) * setup.sharded_hidden_bytes


def _recomputed_at_once(setup: Setup, number: int) -> int:
    """Layers of a model chunk of `number` layers that are complete only during their backward pass, while all others of
    its microbatch are kept.

    With block recomputation, the backward pass has released layers that are not recomputed before it reaches others.
    """
    if not setup.recomputes_layers:
        return 0
    at_once = setup.training.recompute_num_layers or 1
    if setup.training.recompute_method == "uniform":
        return min(at_once, number)
    return 1 if at_once >= number > 0 else 0


def _exchanged_bytes(setup: Setup, stage: int) -> float:
    """Bytes per token of hidden states and gradients that a stage holds for its neighbors, in addition to the inputs of
    its layers and to the gradient of the output that is being computed.

    A stage refers to the gradient that it sent last, and releases outputs that are sent (trainer/model/core_config.py).
    An interleaved schedule also receives the next input and gradient while it computes
    (forward_backward_pipelining_with_interleaving in megatron/core/pipeline_parallel/schedules.py). If the loss is on
    the stage after the MTP layers, these two stages exchange the outputs of all of them. Interleaved, they were seen to
    hold five such tensors while another chunk computes: two inputs with their gradients, and the next input.
    """
    is_interleaved = setup.layout.virtual_pipeline_model_parallel_size > 1
    number = 3 if is_interleaved else min(stage, 1)
    if mtp_chunk(setup.parallelism) != -1 and stage >= mtp_stage(setup.parallelism):
        number = 5 * (1 + _num_mtp(setup)) if is_interleaved else number + _num_mtp(setup)
    return number * setup.sharded_hidden_bytes


def microbatches_in_flight(layout: Layout, stage: int) -> list[tuple[int, tuple[int, ...]]]:
    """The model chunk of a stage whose backward pass starts, with the microbatches in flight in each chunk.

    Source: megatron/core/pipeline_parallel/schedules.py, get_pp_rank_microbatches (forward passes before the first
    backward pass) and get_schedule_table. The numbers repeat once each chunk has had its turn.
    """
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    return _in_flight(stages, chunks, layout.num_microbatches, stage)


def _in_flight(
    stages: int, chunks: int, num_microbatches: int, stage: int
) -> list[tuple[int, tuple[int, ...]]]:
    after = stages - 1 - stage
    warmup = 2 * after + (chunks - 1) * stages if chunks > 1 else after
    first = min(num_microbatches * chunks, warmup + stages * chunks)
    forward = [number // stages % chunks for number in range(first)]
    before = Counter(forward[:warmup])
    numbers = [before[chunk] for chunk in range(chunks)]
    found = []
    for started, finished in zip(forward[warmup:], forward[: stages * chunks], strict=False):
        numbers[started] += 1
        backward = chunks - 1 - finished
        found.append((backward, tuple(numbers)))
        numbers[backward] -= 1
    return found or [(chunks - 1, tuple(numbers))]


def decisive_moments(layout: Layout, stage: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Moments of `microbatches_in_flight` in which the most memory can be in use."""
    stages, chunks = layout.pipeline_model_parallel_size, layout.virtual_pipeline_model_parallel_size
    # further microbatches do not change the first period
    return _decisive(stages, chunks, min(layout.num_microbatches, 3 * stages), stage)


@functools.lru_cache(maxsize=1024)
def _decisive(
    stages: int, chunks: int, num_microbatches: int, stage: int
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Memory is linear in the numbers, so a moment between two equal steps of them cannot be the only fullest one."""
    found = [*dict.fromkeys(_in_flight(stages, chunks, num_microbatches, stage))]
    middle = {
        each
        for before, each, after in zip(found, found[1:], found[2:], strict=False)
        if before[0] == each[0] == after[0]
        and all(a + c == 2 * b for a, b, c in zip(before[1], each[1], after[1], strict=True))
    }
    return tuple(each for each in found if each not in middle)


def _mask_bytes(setup: Setup) -> int:
    """The mask that all layers of torch's kernels share: a value per query and key (trainer/model/attention/core.py).

    Transformer Engine's kernels know windows and context parallelism without a mask.
    """
    length = setup.model.seq_length
    has_mask = setup.layout.context_parallel_size > 1 or hides_tokens(setup.model)
    if setup.uses_engine or not has_mask:
        return 0
    return setup.value_bytes * length * length // setup.layout.context_parallel_size
