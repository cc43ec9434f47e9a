"""Number and names of the parameters of a model, which follow from its shape."""

from __future__ import annotations

from trainer.contract.attention import attention_of
from trainer.contract.config import ModelConfig
from trainer.contract.model.experts import moe_layer_pattern, num_moe_layers


def parameter_count(model: ModelConfig) -> int:
    """Number of trainable parameters of the resolved `model`, identical to Megatron-Core's GPTModel."""
    assert model.max_position_embeddings
    assert model.padded_vocab_size
    num_tables = 2 if model.untie_embeddings_and_output_weights else 1
    positions = model.max_position_embeddings if model.position_embedding_type == "learned_absolute" else 0
    embedding = (num_tables * model.padded_vocab_size + positions) * model.hidden_size
    mtp = (model.mtp_num_layers or 0) * mtp_parameter_count(model)
    return embedding + layers_parameter_count(model) + norm_parameter_count(model) + mtp


def active_parameter_count(model: ModelConfig) -> int:
    """Number of parameters that process a token: all parameters except those of experts that the router does not
    choose."""
    if model.num_moe_experts is None:
        return parameter_count(model)
    idle = model.num_moe_experts - model.moe_router_topk
    moe_layers = num_moe_layers(model) + (model.mtp_num_layers or 0) * last_layer_has_experts(model)
    return parameter_count(model) - moe_layers * idle * expert_parameter_count(model)


def layers_parameter_count(model: ModelConfig) -> int:
    """Number of parameters in all transformer layers of the resolved `model`."""
    moe_layers = num_moe_layers(model)
    count = (model.num_layers - moe_layers) * layer_parameter_count(model)
    if model.num_moe_experts is None:
        return count
    of_moe_layer = layer_parameter_count(model, has_experts=True) + experts_parameter_count(model)
    return count + moe_layers * of_moe_layer


def last_layer_has_experts(model: ModelConfig) -> bool:
    """True if the last layer is an MoE layer, and so every MTP layer."""
    return moe_layer_pattern(model)[-1]


def mtp_parameter_count(model: ModelConfig) -> int:
    """Number of parameters of an MTP layer: a layer like the last one, its projection and three norms."""
    has_experts = last_layer_has_experts(model)
    own = 2 * model.hidden_size * model.hidden_size + 3 * norm_parameter_count(model)
    layer = layer_parameter_count(model, has_experts=has_experts)
    experts = experts_parameter_count(model) if has_experts else 0
    return own + layer + experts


def layer_parameter_count(model: ModelConfig, *, has_experts: bool = False) -> int:
    """Number of parameters in one transformer layer of the resolved `model`, without its routed experts."""
    products = attention_of(model).projections(model)
    attention = sum(product.weights + (product.outputs if product.has_bias else 0) for product in products)
    norms = _layer_norms_parameter_count(model)
    if not has_experts:
        assert model.ffn_hidden_size
        return attention + norms + _mlp_parameter_count(model, model.ffn_hidden_size)
    shared_width = model.moe_shared_expert_intermediate_size
    shared = _mlp_parameter_count(model, shared_width) if shared_width else 0
    return attention + norms + _router_parameter_count(model) + shared


def replicated_parameter_count(model: ModelConfig, *, has_experts: bool = False) -> int:
    """Number of parameters of a layer that are replicated on all tensor-parallel ranks.

    These are norms, routers, the biases of the output projections of attention and MLP, and projections that tensor
    parallelism does not divide.
    """
    count = _layer_norms_parameter_count(model)
    products = attention_of(model).projections(model)
    count += sum(product.weights for product in products if product.divided == "none")
    count += _router_parameter_count(model) if has_experts else 0
    mlps = 0 if has_experts and model.moe_shared_expert_intermediate_size is None else 1
    return count + (model.hidden_size * (1 + mlps) if model.add_bias_linear else 0)


def experts_parameter_count(model: ModelConfig) -> int:
    """Number of parameters of all experts of a layer of the resolved `model`."""
    assert model.num_moe_experts
    return model.num_moe_experts * expert_parameter_count(model)


def expert_parameter_count(model: ModelConfig) -> int:
    """Number of parameters of one expert of the resolved `model`."""
    assert model.moe_ffn_hidden_size
    return _mlp_parameter_count(model, model.moe_ffn_hidden_size)


def _layer_norms_parameter_count(model: ModelConfig) -> int:
    widths = (*attention_of(model).norms(model).values(), model.hidden_size, model.hidden_size)
    return sum(widths) * len(_norm_parameters(model))


def _router_parameter_count(model: ModelConfig) -> int:
    assert model.num_moe_experts
    return model.num_moe_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))


def _mlp_parameter_count(model: ModelConfig, width: int) -> int:
    fc1_size = width * (2 if model.swiglu else 1)
    biases = fc1_size + model.hidden_size if model.add_bias_linear else 0
    return model.hidden_size * (fc1_size + width) + biases


def norm_parameter_count(model: ModelConfig) -> int:
    """Number of parameters of a norm of a hidden state."""
    return model.hidden_size * len(_norm_parameters(model))


def _norm_parameters(model: ModelConfig) -> tuple[str, ...]:
    return ("weight", "bias") if model.normalization == "LayerNorm" else ("weight",)


def parameter_names(model: ModelConfig, *, transformer_engine: bool = False) -> list[str]:
    """Parameter names of the resolved `model` in Megatron-Core's GPTModel, unsharded.

    Transformer Engine's layers fuse a norm with the matrix product that follows it.
    """
    norm = _norm_parameters(model)
    names = ["embedding.word_embeddings.weight"]
    if model.position_embedding_type == "learned_absolute":
        names.append("embedding.position_embeddings.weight")
    for number, has_experts in enumerate(moe_layer_pattern(model)):
        names += _layer_names(model, f"decoder.layers.{number}.", has_experts, transformer_engine)
    names += [f"decoder.final_layernorm.{name}" for name in norm]
    for number in range(model.mtp_num_layers or 0):
        mtp = f"mtp.layers.{number}."
        names += [
            f"{mtp}{module}.{name}" for module in ("enorm", "hnorm", "final_layernorm") for name in norm
        ]
        names.append(f"{mtp}eh_proj.weight")
        has_experts = last_layer_has_experts(model)
        names += _layer_names(model, f"{mtp}transformer_layer.", has_experts, transformer_engine)
    if model.untie_embeddings_and_output_weights:
        names.append("output_layer.weight")
    return names


def _layer_names(model: ModelConfig, prefix: str, has_experts: bool, transformer_engine: bool) -> list[str]:
    modules = _layer_modules(model, has_experts=has_experts, transformer_engine=transformer_engine)
    return [f"{prefix}{module}.{name}" for module, names in modules.items() for name in names]


def _layer_modules(
    model: ModelConfig, *, has_experts: bool, transformer_engine: bool
) -> dict[str, tuple[str, ...]]:
    """Modules of a transformer layer and the names of their parameters."""
    biases = ("bias",) if model.add_bias_linear else ()
    norm = _norm_parameters(model)
    modules, fused = _attention_modules(model)
    if has_experts:
        modules |= {"pre_mlp_layernorm": norm} | _expert_modules(
            model, is_grouped=transformer_engine and not model.add_bias_linear
        )
    else:
        modules |= {"mlp.linear_fc2": ("weight", *biases)}
        fused.append(("mlp.linear_fc1", "pre_mlp_layernorm", biases))
    for product, own_norm, its_biases in fused:
        if transformer_engine:
            modules[product] = ("weight", *its_biases, *(f"layer_norm_{name}" for name in norm))
        else:
            modules[product] = ("weight", *its_biases)
            modules[own_norm] = norm
    return modules


def _attention_modules(
    model: ModelConfig,
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str, tuple[str, ...]]]]:
    """Modules of attention and its norm. Also modules that Transformer Engine fuses: product, norm, biases."""
    attention, norm = attention_of(model), _norm_parameters(model)
    modules: dict[str, tuple[str, ...]] = {}
    fused: list[tuple[str, str, tuple[str, ...]]] = []
    norms = {"input_layernorm", *attention.norms(model)}
    for product in attention.projections(model):
        biases = ("bias",) if product.has_bias else ()
        if product.norm is None:
            modules[f"self_attention.{product.name}"] = ("weight", *biases)
        else:
            fused.append((f"self_attention.{product.name}", _in_layer(product.norm), biases))
            norms.discard(product.norm)
    return modules | {_in_layer(name): norm for name in sorted(norms)}, fused


def _in_layer(norm: str) -> str:
    """Name of a norm of the attention in its layer. The norm before the attention is not a part of it."""
    return norm if norm == "input_layernorm" else f"self_attention.{norm}"


def _expert_modules(model: ModelConfig, *, is_grouped: bool) -> dict[str, tuple[str, ...]]:
    """Modules of the MLP of a layer with experts. A grouped product has one weight per expert."""
    assert model.num_moe_experts
    kinds = ("weight", "bias") if model.add_bias_linear else ("weight",)
    experts = range(model.num_moe_experts)
    modules: dict[str, tuple[str, ...]] = {"mlp.router": kinds}
    for product in ("linear_fc1", "linear_fc2"):
        if model.moe_shared_expert_intermediate_size:
            modules[f"mlp.shared_experts.{product}"] = kinds
        if is_grouped:
            modules[f"mlp.experts.{product}"] = tuple(f"weight{expert}" for expert in experts)
        else:
            modules |= {f"mlp.experts.local_experts.{expert}.{product}": kinds for expert in experts}
    return modules
