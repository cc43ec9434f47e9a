"""Random runs of dense models, experts, latent attention and MTP layers, on 1 to 2,048 nodes of several types."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from hpcgen.config.loader import Run
from tests.runs import loaded, write_yaml

NODE_TYPES = ("a100-sxm", "h100-sxm", "h200-sxm", "gb200-nvl72")
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}


def random_run(directory: Path, source: random.Random) -> Run:
    """A run that trains a random model, loaded from a run file in `directory`."""
    kind = source.choice((gpt, llama, mixture, latent))
    cluster = {"node_type": source.choice(NODE_TYPES)}
    write_yaml(directory / "cluster.yaml", cluster)
    nodes = source.choice((1, 1, 1, 3)) * 2 ** source.randint(0, 11)
    return loaded(
        directory,
        {
            "name": "random",
            "cluster": str(directory / "cluster.yaml"),
            "paths": {"run_dir": str(directory / "run")},
            "slurm": {"train": {"nodes": min(nodes, 2048), "time": "1-00:00:00"}},
            "model": kind(source),
            "training": {
                "micro_batch_size": 1,
                "global_batch_size": source.choice((1, 3)) * 2 ** source.randint(6, 12),
                "train_iters": 1000,
            },
            "optimizer": {"lr": 1e-4},
            "data": {"mock": True},
        },
    )


def gpt(source: random.Random) -> dict[str, Any]:
    """GPT with biases."""
    return _shape(source)


def llama(source: random.Random) -> dict[str, Any]:
    """Llama with grouped queries."""
    shape = _shape(source)
    groups = source.choice([size for size in (2, 4, 8, 16) if shape["num_attention_heads"] % size == 0])
    hidden = shape["hidden_size"]
    return shape | LLAMA | {"num_query_groups": groups, "ffn_hidden_size": hidden * 7 // 2 // 256 * 256}


def mixture(source: random.Random) -> dict[str, Any]:
    """Llama with experts in all layers, or in all but the first ones."""
    shape, experts = llama(source), source.choice((8, 16, 64))
    dense = source.choice((0, 0, 1))
    pattern = [0] * dense + [1] * (shape["num_layers"] - dense)
    return shape | {
        "num_moe_experts": experts,
        "moe_ffn_hidden_size": source.choice((1408, 2048, 4096)),
        "moe_router_topk": source.choice((2, 4)),
        "moe_aux_loss_coeff": 0.01,
        "moe_shared_expert_intermediate_size": source.choice((None, 2048)),
        **({"moe_layer_freq": pattern} if dense else {}),
    }


def latent(source: random.Random) -> dict[str, Any]:
    """Experts with latent attention, with or without an MTP layer."""
    return mixture(source) | {
        "multi_latent_attention": True,
        "num_query_groups": None,
        "q_lora_rank": source.choice((None, 1536)),
        "qk_layernorm": True,
        "mtp_num_layers": source.choice((None, 1)),
    }


def _shape(source: random.Random) -> dict[str, Any]:
    heads = source.choice((16, 20, 24, 32, 40, 64, 96))
    return {
        "num_layers": source.choice((12, 16, 22, 24, 32, 48, 61, 80, 96)),
        "hidden_size": heads * source.choice((64, 128)),
        "num_attention_heads": heads,
        "seq_length": source.choice((2048, 4096, 8192, 32768)),
        "vocab_size": source.choice((32000, 50257, 128256)),
    }
