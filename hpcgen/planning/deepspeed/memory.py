"""Memory of a program with DeepSpeed: per GPU, per host and per host's NVMe disks.

The GPU and host formulas are those of DeepSpeed's estimate_zero2_model_states_mem_needs (runtime/zero/stage_1_and_2.py)
and estimate_zero3_model_states_mem_needs (runtime/zero/stage3.py, with zero_init), extended to stages 0 and 1 (ZeRO,
arXiv 1910.02054, section 5), other data types, NVMe, and DeepSpeed's buffers. Left out are activations, temporary
buffers of the model, fragmentation, NCCL and CUDA itself.

P is the number of parameters of a rank's copy of the model, T that of the trainable ones, L that of the largest module,
and N the number of ranks over which ZeRO partitions. Bytes per parameter with 16-bit weights and Adam:

| | weights | gradients | gradients in fp32 | master weights and moments |
| --- | --- | --- | --- | --- |
| stage 0 | 2 P | 2 T | 4 T | 12 T |
| stage 1 | 2 P | 2 T | 4 T / N | 12 T / N |
| stage 2 | 2 P | 2 T / N | 4 T / N | 12 T / N |
| stage 3 | 2 P / N + 4 L | 2 T / N | 4 T / N, at most 4 sub_group_size | 12 T / N |

DeepSpeed's estimate of stage 3 is smaller by 2 T / N: it counts either the 16-bit or the fp32 gradients. Both exist
during the step of a sub-group (runtime/zero/stage3.py, _prepare_fp32_grad_for_sub_group).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcgen.planning.deepspeed.facts import Device, Facts, Precision

HOST_FACTOR = 1.5
"""Factor for pinned and temporary buffers of the host, additional_buffer_factor of DeepSpeed's estimates."""
BYTES = {"fp32": 4, "fp16": 2, "bf16": 2}
MOMENTS = {"lion": 1, "adagrad": 1, "sgd": 1, "rmsprop": 1}
"""Type of the optimizer -> number of its states per parameter. Other types have two, like Adam."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """Numbers of parameters."""

    parameters: float
    trainable: float
    largest_layer: float


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything on which the estimate depends, except the model."""

    stage: int
    offload_optimizer: Device
    offload_param: Device
    ranks: int
    """Number of ranks over which ZeRO partitions."""
    ranks_per_node: int
    copy_ranks: int = 1
    """Number of ranks that share one copy of the model."""
    precision: Precision = "bf16"
    grad_accum_dtype: Precision = "bf16"
    moments: int = 2
    master_bytes: int = 4
    moment_bytes: int = 4
    bucket_bytes: int = 0
    """Buffers for the reduction of gradients on the GPU."""
    live_parameters: float = 0
    """Maximum number of parameters that stage 3 keeps gathered on the GPU."""
    secondary_partition: int = 1
    """zero_hpz_partition_size."""
    sub_group_size: float = 1e9
    buffer_count: int = 4
    param_buffers: float = 5e8
    max_in_cpu: float = 1e9


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes."""

    gpu_states: float
    """Weights, gradients and optimizer state of a GPU."""
    gpu_buffers: float
    """DeepSpeed's own buffers of a GPU."""
    host: float
    """Host memory of a node."""
    nvme: float
    """Swap files of a node."""

    @property
    def gpu(self) -> float:
        """Total of a GPU."""
        return self.gpu_states + self.gpu_buffers


def setup_of(facts: Facts) -> Setup:
    """The setup that a valid configuration describes."""
    precision = "bf16" if facts.precision_is_auto else facts.precision
    accumulation = facts.dtype("grad_accum_dtype") or precision
    bf16 = "bf16" if facts.has("bf16") else "bfloat16"
    is_low = facts.get(f"{bf16}.bf16_master_weights_and_grads", False) or facts.get(
        "fp16.fp16_master_weights_and_grads", False
    )
    copy_ranks = facts.model_parallel_size * max(1, facts.get("tensor_parallel.autotp_size", 1))
    overlap = facts.zero("overlap_comm", facts.stage == 3)
    buckets = (
        (2 if overlap and facts.stage < 3 else 1)
        if facts.stage and facts.zero("contiguous_gradients", True)
        else 0
    )
    reduce_bucket = facts.zero(
        "reduce_bucket_size", 0 if facts.has("zero_optimization.reduce_bucket_size") else 5e8
    )
    return Setup(
        stage=facts.stage,
        offload_optimizer=facts.offload("optimizer"),
        offload_param=facts.offload("param"),
        ranks=facts.ranks // copy_ranks,
        ranks_per_node=facts.ranks_per_node,
        copy_ranks=copy_ranks,
        precision=precision,
        grad_accum_dtype=accumulation,
        moments=MOMENTS.get(facts.optimizer_type or "", 2),
        master_bytes=2 if is_low else 4,
        moment_bytes=2 if facts.get(f"{bf16}.bf16_optimizer_states", False) else 4,
        bucket_bytes=int(buckets * reduce_bucket * BYTES[accumulation]),
        live_parameters=facts.zero("max_live_parameters", 1e9),
        secondary_partition=facts.zero("zero_hpz_partition_size", 1),
        sub_group_size=facts.zero("sub_group_size", 1e9),
        buffer_count=facts.zero("offload_optimizer.buffer_count", 4),
        param_buffers=facts.zero("offload_param.buffer_count", 5)
        * facts.zero("offload_param.buffer_size", 1e8),
        max_in_cpu=facts.zero("offload_param.max_in_cpu", 1e9),
    )


def estimate(size: ModelSize, setup: Setup) -> Estimate:
    """The estimate for a model."""
    return Estimate(
        gpu_states=_gpu_states(size, setup),
        gpu_buffers=_gpu_buffers(size, setup),
        host=_host(size, setup),
        nvme=_nvme(size, setup),
    )


def _state_bytes(setup: Setup) -> int:
    """Bytes per trainable parameter of the master weight and the moments."""
    return (setup.master_bytes if _has_masters(setup) else 0) + setup.moments * setup.moment_bytes


def _has_masters(setup: Setup) -> bool:
    """Without ZeRO, fp32 weights are their own masters (runtime/engine.py, _do_optimizer_sanity_check)."""
    return setup.stage > 0 or setup.precision != "fp32"


def _optimizer_bytes(setup: Setup) -> int:
    """Bytes per trainable parameter in the step: the gradient in the master's type, the master and the moments."""
    return _state_bytes(setup) + (setup.master_bytes if _has_masters(setup) else 0)


def _gpu_states(size: ModelSize, setup: Setup) -> float:
    weights = BYTES[setup.precision] * size.parameters / setup.copy_ranks
    trainable = size.trainable / setup.copy_ranks
    gradients, optimizer = BYTES[setup.grad_accum_dtype] * trainable, _optimizer_bytes(setup) * trainable
    if setup.stage == 3:
        step = min(trainable, setup.sub_group_size * setup.ranks)
        optimizer = _state_bytes(setup) * trainable + setup.master_bytes * step
    if setup.stage == 1 and setup.grad_accum_dtype != setup.precision:
        gradients += BYTES[setup.precision] * trainable  # BF16_Optimizer adds each one to a flat fp32 buffer
    if setup.stage >= 1:
        optimizer = 0 if setup.offload_optimizer != "none" else optimizer / setup.ranks
    if setup.stage >= 2 or (setup.stage and setup.offload_optimizer != "none"):
        # with an offloaded optimizer, gradients go to the host as they are reduced
        gradients = 0 if setup.offload_optimizer != "none" else gradients / setup.ranks
    if setup.stage == 3:
        weights = 0 if setup.offload_param != "none" else weights / setup.ranks
        weights += 2 * BYTES[setup.precision] * size.largest_layer / setup.copy_ranks
    return weights + gradients + optimizer


def _gpu_buffers(size: ModelSize, setup: Setup) -> float:
    if setup.stage < 3:
        return setup.bucket_bytes
    parameters = size.parameters / setup.copy_ranks
    gathered = BYTES[setup.precision] * min(setup.live_parameters, parameters)
    secondary = setup.secondary_partition
    return (
        setup.bucket_bytes
        + gathered
        + (BYTES[setup.precision] * parameters / secondary if secondary > 1 else 0)
    )


def _host(size: ModelSize, setup: Setup) -> float:
    """Host memory: offloaded state, or the complete fp32 model that each rank makes at the start.

    DeepSpeed's estimate of stage 2 multiplies the model by the GPUs of all nodes, and does not divide the state by the
    number of nodes. This one counts the model and the state of one node.
    """
    ranks, share = setup.ranks_per_node, setup.ranks_per_node / setup.ranks / setup.copy_ranks
    loaded = 4 * size.parameters / setup.copy_ranks * ranks
    if setup.stage == 3:
        loaded = 4 * size.largest_layer * ranks
    state = 0.0
    if setup.stage and setup.offload_optimizer == "cpu":
        state += _optimizer_bytes(setup) * size.trainable * share
    elif setup.stage == 3 and setup.offload_optimizer == "nvme":
        partition = size.trainable * share / ranks
        state += ranks * (
            4 * setup.buffer_count * min(setup.sub_group_size, partition) + setup.master_bytes * partition
        )
    if setup.stage == 3 and setup.offload_param == "cpu":
        state += BYTES[setup.precision] * size.parameters * share
    elif setup.stage == 3 and setup.offload_param == "nvme":
        kept = min(setup.max_in_cpu, size.parameters * share / ranks)
        state += BYTES[setup.precision] * ranks * (setup.param_buffers + kept)
    return HOST_FACTOR * (state if setup.stage == 3 and state else max(state, loaded))


def _nvme(size: ModelSize, setup: Setup) -> float:
    """Swap files of stage 3: the step's gradients, master weights and moments, and the weights."""
    share = setup.ranks_per_node / setup.ranks / setup.copy_ranks
    total = 0.0
    if setup.stage == 3 and setup.offload_optimizer == "nvme":
        total += _optimizer_bytes(setup) * size.trainable * share
    if setup.stage == 3 and setup.offload_param == "nvme":
        total += BYTES[setup.precision] * size.parameters * share
    return total
