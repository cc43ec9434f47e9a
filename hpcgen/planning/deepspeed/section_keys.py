"""Keys of the sections for parallelism, checkpoints, compilation, data, monitors and profilers."""

from __future__ import annotations

from hpcgen.planning.deepspeed.types import (
    COUNT,
    ELEMENTS,
    INTEGER,
    NATURAL,
    OPTIONAL_TEXT,
    SWITCH,
    TEXT,
    Key,
    Section,
    anything,
    choice,
    either,
    integer,
    list_of,
    mapping,
    nothing,
    number,
    switch,
    text,
)

ACTIVATION_CHECKPOINTING = Section(
    {
        "partition_activations": SWITCH,
        "number_checkpoints": Key(integer(at_least=1), nullable=True),
        "contiguous_memory_optimization": SWITCH,
        "synchronize_checkpoint_boundary": SWITCH,
        "profile": SWITCH,
        "cpu_checkpointing": SWITCH,
    },
    "runtime/activation_checkpointing/config.py, DeepSpeedActivationCheckpointingConfig",
)
AIO = Section(
    {
        "block_size": Key(integer(at_least=1)),
        "queue_depth": COUNT,
        "intra_op_parallelism": COUNT,
        "single_submit": SWITCH,
        "overlap_events": SWITCH,
        "use_gds": SWITCH,
    },
    "runtime/swap_tensor/aio_config.py, get_aio_config",
    nullable=True,
)
TENSOR_PARALLEL = Section(
    {
        "autotp_size": NATURAL,
        "tp_overlap_comm": SWITCH,
        "vocab_parallel_lm_head": Key(switch, nullable=True),
        "vocab_parallel_ce_backend": Key(choice("torch", "liger")),
        "tensor_parallel": Section({"tp_size": COUNT, "tp_grain_size": COUNT}, "TPConfig"),
        "tp": Section({"tp_size": COUNT, "tp_grain_size": COUNT}, "TPConfig"),
        "injection_policy_tuple": Key(list_of(anything), nullable=True),
        "partition_config": Key(mapping, nullable=True),
        "preset_model": OPTIONAL_TEXT,
        "keep_module_on_host": SWITCH,
        "replace_with_kernel_inject": SWITCH,
        "kernel_inject": SWITCH,
    },
    "runtime/tensor_parallel/config.py, TPTrainingConfig",
)

MONITOR_FILE = {"enabled": SWITCH, "output_path": TEXT, "job_name": TEXT}
MONITORS = {
    "tensorboard": Section(MONITOR_FILE, "monitor/config.py, TensorBoardConfig"),
    "csv_monitor": Section(MONITOR_FILE, "monitor/config.py, CSVConfig"),
    "wandb": Section(
        {"enabled": SWITCH, "group": OPTIONAL_TEXT, "team": OPTIONAL_TEXT, "project": TEXT},
        "monitor/config.py, WandbConfig",
    ),
    "comet": Section(
        {
            "enabled": SWITCH,
            "samples_log_interval": INTEGER,
            **dict.fromkeys(
                ("project", "workspace", "api_key", "experiment_name", "experiment_key"), OPTIONAL_TEXT
            ),
            "online": Key(switch, nullable=True),
            "mode": Key(choice("get", "create", "get_or_create"), nullable=True),
        },
        "monitor/config.py, CometConfig",
    ),
}
PROFILING = {
    "flops_profiler": Section(
        {
            "enabled": SWITCH,
            "recompute_fwd_factor": Key(number(at_least=0)),
            "profile_step": COUNT,
            "module_depth": INTEGER,
            "top_modules": COUNT,
            "detailed": SWITCH,
            "output_file": OPTIONAL_TEXT,
        },
        "profiling/config.py, DeepSpeedFlopsProfilerConfig",
    ),
    "comms_logger": Section(
        {
            "enabled": SWITCH,
            "prof_all": SWITCH,
            "prof_ops": Key(list_of(text)),
            "verbose": SWITCH,
            "debug": SWITCH,
        },
        "comm/config.py, CommsLoggerConfig",
    ),
    "timers": Section(
        {
            "throughput": Section(
                {"enabled": SWITCH, "synchronized": SWITCH}, "utils/config.py, DeepSpeedThroughputTimerConfig"
            )
        },
        "utils/config.py, get_timers_config",
    ),
}
CHECKPOINT = Section(
    {
        "tag_validation": Key(choice("Ignore", "Warn", "Fail", any_case=True)),
        "load_universal": SWITCH,
        "use_node_local_storage": SWITCH,
        "parallel_write": Section({"pipeline_stage": SWITCH}, "runtime/config.py"),
        "checkpoint_serialization": SWITCH,
        "writer": Section(
            {
                "type": Key(choice("mock", "python", "fast", any_case=True)),
                "io_buffer_size": ELEMENTS,
                "io_buffer_double": SWITCH,
                "show_statistics": SWITCH,
                "data_parallel": Key(choice("replica", "socket", "machine", any_case=True), nullable=True),
                "decoupled": SWITCH,
                "io_multiplier": COUNT,
            },
            "runtime/model_checkpointing/config.py, get_checkpoint_writer_config",
            nullable=True,
        ),
    },
    "runtime/config.py, get_checkpoint_params; runtime/model_checkpointing/config.py",
)
PIPELINE = Section(
    {
        "stages": Key(either(integer(at_least=1), choice("auto"))),
        "partition": TEXT,
        "seed_layers": SWITCH,
        "activation_checkpoint_interval": NATURAL,
        "pipe_partitioned": SWITCH,
        "grad_partitioned": SWITCH,
        "use_reentrant": SWITCH,
    },
    "runtime/config.py, get_pipeline_config",
)
DATA_EFFICIENCY = Section(
    {
        "enabled": SWITCH,
        "seed": INTEGER,
        "data_sampling": Section(
            {
                "enabled": SWITCH,
                "num_epochs": COUNT,
                "num_workers": NATURAL,
                "pin_memory": SWITCH,
                "curriculum_learning": Key(mapping),
                "dynamic_batching": Key(mapping),
            },
            "runtime/data_pipeline/config.py, get_data_sampling",
        ),
        "data_routing": Section(
            {"enabled": SWITCH, "random_ltd": Key(mapping)},
            "runtime/data_pipeline/config.py, get_data_routing",
        ),
    },
    "runtime/data_pipeline/config.py",
)
HYBRID_ENGINE = Section(
    {
        "enabled": SWITCH,
        "max_out_tokens": COUNT,
        "inference_tp_size": COUNT,
        "release_inference_cache": SWITCH,
        "pin_parameters": SWITCH,
        "tp_gather_partition_size": COUNT,
        "enable_cuda_graph": SWITCH,
    },
    "runtime/config.py, HybridEngineConfig",
)
COMPILE = Section(
    {
        **dict.fromkeys(
            (
                *("deepcompile", "autoep_non_moe", "free_activation", "offload_activation"),
                *("offload_activation_pin_memory", "offload_opt_states", "double_buffer", "symmetric_memory"),
                *("debug_log", "offload_parameters", "sync_before_reduce", "sync_after_reduce"),
                *("sync_before_allgather", "sync_after_allgather", "keep_int_input_tensors"),
                "keep_all_input_tensors",
            ),
            SWITCH,
        ),
        "free_activation_threshold": INTEGER,
        "passes": Key(list_of(choice("z1", "z3", "autosp", "autotp")), nullable=True),
    },
    "compile/config.py, CompileConfig",
)
_EXPERT_SWITCHES = ("enabled", "validate_folding_routing", "async_split_plan", "use_grouped_mm")
_EXPERT_NAMES = (
    *("preset_model", "moe_layer_pattern", "expert_pattern", "router_pattern", "expert_w1", "expert_w2"),
    *("expert_w3", "num_experts_attr", "top_k_attr", "shared_experts_pattern", "shared_experts_gate_pattern"),
    "expert_activation",
)
EXPERT_PARALLEL = Section(
    {
        **dict.fromkeys((*_EXPERT_SWITCHES, "disable_triton_grouped_mm"), SWITCH),
        **dict.fromkeys(_EXPERT_NAMES, OPTIONAL_TEXT),
        "autoep_size": COUNT,
        "expert_tensor_parallel_size": COUNT,
        "route_norm": Key(switch, nullable=True),
        "route_scale": Key(number()),
        "score_apply": Key(choice("auto", "pre", "post")),
        "combine_impl": Key(choice("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm")),
        "row_weighting_impl": Key(choice("auto", "eager", "fused")),
        "gate_up_impl": Key(choice("separate", "fused")),
        "comm_backend": Key(choice("comm", "deepep")),
        "comm_num_sm": COUNT,
        "comm_qp_margin": NATURAL,
        "comm_max_tokens_per_rank": NATURAL,
        "num_expert_groups": Key(integer(at_least=1), nullable=True),
        "num_limited_groups": Key(integer(at_least=1), nullable=True),
        "score_func": Key(choice("auto", "softmax", "sigmoid")),
        "top_k": Key(either(integer(at_least=1), choice("auto"))),
        "load_balance_coeff": Key(nothing, nullable=True),
        "routed_scaling_factor": Key(either(number(), choice("auto"))),
        "has_shared_experts": Key(switch, nullable=True),
    },
    "module_inject/auto_ep_config.py, parse_autoep_config and validate_autoep_config",
)
