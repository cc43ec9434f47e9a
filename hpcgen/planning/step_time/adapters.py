"""Time of the LoRA adapters of a layer, as if the adapters of all layers of its kind were spread evenly over them.

The weights of the model are frozen, so that `Device.products` has no gradients of weights.
"""

from __future__ import annotations

from hpcgen.planning.step_time.work import Device, Part, Passes, Seconds, added
from trainer.contract.model.adapters import Linear, is_target, layer_linears
from trainer.contract.model.experts import moe_layer_pattern


def adapter_parts(device: Device, *, has_experts: bool) -> list[Part]:
    """The adapters of a dense layer or of one with experts. Empty without adapters."""
    setup = device.setup
    if setup.lora.rank is None:
        return []
    numbers = [number for number, kind in enumerate(moe_layer_pattern(setup.model)) if kind is has_experts]
    layers = [list(layer_linears(setup.model, number, has_experts=has_experts)) for number in numbers]
    parts = []
    for same in zip(*layers, strict=True):  # one linear layer of each transformer layer
        share = sum(is_target(setup.lora, linear.name) for linear in same) / len(same)
        if share:
            parts.append(_adapter(device, same[0]).times(share))
    return [Part(added(parts))] if parts else []


def _adapter(device: Device, linear: Linear) -> Passes:
    """A x for all parts in one product, an exchange of the result, B for each part, and the sum with the output."""
    setup, ranks = device.setup, device.setup.layout.tensor_model_parallel_size
    width, tokens, number = (setup.lora.rank or 0) * len(linear.parts), float(setup.tokens), 1.0
    inputs, share_of_outputs = float(linear.parts[0].inputs), 1.0
    if linear.num_experts:
        number = linear.num_experts / setup.layout.expert_model_parallel_size
        tokens = device.imbalance * setup.tokens * setup.received_copies / number
        ranks = 1
    if linear.divided == "inputs":
        inputs /= ranks
    else:
        share_of_outputs /= ranks
    passes = [_trained(device, tokens, width, inputs)]
    outputs = [share_of_outputs * part.outputs for part in linear.parts]
    passes += [_trained(device, tokens, each, setup.lora.rank or 0) for each in outputs]
    passes.append(device.memory_bound("residual", tokens, sum(outputs)))
    if ranks > 1:
        exchanged = device.links.all_reduce(tokens * width * setup.value_bytes, device.groups.tensor)
        passes.append(Passes(Seconds(tensor_parallel=exchanged), Seconds(tensor_parallel=exchanged)))
    return added(passes).times(number)


def _trained(device: Device, tokens: float, outputs: float, inputs: float) -> Passes:
    products = device.trained_products(tokens, outputs, inputs, device.precision_outside_layers)
    return Passes.computing(products.forward, products.data_gradient + products.weight_gradient)
