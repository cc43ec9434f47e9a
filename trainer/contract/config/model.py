"""Shape of the model."""

from __future__ import annotations

from typing import Annotated, Literal

from trainer.contract.config.path import FunctionPath
from trainer.contract.config.resume import Fixed, Free
from trainer.contract.config.values import (
    Count,
    Fraction,
    LayerCount,
    NonNegativeFloat,
    PositiveFloat,
    Range,
)
from trainer.contract.record import config_section


@config_section
class RopeScaling:
    """Scaling of the rotary frequencies for sequences longer than those of pretraining. Names and meanings are those of
    Hugging Face's rope_scaling."""

    rope_type: Literal["linear", "llama3", "yarn"]
    """linear divides all frequencies by factor; llama3 (Llama 3.1) and yarn divide only the low ones."""
    factor: Annotated[float, Range(at_least=1, at_most=1e6)]
    """Ratio of the scaled to the original sequence length."""
    original_max_position_embeddings: Count | None = None
    """Maximum sequence length before scaling. Required by llama3 and yarn."""
    low_freq_factor: PositiveFloat | None = None
    """llama3: divide frequencies with fewer than this number of periods in the original length (1 in Llama 3.1).
    Required."""
    high_freq_factor: PositiveFloat | None = None
    """llama3: keep frequencies with more than this number of periods in the original length (4 in Llama 3.1).
    Frequencies in between are interpolated. Required."""
    beta_fast: PositiveFloat | None = None
    """yarn: keep frequencies with more than this number of periods in the original length. Default: 32."""
    beta_slow: PositiveFloat | None = None
    """yarn: divide frequencies with fewer than this number of periods in the original length. Default: 1."""
    truncate: bool | None = None
    """yarn: round the bounds that follow from beta_fast and beta_slow to channels. Default: true."""
    attention_factor: PositiveFloat | None = None
    """yarn: factor of the rotated queries and keys. Default: follows from factor, mscale and mscale_all_dim."""
    mscale: NonNegativeFloat | None = None
    """yarn: weight of log(factor) in the numerator of the default attention_factor. Used only with
    mscale_all_dim."""
    mscale_all_dim: NonNegativeFloat | None = None
    """yarn: weight of log(factor) in the denominator of the default attention_factor. Used only with mscale."""


@config_section
class ModelConfig:
    """Shape of the GPT model. The names are those of Megatron-Core's TransformerConfig and GPTModel arguments."""

    num_layers: Fixed[LayerCount]
    """Number of transformer layers."""
    hidden_size: Fixed[Count]
    """Width of the residual stream."""
    num_attention_heads: Fixed[Count]
    """Number of attention heads per layer."""
    seq_length: Count
    """Number of tokens in a training sample."""
    ffn_hidden_size: Fixed[Count | None] = None
    """Width of the MLP. Default: 4 x hidden_size."""
    num_query_groups: Fixed[Count | None] = None
    """Number of key/value heads for grouped-query attention. Default: num_attention_heads."""
    kv_channels: Fixed[Count | None] = None
    """Width of an attention head. Default: hidden_size / num_attention_heads, or with multi_latent_attention the width
    of its queries and keys, qk_head_dim + qk_pos_emb_head_dim."""
    multi_latent_attention: Fixed[bool] = False
    """Multi-head latent attention (MLA, as in DeepSeek-V3): keys and values are computed from one latent per token.
    Requires rope."""
    q_lora_rank: Fixed[Count | None] = None
    """MLA: width of the latent of the queries. Default: none, so queries are computed from the hidden states."""
    kv_lora_rank: Fixed[Count | None] = None
    """MLA: width of the latent of keys and values. Default: 512."""
    qk_head_dim: Fixed[Count | None] = None
    """MLA: width of the part of queries and keys that is not rotated, in each head. Default: 128."""
    qk_pos_emb_head_dim: Fixed[Count | None] = None
    """MLA: width of the rotated part of queries and keys, in each head. All heads share that of the keys.
    Default: 64."""
    v_head_dim: Fixed[Count | None] = None
    """MLA: width of the values in each head. Default: 128."""
    max_position_embeddings: Count | None = None
    """Maximum sequence length of the model. Default: seq_length."""
    position_embedding_type: Fixed[Literal["learned_absolute", "rope"]] = "learned_absolute"
    """Position embeddings: learned_absolute (GPT-3) or rope (rotary embeddings, as in Llama)."""
    rotary_base: Count = 10000
    """Base of the rotary frequencies. Used only with rope."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long sequences. Requires rope. Default: none."""
    window_size: Count | None = None
    """Sliding-window attention: each token attends to itself and to the window_size - 1 tokens before it.
    Default: all tokens before it."""
    qk_layernorm: Fixed[bool] = False
    """Normalize queries and keys in each head (with `normalization`), before the rotary embedding, as in Qwen3. With
    multi_latent_attention, normalize the latents in their place, as in DeepSeek-V3."""
    normalization: Fixed[Literal["LayerNorm", "RMSNorm"]] = "LayerNorm"
    """Normalization of every layer and of the final output."""
    layernorm_epsilon: PositiveFloat = 1e-5
    """Epsilon added to the variance in the normalization."""
    swiglu: Fixed[bool] = False
    """Use a gated MLP with SiLU (as in Llama) in place of activation_func."""
    activation_func: Literal["gelu", "gelu_tanh", "squared_relu"] | None = None
    """Activation function of the MLP without swiglu: gelu (exact), gelu_tanh (its tanh approximation, as in GPT-2) or
    squared_relu. Default: gelu_tanh."""
    add_bias_linear: Fixed[bool] = True
    """Use biases in the linear layers."""
    add_qkv_bias: Fixed[bool | None] = None
    """Use a bias in the projection to queries, keys and values, as in Qwen2. Default: add_bias_linear."""
    untie_embeddings_and_output_weights: Fixed[bool] = False
    """Use a separate output matrix; false shares the embedding matrix."""
    attention_dropout: Fraction = 0.0
    """Dropout probability after the attention softmax."""
    hidden_dropout: Fraction = 0.0
    """Dropout probability on the residual branches and the embedding."""
    init_method_std: Free[PositiveFloat | None] = None
    """Standard deviation of the initial weights. Default: sqrt(2 / (5 x hidden_size))."""
    num_moe_experts: Fixed[Count | None] = None
    """Mixture of experts (MoE): number of experts per MoE layer, over all ranks. Default: none, a dense model."""
    moe_layer_freq: Fixed[tuple[Annotated[int, Range(at_least=0, at_most=1)], ...] | None] = None
    """One number per layer: 1 for an MoE layer, 0 for a dense layer. Default: every layer is an MoE layer."""
    moe_ffn_hidden_size: Fixed[Count | None] = None
    """Width of an expert. Default: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Fixed[Count | None] = None
    """Total width of the shared experts, which process every token. Default: no shared expert."""
    moe_router_topk: Count = 2
    """Number of experts that process each token."""
    moe_router_score_function: Fixed[Literal["softmax", "sigmoid"]] = "softmax"
    """Function that turns the router's logits into scores."""
    moe_router_pre_softmax: bool = False
    """Apply the softmax to all experts before choosing moe_router_topk of them, instead of to the chosen ones."""
    moe_router_topk_scaling_factor: PositiveFloat | None = None
    """Factor by which the weights of the chosen experts are multiplied. Default: 1."""
    moe_router_num_groups: Count | None = None
    """Number of groups of experts for group-limited routing, as in DeepSeek-V3. Requires moe_router_group_topk."""
    moe_router_group_topk: Count | None = None
    """Number of groups from which the experts of a token are chosen. Requires moe_router_num_groups."""
    moe_router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "none"] = "aux_loss"
    """Loss that balances the load of the experts: over the tokens of a microbatch (aux_loss), of each sequence
    (seq_aux_loss), or none."""
    moe_aux_loss_coeff: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss. Megatron-LM recommends 1e-2."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Coefficient of the z-loss on the router's logits (ST-MoE recommends 1e-3). Default: no z-loss."""
    moe_router_enable_expert_bias: Fixed[bool] = False
    """Balance the load without a loss, as in DeepSeek-V3: a bias that follows an expert's load is added to its
    scores. Requires moe_router_score_function = sigmoid."""
    moe_router_bias_update_rate: PositiveFloat = 1e-3
    """Change of an expert's bias per step."""
    moe_expert_capacity_factor: PositiveFloat | None = None
    """Maximum number of tokens of an expert, as a multiple of its even share. Further tokens skip it. Default: no
    limit (dropless)."""
    moe_pad_expert_input_to_capacity: bool = False
    """Pad the input of each expert to its capacity, so that shapes are static. Requires
    moe_expert_capacity_factor."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Tokens to drop above the capacity: those with the lowest scores (probs), or any, regardless of scores and order
    (position)."""
    mtp_num_layers: Fixed[Count | None] = None
    """Multi-token prediction (MTP, as in DeepSeek-V3): number of additional layers, each of which predicts one token
    further ahead. They train with the model; evaluation and inference do not use them. Default: none."""
    mtp_loss_scaling_factor: NonNegativeFloat = 0.1
    """Weight of the mean MTP loss in the gradients. The logged loss is the main loss. Used only with mtp_num_layers."""
    vocab_size: Free[Count | None] = None
    """Size of the tokenizer's vocabulary. Default: taken from data.tokenizer."""
    padded_vocab_size: Fixed[Count | None] = None
    """Number of rows of the embedding. Default: vocab_size rounded up to a multiple of 128, for any layout."""
    layer_spec: FunctionPath | None = None
    """Custom transformer layers: a function that returns their spec, as `package.module:function` or
    `file.py:function`."""
    model_provider: FunctionPath | None = None
    """Custom model to use in place of Megatron-Core's GPTModel, as `package.module:class` or `file.py:class`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the vocabulary, without the rows that pad the embedding.

        All rows of the embedding if vocab_size is not known. 0 before either is known.
        """
        return self.vocab_size or self.padded_vocab_size or 0

    @property
    def num_rows(self) -> int:
        """Number of rows of the embedding. The model is resolved, and its vocabulary is known."""
        assert self.padded_vocab_size is not None
        return self.padded_vocab_size

    @property
    def yarn(self) -> RopeScaling | None:
        """rope_scaling if it is YaRN."""
        scaling = self.rope_scaling
        return scaling if scaling is not None and scaling.rope_type == "yarn" else None
