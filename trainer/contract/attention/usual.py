"""Usual attention: one projection computes the queries, keys and values of all heads, which may share keys and values.

Source: megatron/core/transformer/attention.py, SelfAttention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from trainer.contract.attention.kind import Attention, MatrixWidth, Projection
from trainer.contract.config import ModelConfig
from trainer.contract.problem import Problem


class UsualAttention(Attention):
    """Multi-head attention or attention with grouped queries."""

    def resolve(self, model: ModelConfig) -> ModelConfig:
        """`model` with the width of its heads, and the bias of linear_qkv."""
        return dataclasses.replace(
            model,
            kv_channels=model.kv_channels or max(1, model.hidden_size // model.num_attention_heads),
            add_qkv_bias=model.add_bias_linear if model.add_qkv_bias is None else model.add_qkv_bias,
        )

    def problems(self, model: ModelConfig) -> Iterator[Problem]:
        """Keys that contradict each other."""
        # Core adds the bias to linear_qkv if either of the two keys is true.
        if model.add_bias_linear and model.add_qkv_bias is False:
            reason = "contradicts add_bias_linear = true, which includes this bias"
            yield Problem(
                "model.add_qkv_bias",
                reason,
                "set add_bias_linear to false or remove add_qkv_bias",
                about=("model.add_bias_linear",),
            )

    def projections(self, model: ModelConfig) -> tuple[Projection, ...]:
        """linear_qkv and linear_proj."""
        h, heads, width = model.hidden_size, model.num_attention_heads, self.value_width(model)
        together = (heads + 2 * (model.num_query_groups or heads)) * width
        has_bias = bool(model.add_qkv_bias)
        return (
            Projection("linear_qkv", h, together, norm="input_layernorm", has_bias=has_bias),
            Projection("linear_proj", heads * width, h, has_bias=model.add_bias_linear, divided="inputs"),
        )

    def norms(self, model: ModelConfig) -> dict[str, int]:
        """Norms of the queries and of the keys, which all heads share."""
        names = ("q_layernorm", "k_layernorm") if model.qk_layernorm else ()
        return dict.fromkeys(names, self.value_width(model))

    def value_width(self, model: ModelConfig) -> int:
        """Queries, keys and values have the same width."""
        assert model.kv_channels
        return model.kv_channels

    def rotated_width(self, model: ModelConfig) -> int:
        """Rope rotates all channels of queries and keys."""
        return self.value_width(model)

    def matrix_widths(self, model: ModelConfig, tensor_parallel: int) -> Iterator[MatrixWidth]:
        """The output of all heads, and their queries, keys and values."""
        heads, groups, width = model.num_attention_heads, model.num_query_groups, self.value_width(model)
        over = f" over TP = {tensor_parallel}"
        divided = ("model.num_attention_heads", "parallelism.tensor_model_parallel_size")
        how = f" x num_attention_heads{over}"
        yield MatrixWidth("kv_channels", width * heads // tensor_parallel, how, divided)
        if groups and groups != heads:  # otherwise, three times the width above
            together = width * (heads + 2 * groups) // tensor_parallel
            how = f" x (num_attention_heads + 2 x num_query_groups){over}"
            yield MatrixWidth("kv_channels", together, how, (*divided, "model.num_query_groups"))


USUAL = UsualAttention()
