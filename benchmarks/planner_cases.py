"""Runs of our own that predictions are compared with: each gives the time of a step and the memory of a GPU.

They fit on GPUs of 80 GB, and need one to four of them. `benchmarks.planner` predicts them on a CPU.
"""

from __future__ import annotations

from benchmarks.train_cases import (
    CP2,
    DOCUMENTS,
    EP1,
    EP2,
    FP8,
    GPT_1_3B,
    GRAPHS,
    LLAMA_8_LAYERS,
    MIXTRAL_4_LAYERS,
    OVERLAP,
    PP2,
    TP2_SP,
    TP_OVERLAP,
    Case,
)

LLAMA_4_LAYERS_32K = LLAMA_8_LAYERS | {"num_layers": 4, "seq_length": 32768}
MIXTRAL_2_LAYERS = MIXTRAL_4_LAYERS | {"num_layers": 2}
LATENT_EXPERTS = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "ffn_hidden_size": 10944,
    "seq_length": 4096,
    "vocab_size": 102400,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "num_moe_experts": 64,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_ffn_hidden_size": 1408,
    "moe_shared_expert_intermediate_size": 2816,
    "moe_router_topk": 6,
    "moe_aux_loss_coeff": 0.001,
}
"""DeepSeek-V2-Lite's width, with 4 of its 27 layers."""
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TP4_SP = {"tensor_model_parallel_size": 4, "sequence_parallel": True}


def _interleaved(chunks: int) -> dict[str, int]:
    return PP2 | ({"virtual_pipeline_model_parallel_size": chunks} if chunks > 1 else {})


CASES = (
    Case("gpt-bf16", GPT_1_3B, 4, 16),
    Case("gpt-fp8", GPT_1_3B, 8, 32, training=FP8),
    Case("gpt-recompute", GPT_1_3B, 4, 16, training=RECOMPUTE),
    Case("llama-bf16", LLAMA_8_LAYERS, 2, 8),
    Case("llama-fp8", LLAMA_8_LAYERS, 1, 4, training=FP8),
    Case("llama-documents", LLAMA_8_LAYERS, 2, 8, data=DOCUMENTS),
    Case("llama-32k", LLAMA_4_LAYERS_32K, 1, 2),
    Case("mixtral", MIXTRAL_2_LAYERS, 2, 8, 1, EP1),
    Case("latent-experts", LATENT_EXPERTS, 2, 8),
    Case("llama-dp2", LLAMA_8_LAYERS, 2, 16, 2, OVERLAP),
    Case("gpt-tp2", GPT_1_3B, 4, 16, 2, TP2_SP),
    Case("gpt-tp2-graphs", GPT_1_3B, 4, 16, 2, TP2_SP, GRAPHS),
    Case("llama-tp2", LLAMA_8_LAYERS, 2, 8, 2, TP2_SP),
    Case("llama-tp4-fp8", LLAMA_8_LAYERS, 2, 8, 4, TP4_SP, FP8),
    Case("llama-tp4-fp8-tp-overlap", LLAMA_8_LAYERS, 2, 8, 4, TP4_SP | TP_OVERLAP, FP8),
    *(
        Case(f"gpt-pp2-vpp{chunks}", GPT_1_3B, 4, 32, 2, _interleaved(chunks), GRAPHS)
        for chunks in (1, 2, 4, 12)
    ),
    Case("llama-32k-cp2", LLAMA_4_LAYERS_32K, 1, 2, 2, CP2 | OVERLAP),
    Case("mixtral-ep2", MIXTRAL_4_LAYERS, 2, 16, 2, EP2 | OVERLAP),
    Case("gpt-tp2-pp2-graphs", GPT_1_3B, 4, 32, 4, TP2_SP | PP2, GRAPHS),
    Case("llama-dp4", LLAMA_8_LAYERS, 2, 32, 4, OVERLAP),
)
