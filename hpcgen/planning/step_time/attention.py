"""Time of the attention of a layer, with its norms, projections and residual."""

from __future__ import annotations

from hpcgen.planning.step_time.collectives import Group
from hpcgen.planning.step_time.kernels import Attention
from hpcgen.planning.step_time.linear import linear
from hpcgen.planning.step_time.work import BYTES_PER_VALUE, Device, Part, Passes, Seconds, added
from trainer.contract.attention import attention_of
from trainer.contract.attention.kind import Projection
from trainer.contract.attention.visibility import visible_pairs
from trainer.contract.config.training import RecomputeModule

ROTATION_PASSES = 6
"""Number of times that rope without a fused kernel, as in latent attention, reads and writes what it rotates."""


def attention_parts(device: Device) -> list[Part]:
    """The attention with the norm before it and the residual after it."""
    model = device.setup.model
    kind = attention_of(model)
    own_norm: RecomputeModule | None = "layernorm" if "layernorm" in kind.recomputable else None
    up: RecomputeModule | None = "mla_up_proj" if "mla_up_proj" in kind.recomputable else None
    return [
        Part(device.norm(device.sharded_tokens, model.hidden_size), own_norm),
        *(_projection(device, each, up) for each in kind.projections(model)),
        Part(_shared_groups(device)),
        Part(_norms(device), up),
        Part(_rotation(device), up),
        Part(_copies(device), up),
        Part(_core(device), "core_attn"),
        Part(residual(device)),
    ]


def residual(device: Device) -> Passes:
    """The addition of a part of a layer to the hidden state, with dropout and bias."""
    model = device.setup.model
    part = device.memory_bound("residual", device.sharded_tokens, model.hidden_size)
    if model.hidden_dropout:
        part += device.memory_bound("dropout", device.sharded_tokens, model.hidden_size)
    return part


def _projection(device: Device, each: Projection, up: RecomputeModule | None) -> Part:
    outputs, inputs = each.shape(device.setup.layout.tensor_model_parallel_size)
    is_up = each.divided == "outputs"
    return Part(linear(device, outputs, inputs, each.divided, has_bias=each.has_bias), up if is_up else None)


def _widths(device: Device) -> tuple[float, float, float, float]:
    """Values per token on a device: queries, keys, values, and the output."""
    model, ranks = device.setup.model, device.setup.layout.tensor_model_parallel_size
    assert model.kv_channels
    assert model.num_query_groups
    heads, groups = model.num_attention_heads / ranks, max(1, model.num_query_groups / ranks)
    of_value = attention_of(model).value_width(model)
    return heads * model.kv_channels, groups * model.kv_channels, groups * of_value, heads * of_value


def _shared_groups(device: Device) -> Passes:
    """Gathers queries, keys and values of all ranks if there are fewer groups than ranks (Core's attention.py)."""
    model, group = device.setup.model, device.groups.tensor
    assert model.num_query_groups
    if model.num_query_groups >= group.size or not attention_of(model).has_complete_heads:
        return Passes()
    width = attention_of(model).projections(model)[0].outputs
    size = device.setup.tokens * width * device.setup.value_bytes
    return Passes(
        Seconds(tensor_parallel=device.links.all_gather(size, group)),
        Seconds(tensor_parallel=device.links.reduce_scatter(size, group)),
    )


def _norms(device: Device) -> Passes:
    """Norms of complete queries and keys, or of latents."""
    model = device.setup.model
    if not model.qk_layernorm:
        return Passes()
    assert model.kv_channels
    if latents := attention_of(model).latent_width(model):
        return device.norm(device.sharded_tokens, latents)
    queries, keys, _, _ = _widths(device)
    return device.norm(device.setup.tokens * (queries + keys) / model.kv_channels, model.kv_channels)


def _rotation(device: Device) -> Passes:
    model, tokens = device.setup.model, device.setup.tokens
    if model.position_embedding_type != "rope":
        return Passes()
    attention = attention_of(model)
    queries, keys, _, _ = _widths(device)
    if attention.has_complete_heads:
        return device.memory_bound("rope", tokens, queries) + device.memory_bound("rope", tokens, keys)
    assert model.kv_channels
    rotated = attention.rotated_width(model)
    width = (queries / model.kv_channels + 1) * rotated
    return device.memory_bound("copy", ROTATION_PASSES * tokens, width)


def _copies(device: Device) -> Passes:
    """Copies that make queries, keys and values contiguous, and that join their gradients.

    Sources: megatron/core/transformer/attention.py, get_query_key_value_tensors, and Transformer Engine's
    get_qkv_layout. Parts of one tensor are used as they are, unless queries are grouped or rotated.
    """
    model, tokens = device.setup.model, device.setup.tokens
    queries, keys, values, _ = _widths(device)
    is_rotated = model.position_embedding_type == "rope"
    if not attention_of(model).has_complete_heads:
        return device.memory_bound("copy", tokens, queries + keys + values)
    if model.num_query_groups != model.num_attention_heads:
        copied = queries + values + (0 if is_rotated else keys)
    elif is_rotated:
        copied = values
    else:
        return Passes()
    forward, backward = BYTES_PER_VALUE["copy"]
    joined = queries + keys + values
    return device.moving("copy", forward * tokens * copied, backward * tokens * joined, joined)


def _core(device: Device) -> Passes:
    """Scores, softmax and weighted values, with the exchange between context-parallel ranks."""
    size = device.setup.layout.context_parallel_size
    if size == 1:
        return _attend(device)
    exchange = device.setup.context_exchange
    if exchange == "all_gather":
        return _attend(device).times(1 / size) + _gathered(device)
    sizes = device.setup.parallelism.hierarchical_context_parallel_sizes
    by_heads, in_ring = {"p2p": (1, size), "a2a": (size, 1)}.get(exchange) or sizes or (1, size)
    per_domain = device.groups.context.per_domain
    inner = Group(by_heads, min(by_heads, per_domain))
    outer = Group(in_ring, max(1, per_domain // by_heads))
    return _ring(device, outer, by_heads) + _by_heads(device, inner)


def _attend(device: Device, *, by_heads: int = 1, in_ring: int = 1) -> Passes:
    """Attention of complete documents, or of a part of each sample to a part of the same length, and of some heads."""
    model, tensor = device.setup.model, device.setup.layout.tensor_model_parallel_size
    assert model.kv_channels
    assert model.num_query_groups
    documents = device.documents
    length = sum(each**2 for each in documents) / sum(documents)
    visible = visible_pairs(model, documents) / (sum(documents) * length / 2)
    heads = model.num_attention_heads / tensor / by_heads
    groups = max(1, model.num_query_groups / tensor) / by_heads
    shape = Attention(
        length / in_ring,
        device.setup.training.micro_batch_size * model.seq_length / length,
        heads,
        min(heads, groups),
        model.kv_channels,
        attention_of(model).value_width(model),
    )
    forward, backward = (
        device.kernels.attention(each) for each in (shape, shape._replace(direction="backward"))
    )
    return Passes.computing(visible * forward, visible * backward)


def _gathered(device: Device) -> Passes:
    """Gathers keys and values of all ranks, and reduces their gradients.

    Transformer Engine gathers them again for the backward pass; the trainer keeps them.
    """
    size, context = device.setup.layout.context_parallel_size, device.groups.context
    _, keys, values, _ = _widths(device)
    total = size * device.setup.tokens * (keys + values) * device.setup.value_bytes
    gathered, reduced = device.links.all_gather(total, context), device.links.reduce_scatter(total, context)
    backward = reduced if device.setup.gathers_keys else gathered + reduced
    return Passes(Seconds(context_parallel=gathered), Seconds(context_parallel=backward))


def _ring(device: Device, group: Group, by_heads: int) -> Passes:
    """Attention in as many steps as the ring has ranks, while the next keys and values arrive.

    In each step, half of the scores of equally long parts are visible: those before the queries of the same part, or
    those of one of the two halves of another part. The backward pass sends keys, values and their gradients. The
    results of the steps are combined.
    """
    steps = group.size
    step = _attend(device, by_heads=by_heads, in_ring=steps)
    if steps == 1:
        return step
    _, keys, values, output = _widths(device)
    sent = device.links.send(device.setup.tokens * (keys + values) * device.setup.value_bytes, group)
    forward = device.links.added(sent, step.forward.compute)
    backward = device.links.added(2 * sent, step.backward.compute)
    waits = Passes(Seconds(context_parallel=forward), Seconds(context_parallel=backward)).times(steps - 1)
    combined = device.memory_bound("residual", steps * device.setup.tokens, output)
    return added((step.times(steps), waits, combined))


def _by_heads(device: Device, group: Group) -> Passes:
    """Exchanges of queries, keys, values and the output, and of their gradients."""
    exchanged = device.setup.tokens * sum(_widths(device)) * device.setup.value_bytes
    waits = Seconds(context_parallel=device.links.all_to_all(exchanged, group))
    return Passes(waits, waits)
