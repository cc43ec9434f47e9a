"""Keys of the sections for ZeRO and precision."""

from __future__ import annotations

from hpcgen.planning.deepspeed.types import (
    DTYPE_NAMES,
    ELEMENTS,
    FILLED_ELEMENTS,
    INTEGER,
    NATURAL,
    OPTIONAL_TEXT,
    SHARE,
    SWITCH,
    Key,
    Section,
    choice,
    either,
    integer,
    list_of,
    number,
    switch,
    text,
)

OFFLOAD_PARAM = Section(
    {
        "device": Key(choice("none", "cpu", "nvme")),
        "nvme_path": OPTIONAL_TEXT,
        "buffer_count": NATURAL,
        "buffer_size": ELEMENTS,
        "max_in_cpu": ELEMENTS,
        "pin_memory": SWITCH,
    },
    "runtime/zero/offload_config.py, DeepSpeedZeroOffloadParamConfig",
    nullable=True,
)
OFFLOAD_OPTIMIZER = Section(
    {
        "device": Key(choice("none", "cpu", "nvme")),
        "nvme_path": OPTIONAL_TEXT,
        "buffer_count": NATURAL,
        "pin_memory": SWITCH,
        "pipeline_read": SWITCH,
        "pipeline_write": SWITCH,
        "fast_init": SWITCH,
        "ratio": SHARE,
        "super_offload": SWITCH,
        "cpuadam_cores_perc": SHARE,
    },
    "runtime/zero/offload_config.py, DeepSpeedZeroOffloadOptimizerConfig",
    nullable=True,
)
ZENFLOW = Section(
    {
        "topk_ratio": Key(number(above=0, below=1)),
        "select_strategy": Key(choice("auto", "step", "epoch")),
        "select_interval": Key(either(integer(), choice("auto"))),
        "update_interval": Key(either(integer(at_least=1), choice("auto"))),
        "overlap_step": SWITCH,
        "offload": SWITCH,
        "auto_ratio": SHARE,
        "full_warm_up_rounds": INTEGER,
        "pt_reserved_cores_perc": SHARE,
        "steps_per_epoch": Key(integer(), nullable=True),
    },
    "runtime/zenflow/zenflow_config.py, ZenFlowConfig",
    nullable=True,
)
_NAMES = Key(either(text, list_of(text)))
LEAF_MODULE = Section(
    {"classes": _NAMES, "names": _NAMES, "name_suffixes": _NAMES},
    "runtime/zero/leaf_module_config.py, DeepSpeedZeroLeafModuleConfig",
)
STAGE3_KEYS = {
    "prefetch_bucket_size": FILLED_ELEMENTS,
    "param_persistence_threshold": FILLED_ELEMENTS,
    "model_persistence_threshold": ELEMENTS,
    "max_live_parameters": ELEMENTS,
    "max_reuse_distance": ELEMENTS,
    "gather_16bit_weights_on_model_save": Key(switch, auto=True),
    "module_granularity_threshold": Key(integer(allows_exponent=True)),
    "use_all_reduce_for_fetch_params": SWITCH,
    "allgather_sequential": SWITCH,
}
"""Keys for stage 3. Their aliases begin with `stage3_`."""
ZERO = Section(
    {
        "stage": NATURAL,
        "contiguous_gradients": SWITCH,
        "reduce_scatter": SWITCH,
        "reduce_bucket_size": Key(integer(at_least=1, allows_exponent=True), auto=True),
        "use_multi_rank_bucket_allreduce": SWITCH,
        "allgather_partitions": SWITCH,
        "allgather_bucket_size": ELEMENTS,
        "overlap_comm": Key(switch, nullable=True),
        "compute_grad_norm": SWITCH,
        "load_from_fp32_weights": SWITCH,
        "elastic_checkpoint": SWITCH,
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "zenflow": ZENFLOW,
        "sub_group_size": ELEMENTS,
        "cpu_offload": Key(switch, deprecated="use offload_optimizer: {device: cpu}"),
        "cpu_offload_param": Key(switch, deprecated="use offload_param: {device: cpu}"),
        "cpu_offload_use_pin_memory": Key(
            switch,
            deprecated="use pin_memory in offload_param and offload_optimizer; DeepSpeed ignores this key",
        ),
        "stage3_gather_fp16_weights_on_model_save": Key(
            switch, deprecated="use stage3_gather_16bit_weights_on_model_save"
        ),
        **STAGE3_KEYS,
        **{f"stage3_{name}": key for name, key in STAGE3_KEYS.items()},
        "ignore_unused_parameters": SWITCH,
        "legacy_stage1": SWITCH,
        "round_robin_gradients": SWITCH,
        "parameter_alignment": SWITCH,
        "zero_hpz_partition_size": NATURAL,
        "zero_quantized_weights": SWITCH,
        "zero_quantized_nontrainable_weights": SWITCH,
        "zero_quantized_gradients": SWITCH,
        "memory_efficient_linear": SWITCH,
        "pipeline_loading_checkpoint": SWITCH,
        "override_module_apply": SWITCH,
        "log_trace_cache_warnings": SWITCH,
        "enable_sanity_checks": SWITCH,
        "save_muon_momentum_buffer_in_memory": SWITCH,
        "leaf_module": LEAF_MODULE,
    },
    "runtime/zero/config.py, DeepSpeedZeroConfig",
)
BF16 = Section(
    {
        "enabled": Key(switch, auto=True),
        "immediate_grad_update": SWITCH,
        "check_grad_overflow": SWITCH,
        "bf16_master_weights_and_grads": SWITCH,
        "bf16_optimizer_states": SWITCH,
    },
    "runtime/precision_config.py, DeepSpeedBF16Config",
)
FP16 = Section(
    {
        "enabled": Key(switch, auto=True),
        "auto_cast": SWITCH,
        "loss_scale": Key(number(at_least=0)),
        "initial_scale_power": INTEGER,
        "loss_scale_window": INTEGER,
        "hysteresis": INTEGER,
        "consecutive_hysteresis": SWITCH,
        "min_loss_scale": INTEGER,
        "fp16_master_weights_and_grads": SWITCH,
    },
    "runtime/precision_config.py, DeepSpeedFP16Config",
)
TORCH_AUTOCAST = Section(
    {
        "enabled": SWITCH,
        "dtype": Key(
            choice("float16", "bfloat16", "fp16", "bf16", "half", "torch.float16", "torch.bfloat16")
        ),
        "lower_precision_safe_modules": Key(list_of(text)),
    },
    "runtime/config.py, get_torch_autocast_dtype",
)
DATA_TYPES = Section(
    {
        "grad_accum_dtype": Key(DTYPE_NAMES, nullable=True),
        "param_dtype": Key(DTYPE_NAMES, nullable=True),
        "buffer_dtype": Key(DTYPE_NAMES, nullable=True),
        "keep_in_fp32_modules": Key(either(list_of(text), choice("auto"))),
    },
    "runtime/config.py, get_data_types_params",
)
