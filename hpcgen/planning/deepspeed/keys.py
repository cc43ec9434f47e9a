"""All keys that DeepSpeed 0.19.8 reads, by section.

DeepSpeed itself ignores unknown keys at the top level (runtime/config.py reads each key with `dict.get`) and in the
sections that are not pydantic models: activation_checkpointing, aio, autotuning, checkpoint, data_efficiency,
data_types, expert_parallel, flops_profiler, optimizer, pipeline, scheduler and torch_autocast.
"""

from __future__ import annotations

from hpcgen.planning.deepspeed.optimizer_keys import OPTIMIZER, SCHEDULER
from hpcgen.planning.deepspeed.section_keys import (
    ACTIVATION_CHECKPOINTING,
    AIO,
    CHECKPOINT,
    COMPILE,
    DATA_EFFICIENCY,
    EXPERT_PARALLEL,
    HYBRID_ENGINE,
    MONITORS,
    PIPELINE,
    PROFILING,
    TENSOR_PARALLEL,
)
from hpcgen.planning.deepspeed.types import (
    BATCH_SIZE,
    COUNT,
    DTYPE,
    SWITCH,
    Key,
    Section,
    choice,
    either,
    integer,
    mapping,
    number,
    switch,
)
from hpcgen.planning.deepspeed.zero_keys import BF16, DATA_TYPES, FP16, TORCH_AUTOCAST, ZERO

TOP = Section(
    {
        "train_batch_size": BATCH_SIZE,
        "train_micro_batch_size_per_gpu": BATCH_SIZE,
        "gradient_accumulation_steps": BATCH_SIZE,
        "managed_gradient_accumulation": SWITCH,
        "optimizer": OPTIMIZER,
        "scheduler": SCHEDULER,
        "zero_optimization": ZERO,
        "zero_allow_untested_optimizer": SWITCH,
        "zero_force_ds_cpu_optimizer": SWITCH,
        "bf16": BF16,
        "bfloat16": BF16,
        "fp16": FP16,
        "torch_autocast": TORCH_AUTOCAST,
        "data_types": DATA_TYPES,
        "communication_data_type": Key(DTYPE, nullable=True),
        "seq_parallel_communication_data_type": Key(DTYPE, nullable=True),
        "gradient_clipping": Key(number(at_least=0), auto=True),
        "prescale_gradients": SWITCH,
        "gradient_predivide_factor": Key(number(above=0)),
        "gradient_allreduce_op": Key(choice("mean", "sum", any_case=True)),
        "disable_allgather": SWITCH,
        "activation_checkpointing": ACTIVATION_CHECKPOINTING,
        "aio": AIO,
        "tensor_parallel": TENSOR_PARALLEL,
        "sequence_parallel_size": COUNT,
        "data_parallel_size": COUNT,
        "expert_parallel": EXPERT_PARALLEL,
        "use_data_before_expert_parallelism": SWITCH,
        "pipeline": PIPELINE,
        "checkpoint": CHECKPOINT,
        "datastates_ckpt": Key(either(mapping, switch), nullable=True),
        "data_efficiency": DATA_EFFICIENCY,
        "dataloader_drop_last": SWITCH,
        "hybrid_engine": HYBRID_ENGINE,
        "compile": COMPILE,
        "weight_quantization": Key(mapping),
        **MONITORS,
        **PROFILING,
        "autotuning": Key(mapping),
        "steps_per_print": Key(integer(at_least=1, allows_exponent=True), nullable=True),
        "wall_clock_breakdown": SWITCH,
        "memory_breakdown": SWITCH,
        "dump_state": SWITCH,
        "disable_python_gc": SWITCH,
        "vocabulary_size": Key(integer(at_least=1), nullable=True),
        "log_level": Key(
            choice("debug", "info", "warning", "error", "critical", any_case=True), nullable=True
        ),
    },
    "runtime/config.py, DeepSpeedConfig._initialize_params",
)

REMOVED = {
    "": {
        "amp": "use fp16, bf16 or torch_autocast",
        "nebula": "remove it; checkpoints are written with torch.save",
        "compression_training": "remove it; the model would train without compression",
        "quantize_training": "remove it",
        "sparse_gradients": "remove it; DeepSpeed detects sparse embeddings and reduces their gradients sparsely",
        "eigenvalue": "remove it",
        "sparse_attention": "remove it; choose the attention in the model",
        "elasticity": "set the batch sizes; hpcgen's job keeps its number of ranks with preflight.spare_nodes",
        "graph_harvesting": "use compile",
        "curriculum_learning": "use data_efficiency.data_sampling.curriculum_learning",
        "progressive_layer_drop": "remove it",
    },
    "zero_optimization": {
        "mics_shard_size": "use zero_hpz_partition_size",
        "mics_hierarchical_params_gather": "use zero_hpz_partition_size",
        "zeropp_loco_param": "use zero_quantized_gradients without it",
    },
}
"""Section -> key that DeepSpeed 0.19 refuses -> what to do (runtime/config.py, _reject_removed_config_keys)."""
OLD_SPELLINGS = {
    "fp32_allreduce": "communication_data_type: fp32",
    "zero_stage": "zero_optimization: {stage: ...}",
    "check_overflow": "check_grad_overflow",
    "partitioned_activations": "partition_activations",
    "activation_checkpoint": "activation_checkpointing",
}
"""Keys of older versions and documents -> current key."""
