"""Minimal DeepSpeed training loop for a Llama of transformers: one constant batch, no data, schedule or checkpoints.

benchmarks.deepspeed compares the trainer with this loop. It runs it with the trainer's configuration, with one process
per GPU, and passes ranks and rendezvous address in the environment:

    python -m benchmarks.deepspeed_loop CONFIG.json ZERO_STAGE WARM_STEPS STEPS

Rank 0 prints the times of the timed steps (seconds), the peak memory (GiB) and the losses as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import HfDeepSpeedConfig

from trainer.metrics.record import peak_memory_gib


def main() -> None:
    """Train repeatedly on one batch."""
    config, stage, warm, steps = json.loads(Path(sys.argv[1]).read_text()), *map(int, sys.argv[2:])
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    engine = build_engine(config, stage)
    shape = (config["training"]["micro_batch_size"], config["model"]["seq_length"])
    tokens = torch.randint(config["model"]["vocab_size"], shape, device=engine.device)
    gc.collect()
    gc.disable()
    times, losses = [], []
    for index in range(warm + steps):
        accelerator.synchronize()
        start = time.perf_counter()
        for _ in range(engine.gradient_accumulation_steps()):
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            engine.backward(loss)
            engine.step()
        accelerator.synchronize()
        losses.append(float(loss))
        if index >= warm:
            times.append(time.perf_counter() - start)
    if os.environ["RANK"] == "0":
        print(json.dumps({"times": times, "peak_gib": peak_memory_gib(config["device"]), "losses": losses}))
    torch.distributed.destroy_process_group()


def build_engine(config: dict[str, Any], stage: int) -> deepspeed.DeepSpeedEngine:
    """The model in DeepSpeed's engine. Under ZeRO-3, transformers creates it partitioned."""
    torch.manual_seed(1234)
    ds_config = deepspeed_config(config, stage)
    keep = HfDeepSpeedConfig(ds_config)
    model = LlamaForCausalLM._from_config(llama_config(config["model"]), attn_implementation="sdpa")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    del keep
    engine.train()
    return engine


def llama_config(model: dict[str, Any]) -> LlamaConfig:
    """The trainer's shape in transformers' terms."""
    return LlamaConfig(
        vocab_size=model["padded_vocab_size"],
        hidden_size=model["hidden_size"],
        intermediate_size=model["ffn_hidden_size"],
        num_hidden_layers=model["num_layers"],
        num_attention_heads=model["num_attention_heads"],
        num_key_value_heads=model["num_query_groups"],
        max_position_embeddings=model["seq_length"],
        rope_theta=model["rotary_base"],
        tie_word_embeddings=False,
    )


def deepspeed_config(config: dict[str, Any], stage: int) -> dict[str, Any]:
    """DeepSpeed's configuration: its defaults with overlapped communication, and torch's fused AdamW.

    torch's kernel needs no compiler, unlike DeepSpeed's own FusedAdam, and does the same work in one launch.
    """
    training, is_gpu = config["training"], config["device"] == "cuda"
    return {
        "train_micro_batch_size_per_gpu": training["micro_batch_size"],
        "train_batch_size": training["global_batch_size"],
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "overlap_comm": is_gpu, "contiguous_gradients": True},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-4,
                "betas": [0.9, 0.95],
                "weight_decay": 0.1,
                "torch_adam": True,
                "fused": is_gpu,
            },
        },
        "steps_per_print": 1_000_000,
    }


if __name__ == "__main__":
    main()
