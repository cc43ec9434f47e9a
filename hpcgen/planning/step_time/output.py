"""Time of what precedes the layers and follows them: the embedding, the output layer with the loss, and MTP layers."""

from __future__ import annotations

from hpcgen.planning.memory.output import recomputes_mtp
from hpcgen.planning.memory.parameters import table_parameter_count
from hpcgen.planning.step_time.layer import Layer
from hpcgen.planning.step_time.linear import linear
from hpcgen.planning.step_time.work import Device, Passes, Seconds, added

ACCUMULATED_BYTES = 10
"""Bytes moved per weight of the embedding to add its gradient to the fp32 buffer. No product does this."""

LOGIT_BYTES = {"te": (6, 4), "fused": (18, 12), "unfused": (30, 20)}
"""Bytes moved per logit by kinds of cross entropy, forward and backward, for logits of two bytes."""


def embedding_time(device: Device) -> Passes:
    """The embedding of the tokens of a microbatch. Each tensor-parallel rank has some of its rows."""
    setup, links, group = device.setup, device.links, device.groups.tensor
    values, weights = setup.tokens * setup.model.hidden_size, table_parameter_count(setup)
    # A gradient has all rows of the table, most of which are zero.
    if not device.trains_weights:  # a frozen table has no gradient
        part = device.moving("embedding", 4 * values, 0.0, setup.model.hidden_size)
    else:
        part = device.moving("embedding", 4 * values, 2 * (values + weights), setup.model.hidden_size)
        part += Passes.computing(
            0.0, device.kernels.memory("accumulate", "forward", ACCUMULATED_BYTES * weights)
        )
    if setup.model.position_embedding_type == "learned_absolute":
        part += device.memory_bound("residual", setup.tokens, setup.model.hidden_size)
    size = values * setup.value_bytes
    if not setup.parallelism.sequence_parallel:
        return part + Passes(Seconds(tensor_parallel=links.all_reduce(size, group)))
    return part + Passes(
        Seconds(tensor_parallel=links.reduce_scatter(size, group)),
        Seconds(tensor_parallel=links.all_gather(size, group)),
    )


def output_time(device: Device) -> Passes:
    """The final norm, the logits and the cross entropy, once for each of the losses with MTP layers."""
    setup = device.setup
    model, ranks = setup.model, setup.layout.tensor_model_parallel_size
    assert model.padded_vocab_size
    width = model.padded_vocab_size / ranks
    logits = linear(device, width, model.hidden_size, "outputs", precision=device.precision_outside_layers)
    norm = device.norm(device.sharded_tokens, model.hidden_size)
    outputs = 1 + (model.mtp_num_layers or 0)
    return added((norm, logits, _cross_entropy(device, width))).times(outputs)


def _cross_entropy(device: Device, width: float) -> Passes:
    kind, logits = device.setup.cross_entropy, device.setup.tokens * width
    forward, backward = (size * logits for size in LOGIT_BYTES[kind])
    # The kernels of Megatron-Core are not those that the tables have.
    return device.moving("cross_entropy" if kind == "te" else kind, forward, backward, width)


def mtp_time(device: Device, layer: Layer, embedding: Passes) -> Passes:
    """The MTP layers, each with a `layer`, an `embedding`, and a projection of both to the hidden size.

    Their losses are in `output_time`.
    """
    setup = device.setup
    number, hidden = setup.model.mtp_num_layers or 0, setup.model.hidden_size
    if not number:
        return Passes()
    norms = device.norm(2 * device.sharded_tokens, hidden)
    projection = linear(device, hidden / setup.layout.tensor_model_parallel_size, 2 * hidden, "outputs")
    computed = layer.recomputed if recomputes_mtp(setup) else layer.kept
    return added((norms, projection, computed, embedding)).times(number)
