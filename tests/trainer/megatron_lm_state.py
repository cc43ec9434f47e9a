"""The common state of a checkpoint that Megatron-LM's pretrain_gpt.py wrote."""

from __future__ import annotations

import argparse
from typing import Any

from tests.trainer.runs import GPT

SAVED_AT = 3

EXACT = GPT | {"activation_func": "gelu"}
"""The model of pretrain_gpt.py with --no-bias-gelu-fusion, which it needs on a CPU."""

ARGS: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 256,
    "kv_channels": 16,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000,
    "rotary_percent": 1.0,
    "normalization": "LayerNorm",
    "layernorm_epsilon": 1e-05,
    "layernorm_zero_centered_gamma": False,
    "swiglu": False,
    "bias_gelu_fusion": False,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "untie_embeddings_and_output_weights": False,
    "padded_vocab_size": 1024,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "num_query_groups": 4,
    "group_query_attention": False,
    "softmax_type": "vanilla",
    "num_experts": None,
    "mtp_num_layers": None,
    "optimizer": "adam",
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-08,
    "clip_grad": 1.0,
    "loss_scale": None,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "lr_warmup_init": 0.0,
    "lr_wsd_decay_iters": None,
    "lr_wsd_decay_samples": None,
    "lr_wsd_decay_style": "exponential",
    "weight_decay_incr_style": "constant",
    "fp8": None,
    "fp8_recipe": "delayed",
    "fp8_amax_history_len": 1,
    "fp8_amax_compute_algo": "most_recent",
    "bf16": False,
    "fp16": False,
    "seed": 1234,
    "split": "8,1,1",
    "train_data_path": None,
    "rampup_batch_size": None,
    "dataloader_type": "single",
    "eod_mask_loss": False,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    "consumed_train_samples": 12,
    "use_distributed_optimizer": True,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
}
"""Some of the 680 arguments in a checkpoint that pretrain_gpt.py 0.16.1 saved at step 3 with the same model."""

SCHEDULE: dict[str, Any] = {
    "max_lr": 1e-2,
    "lr_warmup_steps": 4,
    "num_steps": 12,
    "lr_decay_style": "cosine",
    "lr_decay_steps": 24,
    "min_lr": 1e-3,
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_style": "constant",
    "wd_incr_steps": 24,
}
"""Beside them: `OptimizerParamScheduler.state_dict`, in samples."""

CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": False,
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}


def common_state(corpus: str = "/corpus", **args: Any) -> dict[str, Any]:
    """The common state of a checkpoint of Megatron-LM."""
    return {
        "args": argparse.Namespace(**ARGS | {"data_path": [corpus]} | args),
        "checkpoint_version": 3.0,
        "iteration": SAVED_AT,
        "optimizer": {"optimizer": {"param_groups": []}},
        "opt_param_scheduler": SCHEDULE,
        "num_floating_point_operations_so_far": 1.0,
        "content_metadata": CONTENT,
    }
