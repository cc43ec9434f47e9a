"""Names that other programs have for keys, and names of features that hpcgen lacks.

A hint names only what does what was asked. A name that can mean several things needs its section to be answered.
"""

from __future__ import annotations

import functools
from pathlib import Path

TP = "parallelism.tensor_model_parallel_size"
PP = "parallelism.pipeline_model_parallel_size"
VPP = "parallelism.virtual_pipeline_model_parallel_size"
CP = "parallelism.context_parallel_size"
EP = "parallelism.expert_model_parallel_size"
ETP = "parallelism.expert_tensor_parallel_size"
NODES = "slurm.train.nodes"

KEYS = {
    # Hugging Face: config.json
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "layers"), "model.num_layers"),
    **dict.fromkeys(("n_embd", "dim", "d_model", "hidden_dim", "embed_dim"), "model.hidden_size"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads"), "model.num_attention_heads"),
    **dict.fromkeys(
        ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_heads"), "model.num_query_groups"
    ),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "inter_dim"), "model.ffn_hidden_size"),
    **dict.fromkeys(("head_dim", "d_head"), "model.kv_channels"),
    **dict.fromkeys(("n_positions", "n_ctx"), "model.max_position_embeddings"),
    **dict.fromkeys(
        ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_eps"), "model.layernorm_epsilon"
    ),
    **dict.fromkeys(("rope_theta", "rope_base"), "model.rotary_base"),
    "qk_nope_head_dim": "model.qk_head_dim",
    "qk_rope_head_dim": "model.qk_pos_emb_head_dim",
    **dict.fromkeys(
        ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_depth"), "model.mtp_num_layers"
    ),
    **dict.fromkeys(("mtp_loss_weight", "mtp_loss_coeff"), "model.mtp_loss_scaling_factor"),
    **dict.fromkeys(("sliding_window", "use_sliding_window", "attention_window"), "model.window_size"),
    "eos_token_id": "data.eod_id",
    **dict.fromkeys(("hidden_act", "activation_function"), "model.activation_func, or model.swiglu for SiLU"),
    "attention_bias": "model.add_qkv_bias",
    **dict.fromkeys(("attn_pdrop",), "model.attention_dropout"),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop"), "model.hidden_dropout"),
    "initializer_range": "model.init_method_std",
    **dict.fromkeys(
        (
            "tie_word_embeddings",
            "tie_embeddings",
            "tied_embeddings",
            "tie_weights",
            "weight_tying",
            "share_embeddings",
        ),
        "model.untie_embeddings_and_output_weights, with the opposite value",
    ),
    **dict.fromkeys(("use_qk_norm", "qk_norm", "qk_layer_norm", "use_qk_layernorm"), "model.qk_layernorm"),
    **dict.fromkeys(
        (
            *("rope_scaling_factor", "use_rope_scaling", "rotary_seq_len_interpolation_factor"),
            *("rope_type", "rotary_scaling_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow"),
            *("rope_factor", "original_seq_len"),
        ),
        "model.rope_scaling",
    ),
    "rope_parameters": "model.rope_scaling, and model.rotary_base for rope_theta",
    # Mixtures of experts: Hugging Face, torchtitan, DeepSeek and Megatron-LM
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), "model.num_moe_experts"),
    **dict.fromkeys(
        (
            *("num_experts_per_tok", "num_experts_per_token", "n_activated_experts"),
            *("moe_topk", "router_topk", "topk", "top_k"),
        ),
        "model.moe_router_topk",
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "moe_inter_dim", "expert_intermediate_size"), "model.moe_ffn_hidden_size"
    ),
    "shared_expert_intermediate_size": "model.moe_shared_expert_intermediate_size",
    **dict.fromkeys(
        ("n_shared_experts", "num_shared_experts"),
        "model.moe_shared_expert_intermediate_size, which is the number x the width of the shared experts",
    ),
    **dict.fromkeys(
        ("first_k_dense_replace", "n_dense_layers", "decoder_sparse_step", "mlp_only_layers"),
        "model.moe_layer_freq, which has a number for each layer",
    ),
    **dict.fromkeys(("scoring_func", "score_func"), "model.moe_router_score_function"),
    **dict.fromkeys(
        ("norm_topk_prob", "route_norm"), "model.moe_router_pre_softmax, with the opposite value"
    ),
    "seq_aux": "model.moe_router_load_balancing_type, with the value seq_aux_loss",
    **dict.fromkeys(("routed_scaling_factor", "route_scale"), "model.moe_router_topk_scaling_factor"),
    **dict.fromkeys(("n_group", "n_expert_groups"), "model.moe_router_num_groups"),
    **dict.fromkeys(
        ("topk_group", "n_limited_groups", "moe_router_topk_limited_devices"), "model.moe_router_group_topk"
    ),
    **dict.fromkeys(("router_aux_loss_coef", "aux_loss_alpha"), "model.moe_aux_loss_coeff"),
    "router_z_loss_coef": "model.moe_z_loss_coeff",
    "topk_method": "model.moe_router_enable_expert_bias for noaux_tc",
    **dict.fromkeys(("use_expert_bias", "aux_loss_free"), "model.moe_router_enable_expert_bias"),
    "load_balance_coeff": "model.moe_router_bias_update_rate",
    **dict.fromkeys(
        ("capacity_factor", "expert_capacity_factor", "drop_tokens"), "model.moe_expert_capacity_factor"
    ),
    "moe_layer_recompute": "training.recompute_modules, with the module moe",
    "use_grouped_mm": "parallelism.moe_grouped_gemm",
    # Hugging Face: TrainingArguments
    "learning_rate": "optimizer.lr",
    "lr_scheduler_type": "optimizer.lr_decay_style",
    "warmup_steps": "optimizer.lr_warmup_iters",
    **dict.fromkeys(("warmup_ratio", "warmup"), "optimizer.lr_warmup_fraction"),
    "betas": "optimizer.adam_beta1 and optimizer.adam_beta2",
    "epsilon": "optimizer.adam_eps",
    **dict.fromkeys(
        (
            *("freeze", "freeze_layers", "frozen", "freeze_embeddings", "freeze_backbone", "trainable"),
            *("requires_grad", "unfreeze", "train_only"),
        ),
        "optimizer.parameter_groups with lr_mult: 0 and wd_mult: 0 for the weights that must not change",
    ),
    **dict.fromkeys(
        ("weight_decay_exclude", "no_weight_decay", "no_decay"),
        "optimizer.parameter_groups with wd_mult: 0; biases and normalization weights have no weight decay anyway",
    ),
    **dict.fromkeys(("max_grad_norm", "max_norm", "grad_clip", "gradient_clipping"), "optimizer.clip_grad"),
    **dict.fromkeys(("adam_epsilon", "eps"), "optimizer.adam_eps"),
    "beta1": "optimizer.adam_beta1",
    "beta2": "optimizer.adam_beta2",
    **dict.fromkeys(
        ("max_steps", "steps", "num_steps", "train_steps", "total_steps", "max_iters", "iterations"),
        "training.train_iters",
    ),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "max_epochs", "n_epochs"),
        "training.train_iters, which is the number of steps",
    ),
    **dict.fromkeys(
        ("per_device_train_batch_size", "local_batch_size", "train_micro_batch_size_per_gpu", "batch_size"),
        "training.micro_batch_size",
    ),
    **dict.fromkeys(
        (
            *(
                "gradient_accumulation_steps",
                "gradient_accumulation",
                "grad_accum",
                "accumulate_grad_batches",
            ),
            *("accumulation_steps", "train_batch_size"),
        ),
        "training.global_batch_size, which is micro_batch_size x accumulation steps x data-parallel size",
    ),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "training.recompute_granularity"),
    **dict.fromkeys(("torch_dtype", "dtype", "mixed_precision", "bf16", "fp16", "amp"), "training.precision"),
    **dict.fromkeys(
        (
            "eval_steps",
            "eval_every",
            "eval_freq",
            "eval_frequency",
            "val_interval",
            "val_check_interval",
            "val_freq",
        ),
        "training.eval_interval",
    ),
    **dict.fromkeys(
        (
            "save_steps",
            "save_every",
            "save_freq",
            "save_frequency",
            "checkpoint_interval",
            "checkpoint_every",
        ),
        "checkpoint.save_interval",
    ),
    **dict.fromkeys(("save_total_limit", "max_checkpoints", "keep_checkpoints"), "checkpoint.keep_last"),
    **dict.fromkeys(("output_dir", "log_dir", "logdir", "work_dir", "save_dir", "out_dir"), "paths.run_dir"),
    **dict.fromkeys(
        (
            "logging_steps",
            "log_every",
            "log_freq",
            "log_frequency",
            "log_steps",
            "print_freq",
            "log_every_n_steps",
        ),
        "logging.log_interval",
    ),
    "dataloader_num_workers": "data.num_workers",
    # torchtitan
    "dump_folder": "paths.run_dir",
    "flavor": "preset",
    **dict.fromkeys(
        ("seq_len", "max_seq_len", "max_length", "sequence_length", "context_length"), "model.seq_length"
    ),
    **dict.fromkeys(("decay_type",), "optimizer.lr_decay_style"),
    **dict.fromkeys(("lr_min", "min_lr_factor"), "optimizer.min_lr"),
    "keep_latest_k": "checkpoint.keep_last",
    **dict.fromkeys(
        ("packing", "sample_packing"),
        "data.reset_attention_mask to separate the documents of a sample, because samples are always packed",
    ),
    "attn_mask_type": "data.reset_attention_mask for block_causal",
    **dict.fromkeys(
        (
            *("document_mask", "document_masking", "intra_document_masking", "inter_document_masking"),
            "dataloader_inter_document_masking",
        ),
        "data.reset_attention_mask",
    ),
    "context_parallel_rotate_method": "parallelism.cp_comm_type",
    "async_mode": "checkpoint.async_save",
    "activation_checkpoint": "training.recompute_granularity",
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_degree", "data_parallel_replicate_degree", "dp", "dp_size"),
        f"{NODES}, from which the data-parallel size follows",
    ),
    # data and names
    **dict.fromkeys(("run_name", "experiment", "experiment_name", "exp_name", "job_name"), "name"),
    **dict.fromkeys(("wandb", "use_wandb"), "logging.wandb_project"),
    **dict.fromkeys(("validation_data", "val_data", "eval_data"), "data.valid"),
    **dict.fromkeys(("train_data", "training_data"), "data.train"),
    **dict.fromkeys(
        ("mixture", "data_mix", "data_weights", "dataset_weights", "sampling_weights"),
        "data.datasets, which has a weight for each prefix",
    ),
    "curriculum": "data.datasets with other weights at a resume (docs/resuming.md#change-the-mixture)",
    **dict.fromkeys(
        ("text_key", "text_field", "text_column", "json_keys", "content_key"), "data.corpus.json_key"
    ),
    **dict.fromkeys(("env", "env_vars", "environment_variables"), "environment"),
    **dict.fromkeys(("container_image", "docker_image", "image_path"), "container.image"),
    **dict.fromkeys(
        ("notify", "email", "mail", "mail_user", "mail_type"),
        "slurm.train.extra_directives with --mail-user and --mail-type",
    ),
    **dict.fromkeys(("profiler", "profiling", "profile", "nsys"), "logging.profile_step_start"),
    **dict.fromkeys(
        ("gpus", "num_gpus", "n_gpus", "ngpus", "devices", "gres"),
        f"{NODES}, the number of nodes with all their GPUs",
    ),
    **dict.fromkeys(
        ("attn_implementation", "flash_attention", "use_flash_attention", "attn_impl"),
        "training.transformer_impl, which determines the attention kernels",
    ),
    # sizes of the layout
    **dict.fromkeys(
        ("tp", "tp_size", "tensor_parallel_size", "tensor_parallel_degree", "model_parallel_size"), TP
    ),
    **dict.fromkeys(("pp", "pp_size", "pipeline_parallel_size", "pipeline_parallel_degree"), PP),
    **dict.fromkeys(
        ("vpp", "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank"), VPP
    ),
    **dict.fromkeys(("cp", "cp_size", "context_parallel_degree"), CP),
    **dict.fromkeys(
        ("sequence_parallel_size", "ulysses_degree", "ulysses_sequence_parallel_size"),
        f"{CP}, with cp_comm_type: a2a",
    ),
    **dict.fromkeys(
        ("ep", "ep_size", "expert_parallel", "expert_parallel_size", "expert_parallel_degree"), EP
    ),
    **dict.fromkeys(
        ("etp", "etp_size", "expert_tensor_parallel", "expert_tensor_parallel_degree", "moe_extended_tp"), ETP
    ),
    "enable_async_tensor_parallel": "parallelism.tp_comm_overlap",
    "pipeline_parallel_first_stage_less_layers": "parallelism.num_layers_in_first_pipeline_stage",
    "pipeline_parallel_last_stage_less_layers": "parallelism.num_layers_in_last_pipeline_stage",
    **dict.fromkeys(
        ("pipeline_layout", "pp_layout", "module_fqns_per_model_part"),
        "parallelism.pipeline_model_parallel_layout",
    ),
    **dict.fromkeys(
        ("pipeline_parallel_schedule", "pipeline_parallel_layers_per_stage"),
        f"{VPP}, the number of interleaved parts of a stage",
    ),
    "pipeline_parallel_microbatch_size": "training.micro_batch_size",
    **dict.fromkeys(
        ("hsdp", "hybrid_shard"),
        "parallelism.num_distributed_optimizer_instances, the number of complete copies of the optimizer state",
    ),
    **dict.fromkeys(("world_size", "num_nodes", "nnodes"), NODES),
    **dict.fromkeys(("gpus_per_node", "nproc_per_node"), "slurm.train.ntasks_per_node"),
    # Megatron-LM
    "decoder_first_pipeline_num_layers": "parallelism.num_layers_in_first_pipeline_stage",
    "decoder_last_pipeline_num_layers": "parallelism.num_layers_in_last_pipeline_stage",
    "gated_linear_unit": "model.swiglu",
    "squared_relu": "model.activation_func",
    "group_query_attention": "model.num_query_groups",
    **dict.fromkeys(
        ("use_rotary_position_embeddings", "no_position_embedding"), "model.position_embedding_type"
    ),
    "disable_bias_linear": "model.add_bias_linear, with the opposite value",
    "make_vocab_size_divisible_by": "model.padded_vocab_size",
    "spec": "model.layer_spec",
    "train_samples": "training.train_iters, which is the number of samples divided by global_batch_size",
    **dict.fromkeys(
        ("train_tokens", "max_tokens", "num_tokens"),
        "training.train_iters, which is the number of tokens divided by global_batch_size x seq_length",
    ),
    **dict.fromkeys(("lr_decay_samples", "lr_decay_steps"), "optimizer.lr_decay_iters"),
    **dict.fromkeys(("lr_warmup_samples", "lr_warmup_steps"), "optimizer.lr_warmup_iters"),
    **dict.fromkeys(("lr_wsd_decay_samples", "wsd_decay_steps"), "optimizer.lr_wsd_decay_iters"),
    **dict.fromkeys(("recompute_activations", "checkpoint_activations"), "training.recompute_granularity"),
    **dict.fromkeys(("data_path", "data_prefix"), "data.datasets"),
    "train_data_path": "data.train",
    "valid_data_path": "data.valid",
    "test_data_path": "data.test",
    "data_cache_path": "data.cache_dir",
    "mock_data": "data.mock",
    **dict.fromkeys(
        ("tokenizer_type", "tokenizer_model", "tokenizer_name", "tokenizer_path", "tokenizer_name_or_path"),
        "data.tokenizer",
    ),
    **dict.fromkeys(("merge_file", "merges_file"), "data.tokenizer.merges_file"),
    **dict.fromkeys(("save_retain_interval",), "checkpoint.keep_every"),
    "most_recent_k": "checkpoint.keep_last",
    "ckpt_step": "checkpoint.load, with the path of the iter_... directory",
    "pretrained_checkpoint": "checkpoint.load, with checkpoint.finetune: true",
    "exit_duration_in_mins": f"{NODES.replace('nodes', 'time')}; the trainer saves and stops before it",
    "tensorboard_dir": "logging.tensorboard",
    "cuda_graph_scope": "training.cuda_graph_impl",
    "enable_cuda_graph": "training.cuda_graph_impl",
    # offload of activations: Megatron-Core, torchtune and TRL
    **dict.fromkeys(
        (
            *("cpu_offloading", "cpu_offloading_activations", "cpu_offloading_double_buffering"),
            *(
                "cpu_offloading_num_layers",
                "cpu_offloading_retain_pinned_cpu_buffers",
                "cpu_offloading_weights",
            ),
            *("fine_grained_activation_offloading", "fine_grained_offloading_max_inflight_offloads"),
            *("offload_modules", "min_offloaded_tensor_size", "activation_offload_fraction"),
            *("delta_offload_bytes_across_pp_ranks", "delay_offload_until_cuda_graph"),
            *("activation_offloading", "enable_activation_offloading"),
        ),
        "training.recompute_modules or a larger context_parallel_size, because the trainer does not offload "
        "activations to host memory (docs/long-context.md#offloading-activations)",
    ),
}
"""Another program's name -> the key to use, with a remark if the value differs."""

VALUES = {
    **dict.fromkeys(("gpu", "gpus", "nvidia"), "cuda"),
    **dict.fromkeys(("flex", "deepep", "hybridep"), "alltoall, which computes the same"),
    **dict.fromkeys(
        ("aux_loss_free", "noaux_tc"),
        "none, and set moe_router_enable_expert_bias to true to balance without a loss",
    ),
}
"""Another program's value of a key with choices -> the choice to use, with a remark after a comma."""

ALWAYS = frozenset((
    "use_distributed_optimizer", "use_mcore_models", "exit_signal_handler", "log_throughput", "use_dist_ckpt",
    "shuffle",
    "accumulate_allreduce_grads_in_fp32", "grad_reduce_in_fp32", "auto_detect_ckpt_format",
    "ckpt_fully_parallel_save", "ckpt_fully_parallel_load", "cross_entropy_loss_fusion", "decoupled_weight_decay",
    "moe_permute_fusion",
))  # fmt: skip
"""Names of what the trainer always does."""

UNREAD = frozenset((
    "architectures", "auto_map", "bos_token_id", "model_type", "output_router_logits", "pad_token_id", "pretraining_tp",
    "transformers_version", "use_cache",
))  # fmt: skip
"""Names in config.json that make no difference to the training of a model."""

FEATURES = {
    **dict.fromkeys(("router_jitter_noise", "noisy_gate_policy"), "noise in the router"),
    "moe_router_dtype": "routers in any type but fp32",
    **dict.fromkeys(("max_window_layers", "layer_types"), "windows in a part of the layers"),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), "rotary embeddings of a part of the channels"),
    **dict.fromkeys(("index_topk", "index_n_heads", "index_head_dim"), "sparse attention"),
    **dict.fromkeys(("quantization_config", "load_in_4bit", "load_in_8bit"), "quantized weights"),
    **dict.fromkeys(("offload_optimizer", "offload_param"), "weights or optimizer state in host memory"),
    **dict.fromkeys(
        ("zero_stage", "zero_optimization", "zero"),
        "DeepSpeed's ZeRO-2 and ZeRO-3. It always shards the optimizer state (ZeRO-1)",
    ),
    "mamba_": "Mamba layers",
    **dict.fromkeys(
        (
            *("fsdp", "fsdp_", "fsdp2", "use_fsdp", "use_fsdp2", "use_torch_fsdp2", "use_megatron_fsdp"),
            *("fully_shard", "data_parallel_shard_degree", "data_parallel_sharding_strategy"),
        ),
        "sharded parameters (FSDP), only a sharded optimizer",
    ),
    "muon_": "the optimizer Muon",
    **dict.fromkeys(("deepep", "use_deepep", "enable_deepep"), "the DeepEP dispatcher"),
    **dict.fromkeys(
        (
            *("muon", "lion", "adafactor", "shampoo", "soap", "sophia", "sgd", "lamb", "momentum"),
            *("optimizer_name", "optimizer_type", "optimizer_kind", "optim", "optimizer"),
        ),
        "optimizers other than AdamW",
    ),
    **dict.fromkeys(
        ("distillation", "distill", "distillation_", "teacher", "teacher_", "student", "kd_"), "distillation"
    ),
    **dict.fromkeys(("early_stopping", "early_stopping_", "patience", "early_stop"), "early stopping"),
    **dict.fromkeys(("ema", "ema_", "use_ema", "swa", "model_ema"), "averages of the weights"),
    **dict.fromkeys(
        ("z_loss", "z_loss_", "zloss", "lm_head_z_loss"),
        "a z-loss on the logits, only on routers (model.moe_z_loss_coeff)",
    ),
    **dict.fromkeys(("mup", "mup_", "use_mup"), "µP"),
    **dict.fromkeys(("label_smoothing", "label_smoothing_factor"), "label smoothing"),
    **dict.fromkeys(("callbacks", "callback"), "callbacks"),
    **dict.fromkeys(("compile", "torch_compile", "use_torch_compile"), "torch.compile"),
    **dict.fromkeys(("quantization", "quantize", "qat"), "quantized weights"),
    **dict.fromkeys(
        ("save_top_k", "save_best", "load_best_model_at_end", "metric_for_best_model"),
        "a choice of checkpoints by a metric",
    ),
    **dict.fromkeys(
        ("mlflow", "comet", "neptune", "clearml", "aim", "report_to"),
        "loggers other than TensorBoard and Weights & Biases",
    ),
    **dict.fromkeys(("dpo", "ppo", "grpo", "rlhf", "orpo", "reward_model"), "training on preferences"),
}
"""Name -> feature that hpcgen's trainer lacks. A name that ends in an underscore is a prefix of names."""

_RESUMES = "remove it, because a run always resumes from its newest checkpoint (docs/resuming.md)"
_SITE = "use a site's template for commands before the job's program (docs/templates.md)"
INSTEAD = {
    **dict.fromkeys(
        (
            *("sft", "sft_", "chat_template", "loss_on_answers", "answer_only_loss", "assistant_only_loss"),
            *(
                "completion_only_loss",
                "mask_prompt",
                "train_on_inputs",
                "instruction_tuning",
                "prompt_template",
            ),
        ),
        "hpcgen's trainer has no instruction tuning; examples/deepspeed/sft.yaml does it with TRL",
    ),
    **dict.fromkeys(
        ("lora", "lora_", "peft", "peft_", "qlora", "dora", "adapter", "adapters", "adapter_"),
        "hpcgen's trainer has no adapters; examples/deepspeed/lora.yaml trains them with PEFT",
    ),
    **dict.fromkeys(
        (
            "model_name",
            "model_name_or_path",
            "pretrained",
            "pretrained_model",
            "hf_model",
            "base_model",
            "model_path",
        ),
        "hpcgen init --from-hf writes a run file that continues a Hugging Face model; preset names a shape",
    ),
    **dict.fromkeys(("resume", "resume_from", "auto_resume", "restart"), _RESUMES),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume_path", "restore_from", "init_from"),
        f"{_RESUMES}; checkpoint.load names another one",
    ),
    **dict.fromkeys(("modules", "module", "setup", "prologue", "prolog", "pre_run", "init_commands"), _SITE),
    "train": "its resources are in slurm.train, its length in training, and its data in data.train",
}
"""Name in a run file -> hint. A name that ends in an underscore is a prefix of names."""

EXPERTS = ("moe_", "expert_", "router_")
"""Beginnings of names of settings of experts."""

SHORTEST = 5
"""Length of the shortest word of another program whose misspellings are recognized."""

OTHER_PROGRAM = "remove the key, or run a program that has it with `program` (docs/program.md)"


def is_known(name: str) -> bool:
    """Returns True for the name of an option of another program."""
    return any(name in names for names in (KEYS, ALWAYS, UNREAD, FEATURES, _owners()))


def names() -> list[str]:
    """Names of keys and features in other programs, without the many that only Megatron has."""
    tables = (KEYS, ALWAYS, UNREAD, FEATURES, INSTEAD)
    return [name for table in tables for name in table if not name.endswith("_")]


def key(name: str) -> str:
    """The key that has this name in another program; empty if there is none."""
    return key_of(KEYS.get(name, ""))


def key_of(use: str) -> str:
    """The key at the beginning of an answer."""
    return use.partition(" ")[0].rstrip(",;")


def answer(name: str) -> str:
    """The hint for an unknown key that is a name in another program; empty for any other name."""
    if name in KEYS:
        return f"use {KEYS[name]}"
    if name in ALWAYS:
        return "remove it, because the trainer always does this"
    if name in UNREAD:
        return "remove it, because the trainer does not need it"
    if feature := _entry(FEATURES, name):
        return f"hpcgen's trainer does not support {feature}; {OTHER_PROGRAM}"
    if owner := _owners().get(name):
        return f"{owner} has it, but hpcgen's trainer does not; {OTHER_PROGRAM}"
    return "docs/moe.md lists the keys of mixtures of experts" if name.startswith(EXPERTS) else ""


def instead(name: str) -> str:
    """The hint for the name of something that hpcgen does in another way; empty for any other name."""
    return _entry(INSTEAD, name)


def _entry(table: dict[str, str], name: str) -> str:
    """The entry of a name, or of a beginning of the name that ends in an underscore."""
    begun = (
        text for beginning, text in table.items() if beginning.endswith("_") and name.startswith(beginning)
    )
    return table.get(name) or next(begun, "")


@functools.cache
def _owners() -> dict[str, str]:
    """Name of an option -> the program that has it: Megatron-Core or Megatron-LM, in version 0.16 or 0.19."""
    owner, owners = "", {}
    for line in Path(__file__).with_name("megatron_names.txt").read_text().splitlines():
        if line.startswith("# "):
            owner = line[2:]
        else:
            owners[line] = owner
    return owners
