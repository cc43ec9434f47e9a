"""Model presets with their published optimizer settings.

A preset is part of a run file; values in the run file override it. The GPT-3 family takes its vocabulary from the
tokenizer. Sources:
GPT-3: Brown et al., "Language models are few-shot learners", arXiv 2005.14165, table 2.1 (learning rates, 300
billion tokens); NVIDIA NeMo's recipes and Megatron-LM's 175B example (batch, initialization, layout on H100).
Llama 3: "The Llama 3 herd of models", arXiv 2407.21783, table 3 and section 3.4.1 (shapes, learning rates,
warm-up, batch of 405B); NVIDIA NeMo's recipes (the other batches, layout of 70B).
Mixtral: Jiang et al., "Mixtral of Experts", arXiv 2401.04088, table 1 (shape); Megatron-LM's
examples/mixtral/train_mixtral_8x7b_distributed.sh (optimizer, batch, length, initialization, balancing); NVIDIA NeMo's
recipe mixtral_8x7b (layout).
DeepSeek-V3: "DeepSeek-V3 technical report", arXiv 2412.19437, section 4.2 (shape, initialization, optimizer, batch,
balancing); config.json of deepseek-ai/DeepSeek-V3 (width of dense layers, epsilon, groups of experts, scaling factor,
vocabulary); NVIDIA NeMo's recipe deepseek_v3 (TP, PP and layers per stage). The preset leaves out what the report
changes on the way: a smaller batch for 469 billion tokens, a smaller MTP loss after 10 trillion, and a lower learning
rate and constant biases at the end.
"""

from __future__ import annotations

import re
import shlex
from pathlib import PurePath
from typing import Any

from hpcgen.errors import Problem
from hpcgen.text import did_you_mean
from trainer.contract.record import record

GPT3_TOKENS = 300_000_000_000
LLAMA3_TOKENS = 15_000_000_000_000
DEEPSEEK_V3_TOKENS = 14_800_000_000_000
DEEPSEEK_V3_DECAY = range(10_000_000_000_000, 14_300_000_000_000)
"""Tokens between which the learning rate decays."""
DEEPSEEK_V3_BATCH = 15_360 * 4096
"""Tokens per step."""

Section = dict[str, Any]


@record
class Preset:
    """Named sections of a run file."""

    name: str
    description: str
    """One-line description, with the actual shape if the name is misleading."""
    sections: dict[str, Section]
    eod_token: str | None = None
    """End of a document in the model's own tokenizer. None for a model that takes any tokenizer."""
    tokenizer_repository: str | None = None
    """Repository on the Hugging Face Hub with the model's own tokenizer.json."""

    def tokenizer_command(self, directory: PurePath) -> str:
        """The command that downloads the model's own tokenizer.json into `directory`."""
        words = [
            "hf",
            "download",
            str(self.tokenizer_repository),
            "tokenizer.json",
            "--local-dir",
            str(directory),
        ]
        return shlex.join(words)


def _gpt3(
    name: str,
    description: str,
    *,
    shape: tuple[int, int, int],
    seq_length: int = 2048,
    batch: tuple[int, int],
    lr: float,
    init_method_std: float | None = None,
    parallelism: Section | None = None,
) -> Preset:
    """A GPT-3 preset. `shape` is layers, hidden size, heads; `batch` is micro, global. The decay ends at `lr` / 10."""
    num_layers, hidden_size, num_attention_heads = shape
    micro_batch_size, global_batch_size = batch
    model: Section = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "seq_length": seq_length,
    }
    if init_method_std is not None:
        model["init_method_std"] = init_method_std
    training = {
        "micro_batch_size": micro_batch_size,
        "global_batch_size": global_batch_size,
        "train_iters": GPT3_TOKENS // (global_batch_size * seq_length),
    }
    sections = {
        "model": model,
        "parallelism": {**OVERLAP, **(parallelism or {})},
        "training": training,
        "optimizer": {"lr": lr},
    }
    return Preset(name, description, sections)


def _llama3(
    name: str,
    description: str,
    *,
    shape: tuple[int, int, int, int],
    global_batch_size: int,
    lr: float,
    parallelism: Section,
    recompute: Section | None = None,
) -> Preset:
    """A Llama 3 preset. `shape` is layers, hidden size, heads, MLP width. The decay ends at `lr` / 100."""
    num_layers, hidden_size, num_attention_heads, ffn_hidden_size = shape
    model = {
        "num_layers": num_layers,
        "hidden_size": hidden_size,
        "num_attention_heads": num_attention_heads,
        "ffn_hidden_size": ffn_hidden_size,
        "num_query_groups": 8,
        "seq_length": 8192,
        "position_embedding_type": "rope",
        "rotary_base": 500_000,
        "normalization": "RMSNorm",
        "layernorm_epsilon": 1e-5,
        "swiglu": True,
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "vocab_size": 128_256,
    }
    training = {
        "micro_batch_size": 1,
        "global_batch_size": global_batch_size,
        "train_iters": LLAMA3_TOKENS // (global_batch_size * 8192),
        **(recompute or {}),
    }
    sections = {
        "model": model,
        "parallelism": {**OVERLAP, **parallelism},
        "training": training,
        "optimizer": {"lr": lr, "min_lr": float(f"{lr / 100:.6g}"), "lr_warmup_iters": 8000},
    }
    return Preset(
        name,
        description,
        sections,
        eod_token="<|end_of_text|>",
        tokenizer_repository="meta-llama/Meta-Llama-3-8B",  # one tokenizer for all sizes
    )


def _layout(tensor: int, pipeline: int = 1, virtual: int | None = None) -> Section:
    """The section `parallelism` for tensor (with sequence) and pipeline parallel sizes."""
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    if virtual is not None:
        sizes["virtual_pipeline_model_parallel_size"] = virtual
    return {**sizes, "sequence_parallel": True}


OVERLAP: Section = {"overlap_grad_reduce": True, "overlap_param_gather": True}

_ALL = (
    Preset(
        "tiny",
        "a GPT for CPUs: 4 layers of width 128, trains in minutes on 2 cores",
        {
            "model": {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "seq_length": 128},
            "parallelism": {},
            "training": {
                "micro_batch_size": 4,
                "global_batch_size": 8,
                "train_iters": 80,
                "precision": "fp32",
                "eval_interval": 40,
                "eval_iters": 2,
            },
            "optimizer": {"lr": 1e-3},
        },
    ),
    Preset(
        "tiny-moe",
        "a mixture of experts for CPUs: tiny with 8 experts, of which 2 process each token",
        {
            "model": {
                "num_layers": 4,
                "hidden_size": 128,
                "num_attention_heads": 4,
                "seq_length": 128,
                "add_bias_linear": False,
                "num_moe_experts": 8,
                "moe_ffn_hidden_size": 256,
                "moe_aux_loss_coeff": 0.01,
            },
            "parallelism": {},
            "training": {
                "micro_batch_size": 4,
                "global_batch_size": 8,
                "train_iters": 80,
                "precision": "fp32",
                "eval_interval": 40,
                "eval_iters": 2,
            },
            "optimizer": {"lr": 1e-3},
        },
    ),
    _gpt3(
        "125m",
        "GPT-3 Small, with half its sequence length",
        shape=(12, 768, 12),
        seq_length=1024,
        batch=(4, 256),
        lr=6e-4,
        init_method_std=0.023,
    ),
    _gpt3(
        "375m",
        "narrower than its name suggests: 12 layers of width 512; learning rate and batch of 125m",
        shape=(12, 512, 8),
        seq_length=1024,
        batch=(4, 256),
        lr=6e-4,
    ),
    _gpt3("345m", "GPT-3 Medium", shape=(24, 1024, 16), batch=(4, 256), lr=3e-4, init_method_std=0.02),
    _gpt3(
        "857m",
        "the same model as 345m; 24 layers of width 1024 do not have 857 million parameters",
        shape=(24, 1024, 16),
        batch=(4, 256),
        lr=3e-4,
        init_method_std=0.02,
    ),
    _gpt3("1.3b", "GPT-3 XL", shape=(24, 2048, 16), batch=(4, 512), lr=2e-4, init_method_std=0.014),
    _gpt3(
        "13b",
        "GPT-3 13B, on 2 GPUs per replica",
        shape=(40, 5120, 40),
        batch=(2, 1024),
        lr=1e-4,
        init_method_std=0.0088,
        parallelism=_layout(tensor=2),
    ),
    _gpt3(
        "30b",
        "between GPT-3 13B and 175B, like its learning rate; on 32 GPUs per replica",
        shape=(48, 7168, 56),
        batch=(1, 1024),
        lr=8e-5,
        parallelism=_layout(tensor=4, pipeline=8),
    ),
    _gpt3(
        "175b",
        "GPT-3 175B, on 32 GPUs of 80 GB per replica (TP 8 x PP 16 fits smaller ones)",
        shape=(96, 12288, 96),
        batch=(1, 1536),
        lr=6e-5,
        init_method_std=0.006,
        parallelism=_layout(tensor=4, pipeline=8, virtual=6),
    ),
    _llama3(
        "llama3-8b",
        "Llama 3 8B, on 2 GPUs per replica",
        shape=(32, 4096, 32, 14336),
        global_batch_size=512,
        lr=3e-4,
        parallelism=_layout(tensor=2),
    ),
    _llama3(
        "llama3-70b",
        "Llama 3 70B, on 32 GPUs per replica",
        shape=(80, 8192, 64, 28672),
        global_batch_size=512,
        lr=1.5e-4,
        parallelism=_layout(tensor=4, pipeline=8, virtual=5),
    ),
    _llama3(
        "llama3-405b",
        "Llama 3 405B, on 112 GPUs per replica: PP 14, since 126 layers are not a multiple of Meta's 16",
        shape=(126, 16384, 128, 53248),
        global_batch_size=2048,
        lr=8e-5,
        parallelism=_layout(tensor=8, pipeline=14),
        # A third of the layers. Without recomputation, 14 microbatches in flight take 62 GiB.
        recompute={
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 3,
        },
    ),
    Preset(
        "mixtral-8x7b",
        "Mixtral 8x7B, on 32 GPUs per replica of its experts",
        {
            "model": {
                "num_layers": 32,
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "ffn_hidden_size": 14336,
                "num_query_groups": 8,
                "seq_length": 4096,
                "max_position_embeddings": 32_768,
                "position_embedding_type": "rope",
                "rotary_base": 1_000_000,
                "normalization": "RMSNorm",
                "layernorm_epsilon": 1e-5,
                "swiglu": True,
                "add_bias_linear": False,
                "untie_embeddings_and_output_weights": True,
                "init_method_std": 0.01,
                "num_moe_experts": 8,
                "moe_router_topk": 2,
                "moe_aux_loss_coeff": 0.01,
                "vocab_size": 32_000,
            },
            "parallelism": {
                **OVERLAP,
                "pipeline_model_parallel_size": 4,
                "virtual_pipeline_model_parallel_size": 8,
                "expert_model_parallel_size": 8,
            },
            "training": {"micro_batch_size": 1, "global_batch_size": 256, "train_iters": 500_000},
            "optimizer": {"lr": 1e-4, "min_lr": 1e-5, "lr_decay_iters": 320_000, "lr_warmup_iters": 500},
        },
        eod_token="</s>",
        tokenizer_repository="mistralai/Mixtral-8x7B-v0.1",
    ),
    Preset(
        "deepseek-v3",
        "DeepSeek-V3 671B with an MTP layer, on 128 GPUs per replica of its experts: 128 nodes of H100s or 16 of H200s",
        {
            "model": {
                "num_layers": 61,
                "hidden_size": 7168,
                "num_attention_heads": 128,
                "ffn_hidden_size": 18_432,
                "seq_length": 4096,
                "position_embedding_type": "rope",
                "normalization": "RMSNorm",
                "layernorm_epsilon": 1e-6,
                "swiglu": True,
                "add_bias_linear": False,
                "untie_embeddings_and_output_weights": True,
                "init_method_std": 0.006,
                "multi_latent_attention": True,
                "qk_layernorm": True,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_head_dim": 128,
                "qk_pos_emb_head_dim": 64,
                "v_head_dim": 128,
                "num_moe_experts": 256,
                "moe_layer_freq": [0] * 3 + [1] * 58,
                "moe_ffn_hidden_size": 2048,
                "moe_shared_expert_intermediate_size": 2048,
                "moe_router_topk": 8,
                "moe_router_score_function": "sigmoid",
                "moe_router_topk_scaling_factor": 2.5,
                "moe_router_num_groups": 8,
                "moe_router_group_topk": 4,
                "moe_router_enable_expert_bias": True,
                "moe_router_bias_update_rate": 1e-3,
                "moe_router_load_balancing_type": "seq_aux_loss",
                "moe_aux_loss_coeff": 1e-4,
                "mtp_num_layers": 1,
                "mtp_loss_scaling_factor": 0.3,
                "vocab_size": 129_280,
            },
            "parallelism": {
                **OVERLAP,
                **_layout(tensor=2, pipeline=16),
                "num_layers_in_first_pipeline_stage": 3,
                "num_layers_in_last_pipeline_stage": 2,
                # DeepSeek-AI used 64 with its own kernels for messages between nodes.
                "expert_model_parallel_size": 8,
                "expert_tensor_parallel_size": 1,
            },
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": 15_360,
                "train_iters": DEEPSEEK_V3_TOKENS // DEEPSEEK_V3_BATCH,
                # Half of the layers. Without recomputation, 16 microbatches in flight take 52 GiB.
                "recompute_granularity": "full",
                "recompute_method": "block",
                "recompute_num_layers": 2,
            },
            "optimizer": {
                "lr": 2.2e-4,
                "min_lr": 2.2e-5,
                "lr_warmup_iters": 2000,
                "lr_decay_style": "WSD",
                "lr_decay_iters": DEEPSEEK_V3_DECAY.stop // DEEPSEEK_V3_BATCH,
                "lr_wsd_decay_style": "cosine",
                "lr_wsd_decay_iters": len(DEEPSEEK_V3_DECAY) // DEEPSEEK_V3_BATCH,
            },
        },
        eod_token="<\uff5cend\u2581of\u2581sentence\uff5c>",
        tokenizer_repository="deepseek-ai/DeepSeek-V3",
    ),
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in _ALL}
"""Presets by name, from small to large in each family."""


def unknown_preset(name: str) -> str:
    """Hint for an unknown preset. A name with another size does not count as a misspelling."""
    size = re.sub(r"^gpt-?3-", "", name.lower())
    return (
        did_you_mean(size, PRESETS, most=3)
        or f"use one of {', '.join(PRESETS)}, or hpcgen init --from-hf for a Hugging Face model"
    )


def missing_tokenizer(preset: str | None, path: str, stage: str) -> Problem:
    """The problem of a run with `preset` whose `stage` needs the missing tokenizer.json at `path`."""
    own, place = PRESETS.get(preset or ""), PurePath(path)
    hint = "put the model's tokenizer.json there"
    if own is not None and own.tokenizer_repository and place.name == "tokenizer.json":
        hint = f"download it with: {own.tokenizer_command(place.parent)}"
    return Problem("data.tokenizer.tokenizer_file", f"does not exist. Stage {stage} needs {path}", hint)
