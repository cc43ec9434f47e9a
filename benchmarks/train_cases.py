"""The cases of benchmarks.train: model shapes, layouts and batch sizes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

GPT_1_3B = {
    "num_layers": 24,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "seq_length": 2048,
    "vocab_size": 50257,
    "init_method_std": 0.014,
}
LLAMA_8_LAYERS = {
    "num_layers": 8,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 8192,
    "vocab_size": 128256,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "untie_embeddings_and_output_weights": True,
}
MIXTRAL_4_LAYERS = {
    "num_layers": 4,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "seq_length": 4096,
    "vocab_size": 50257,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 1000000,
    "untie_embeddings_and_output_weights": True,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.01,
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
TP_OVERLAP = {"tp_comm_overlap": True}
PP2 = {"pipeline_model_parallel_size": 2}
VPP4 = {"virtual_pipeline_model_parallel_size": 4}
CP2, CP4 = {"context_parallel_size": 2}, {"context_parallel_size": 4}
EP1, EP2, EP4 = ({"expert_model_parallel_size": size} for size in (1, 2, 4))
GRAPHS = {"cuda_graph_impl": "transformer_engine"}
EOD = 50256
DOCUMENTS = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True, "eod_id": EOD}


@dataclass(frozen=True)
class Case:
    """A shape, a layout and a batch."""

    name: str
    model: dict[str, Any]
    micro_batch_size: int
    global_batch_size: int
    gpus: int = 1
    parallelism: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    checkpoint: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    goal_tflops: float | None = None
    """Target of the project on an H200 (TFLOP/s per GPU)."""
    has_peers: bool = True
    """True if the bare loop and Megatron-LM support this case."""
    single: str | None = None
    """Case with the same microbatch on one GPU. Its throughput is the maximum for each GPU."""


FP8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
CASES = (
    Case("gpt-1.3b-mbs4", GPT_1_3B, 4, 16),
    Case("gpt-1.3b-mbs8", GPT_1_3B, 8, 32, goal_tflops=535),
    Case("gpt-1.3b-mbs8-fp8", GPT_1_3B, 8, 32, training=FP8),
    Case("gpt-1.3b-mbs4-torch", GPT_1_3B, 4, 16, training={"transformer_impl": "torch"}, has_peers=False),
    Case("llama-8l-mbs2", LLAMA_8_LAYERS, 2, 8, goal_tflops=570),
    Case("llama-8l-mbs2-fp8", LLAMA_8_LAYERS, 2, 8, training=FP8),
    Case("llama-8l-mbs2-fp8-delayed", LLAMA_8_LAYERS, 2, 8, training=FP8 | {"fp8_recipe": "delayed"}),
    Case("gpt-1.3b-dp2", GPT_1_3B, 4, 32, 2, OVERLAP, single="gpt-1.3b-mbs4"),
    Case("gpt-1.3b-dp2-mbs1", GPT_1_3B, 1, 8, 2, OVERLAP),
    Case("gpt-1.3b-tp2", GPT_1_3B, 4, 16, 2, TP2_SP, single="gpt-1.3b-mbs4"),
    Case("gpt-1.3b-pp2", GPT_1_3B, 4, 32, 2, PP2, single="gpt-1.3b-mbs4"),
    Case("gpt-1.3b-pp2-vpp4", GPT_1_3B, 4, 32, 2, PP2 | VPP4, has_peers=False, single="gpt-1.3b-mbs4"),
    *(
        Case(name, GPT_1_3B, 4, batch, gpus, layout, GRAPHS, has_peers=False, single="gpt-1.3b-mbs4")
        for name, batch, gpus, layout in (
            ("gpt-1.3b-mbs4-graphs", 16, 1, {}),
            ("gpt-1.3b-dp2-graphs", 32, 2, OVERLAP),
            ("gpt-1.3b-tp2-graphs", 16, 2, TP2_SP),
            ("gpt-1.3b-pp2-vpp4-graphs", 32, 2, PP2 | VPP4),
            ("gpt-1.3b-dp4-graphs", 64, 4, OVERLAP),
            ("gpt-1.3b-tp2-pp2-graphs", 32, 4, TP2_SP | PP2),
            ("gpt-1.3b-tp2-pp2-vpp4-graphs", 32, 4, TP2_SP | PP2 | VPP4),
        )
    ),
    Case("llama-8l-tp2", LLAMA_8_LAYERS, 2, 8, 2, TP2_SP, single="llama-8l-mbs2"),
    Case(
        "llama-8l-tp2-tp-overlap",
        LLAMA_8_LAYERS,
        2,
        8,
        2,
        TP2_SP | TP_OVERLAP,
        has_peers=False,
        single="llama-8l-mbs2",
    ),
    Case("gpt-1.3b-dp4", GPT_1_3B, 4, 64, 4, OVERLAP, single="gpt-1.3b-mbs4"),
    Case("gpt-1.3b-tp2-pp2", GPT_1_3B, 4, 32, 4, TP2_SP | PP2, single="gpt-1.3b-mbs4"),
    Case(
        "gpt-1.3b-tp2-pp2-vpp4-tp-overlap",
        GPT_1_3B,
        4,
        32,
        4,
        TP2_SP | PP2 | VPP4 | TP_OVERLAP,
        has_peers=False,
        single="gpt-1.3b-mbs4",
    ),
    Case("llama-8l-tp2-dp2", LLAMA_8_LAYERS, 1, 8, 4, TP2_SP | OVERLAP, single="llama-8l-mbs2"),
    Case(
        "llama-8l-tp2-dp2-tp-overlap",
        LLAMA_8_LAYERS,
        1,
        8,
        4,
        TP2_SP | OVERLAP | TP_OVERLAP,
        has_peers=False,
        single="llama-8l-mbs2",
    ),
    Case("llama-8l-32k", LLAMA_8_LAYERS | {"seq_length": 32768}, 1, 2, has_peers=False),
    Case("llama-8l-32k-cp2", LLAMA_8_LAYERS | {"seq_length": 32768}, 1, 2, 2, CP2 | OVERLAP, has_peers=False),
    Case("llama-8l-32k-cp4", LLAMA_8_LAYERS | {"seq_length": 32768}, 1, 2, 4, CP4 | OVERLAP, has_peers=False),
    Case("mixtral-3l", MIXTRAL_4_LAYERS | {"num_layers": 3}, 2, 8, 1, EP1),
    Case("mixtral-4l-ep2", MIXTRAL_4_LAYERS, 2, 16, 2, EP2 | OVERLAP),
    Case("mixtral-4l-ep4", MIXTRAL_4_LAYERS, 2, 32, 4, EP4 | OVERLAP),
    Case(
        "gpt-1.3b-mbs8-save",
        GPT_1_3B,
        8,
        32,
        checkpoint={"save_interval": 30, "keep_last": 1},
        has_peers=False,
    ),
)
