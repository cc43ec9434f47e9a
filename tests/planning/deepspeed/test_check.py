"""Mistakes in DeepSpeed's configuration: each configuration has one, and the same one without it has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.program import DeepSpeedConfig
from hpcgen.planning.deepspeed.check import deepspeed_problems
from tests.planning.deepspeed.test_file import with_deepspeed
from tests.planning.test_program import mistakes, planned

MICRO = {"train_micro_batch_size_per_gpu": 4}
CPU = {"device": "cpu"}


def found(config: dict[str, Any], ranks: int = 16, **section: Any) -> list[str]:
    """The problems, as "key: reason; hint"."""
    problems = deepspeed_problems(DeepSpeedConfig(config=config, **section), ranks, 8)
    return [
        f"{problem.path.removeprefix('program.deepspeed.config').removeprefix('.')}: {problem.reason}; {problem.hint}"
        for problem in problems
    ]


def zero(stage: int, **keys: Any) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, **keys}}


VALID: list[dict[str, Any]] = [
    {},
    {"train_batch_size": 128, "gradient_accumulation_steps": 2},
    {"train_batch_size": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto"},
    {**zero(3, reduce_bucket_size="auto", stage3_prefetch_bucket_size="auto"), "bf16": {"enabled": "auto"}},
    zero(3, offload_param={"device": "nvme", "nvme_path": "{SCRATCH}"}, sub_group_size=1e9),
    zero(1, offload_optimizer=CPU),
    {**zero(1), "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    {**zero(2), "bf16": {"enabled": "auto"}, "data_types": {"param_dtype": "bf16"}},
    {**zero(2, compute_grad_norm=False), "gradient_clipping": 0},
    {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95], "torch_adam": True}}},
    {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "nesterov": True}}},
    {**zero(1), "optimizer": {"type": "Lamb"}, "zero_allow_untested_optimizer": True},
    {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": 10}}},
    {"scheduler": {"type": "StepLR", "params": {"step_size": 30}}},
    {"activation_checkpointing": {"partition_activations": True, "number_checkpoints": None}},
    {"aio": {"block_size": 1048576, "queue_depth": 8, "use_gds": False}},
    {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 4}}},
    {"sequence_parallel_size": 4, "data_parallel_size": 4},
    {**zero(1), "pipeline": {"stages": 4, "partition": "best"}},
    zero(3, zero_hpz_partition_size=8, zero_quantized_weights=True, zero_quantized_gradients=True),
    {**zero(2, offload_optimizer=CPU), "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
]


@pytest.mark.parametrize("config", VALID, ids=lambda config: json.dumps(config)[:60])
def test_configurations_that_deepspeed_accepts_have_no_problems(config: dict[str, Any]) -> None:
    assert found({**MICRO, **config}) == []


BROKEN: list[tuple[dict[str, Any], str]] = [
    # keys and types
    (
        {"zero_optimisation": {}},
        "zero_optimisation: is not a key of DeepSpeed; did you mean zero_optimization?",
    ),
    (
        zero(2, offload_optimizer={"devices": "cpu"}),
        "offload_optimizer.devices: is not a key of DeepSpeed; did you",
    ),
    ({"elasticity": {"enabled": True}}, "elasticity: was removed from DeepSpeed; set the batch sizes"),
    (zero(3, mics_shard_size=8), "mics_shard_size: was removed from DeepSpeed; use zero_hpz_partition_size"),
    (zero(2, cpu_offload=True), "cpu_offload: is deprecated; use offload_optimizer: {device: cpu}"),
    ({"bf16": {"enabled": "true"}}, "bf16.enabled: must be true or false"),
    (zero(2, reduce_bucket_size=0), "reduce_bucket_size: must be at least 1"),
    (zero(2, stage3_max_live_parameters="auto"), "must be a whole number; remove it: Hugging Face's Trainer"),
    ({"communication_data_type": "int8"}, "communication_data_type: must be fp16, bf16 or fp32"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}},
        "lrr: is not a key of DeepSpeed; did you mean lr",
    ),
    ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}}, "use gradient_clipping"),
    ({"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}}, "betas: must be a list of 2"),
    ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}, "must be at least 1"),
    ({"aio": {"queue_depth": 0}}, "aio.queue_depth: must be at least 1"),
    ({"activation_checkpointing": {"partitioned_activations": True}}, "use partition_activations"),
    # ZeRO
    (zero(4), "stage: is not a stage of ZeRO"),
    (zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=1), "is the same key as stage3_prefetch"),
    (zero(2, zero_quantized_weights=True), "zero_quantized_weights: has no effect with stage 2"),
    (
        zero(3, zero_hpz_partition_size=16),
        "zero_hpz_partition_size: does not divide the 8 ranks of a node; use 8",
    ),
    (zero(1, allgather_bucket_size=99), "allgather_bucket_size: is an odd number; use 100"),
    (
        {**zero(2), "prescale_gradients": True},
        "prescale_gradients: is not supported by stage 2 with reduce_scatter",
    ),
    (
        {**zero(3), "gradient_allreduce_op": "sum"},
        "gradient_allreduce_op: is not supported with ZeRO stage 3",
    ),
    (zero(1, compute_grad_norm=False), "DeepSpeed clips at 1.0 by default; set gradient_clipping to 0"),
    (zero(3, compute_grad_norm=False), "compute_grad_norm: is supported by stages 1 and 2, not 3"),
    (zero(1, legacy_stage1=True), "legacy_stage1: is not supported since DeepSpeed 0.5.9"),
    (
        {**zero(1, overlap_comm=True), "managed_gradient_accumulation": False},
        "overlap_comm: is not supported",
    ),
    # offload
    (zero(2, offload_param=CPU), "offload_param.device: has no effect with stage 2; use stage 3, or none"),
    (zero(0, offload_optimizer=CPU), "offload_optimizer.device: needs ZeRO"),
    (
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        "is ignored by stage 2, which keeps the state",
    ),
    (zero(3, offload_optimizer={"device": "nvme"}), "offload_optimizer: has device: nvme without nvme_path"),
    (zero(3, offload_param={"device": "nvme", "nvme_path": "swap"}), "nvme_path: is a relative path"),
    (zero(2, offload_optimizer={**CPU, "ratio": 0.5}), "ratio: is not supported by stage 2"),
    (zero(2, offload_optimizer={**CPU, "super_offload": True}), "super_offload: needs stage 3"),
    (zero(2, zenflow={}), "zenflow: needs an optimizer that is offloaded to the CPU"),
    # precision
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "and bf16.enabled exclude each other"),
    ({"bf16": {}, "bfloat16": {"enabled": True}}, "bfloat16: is ignored, because there is a section bf16"),
    (
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        "loss_scale_window: must be at least 1 for a dynamic",
    ),
    ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "grads: needs ZeRO"),
    ({**zero(2), "bf16": {"bf16_master_weights_and_grads": True}}, "offloaded to DeepSpeed's CPU Adam"),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "the data type of the parameters, bf16",
    ),
    (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
        "conflicts with the enabled precision, bf16",
    ),
    # optimizer and scheduler
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type: was removed from DeepSpeed; use AdamW"),
    ({"optimizer": {"type": "AdamWW"}}, "nor a class of torch.optim; did you mean AdamW"),
    ({**zero(1), "optimizer": {"type": "AdamQ"}}, "nor a class of torch.optim; did you mean Adam or AdamW"),
    ({"optimizer": {"params": {}}}, "optimizer: has no type, so DeepSpeed ignores the section"),
    ({**zero(1), "optimizer": {"type": "SGD"}}, "has not been tested with ZeRO, so DeepSpeed refuses it"),
    (
        {**zero(3), "optimizer": {"type": "Muon"}},
        "optimizer.type: is not supported by stage 3 with reduce_scatter",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
        "amsgrad: is not supported by DeepSpeed's fused",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "params: has no total_num_steps, which WarmupDecayLR",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler: has no params"),
    (
        {"scheduler": {"type": "Warmup", "params": {}}},
        "is neither a scheduler of DeepSpeed nor a class of torch",
    ),
    # parallelism and features
    ({"sequence_parallel_size": 3}, "sequence_parallel_size: does not divide the 16 ranks"),
    (
        {"sequence_parallel_size": 4, "data_parallel_size": 2},
        "data_parallel_size: times sequence_parallel_size = 4 is 8, but there are 16",
    ),
    (
        {"tensor_parallel": {"tp": {}, "tensor_parallel": {}}},
        "tensor_parallel.tensor_parallel: is the same key as tp",
    ),
    ({"tensor_parallel": {"autotp_size": 5}}, "autotp_size: does not divide the 16 ranks"),
    (
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}},
        "differs from tensor_parallel.autotp_size = 4",
    ),
    ({**zero(2), "pipeline": {"stages": 2}}, "pipeline.stages: is not supported by ZeRO stage 2"),
    ({"expert_parallel": {"enabled": True, "autoep_size": 3}}, "autoep_size: does not divide the 16 ranks"),
    (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        "without curriculum_metrics",
    ),
    (
        {"comet": {"api_key": "k"}},
        "comet.api_key: would be written into the script; remove it, export COMET_API_KEY",
    ),
    ({"autotuning": {"enabled": True}}, "autotuning: needs the launcher deepspeed"),
    # batch sizes
    (
        {"train_batch_size": 100},
        "train_batch_size: is not a multiple of train_micro_batch_size_per_gpu = 4 x 16",
    ),
    ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, "= 2 x 16 copies of the model; use 128"),
]


@pytest.mark.parametrize(("config", "expected"), BROKEN, ids=lambda value: str(value)[:60])
def test_each_rule_finds_its_mistake(config: dict[str, Any], expected: str) -> None:
    [problem] = found({**MICRO, **config})
    assert expected in problem


def test_batch_sizes_count_copies_of_the_model() -> None:
    sizes = {"train_batch_size": 64, **MICRO, "gradient_accumulation_steps": 4}
    assert found(sizes, model_parallel_size=4) == []
    assert found({**sizes, "sequence_parallel_size": 4}) == []
    assert "is not train_micro" in found(sizes)[0]
    assert "divide the 16 ranks" in found(sizes, model_parallel_size=3)[0]
    assert "has neither train_batch_size nor" in found({"gradient_accumulation_steps": 4})[0]


def test_swap_files_are_on_a_disk_that_the_container_mounts(tmp_path: Path) -> None:
    config = {**MICRO, **zero(3, offload_optimizer={"device": "nvme", "nvme_path": "/local/swap"})}
    [line] = mistakes(tmp_path, with_deepspeed(config))
    assert 'nvme_path = /local/swap is not mounted in the container; use "{SCRATCH}", or add' in line
    mounted = {"image": "/shared/images/mine.sqsh", "mounts": [{"source": "/local"}]}
    planned(tmp_path, {**with_deepspeed(config), "container": mounted})


def test_all_mistakes_are_reported_with_their_lines_and_values(tmp_path: Path) -> None:
    config = {**MICRO, "gradient_acumulation_steps": 2, "bf16": {"enabled": "true"}}
    config |= zero(3, offload_optimizer={"device": "nvme"})
    lines = mistakes(tmp_path, with_deepspeed(config))
    assert [line.partition(" ")[2] for line in lines] == [
        "program.deepspeed.config.gradient_acumulation_steps = 2 is not a key of DeepSpeed; "
        "did you mean gradient_accumulation_steps?",
        'program.deepspeed.config.bf16.enabled = "true" must be true or false without quotes',
        "program.deepspeed.config.zero_optimization.offload_optimizer has device: nvme without nvme_path; "
        'set it to the directory of a local disk, such as "{SCRATCH}"',
    ]
    assert all("run.yaml:" in line for line in lines)
    [consequences] = found({"train_batch_size": 16, **zero(3, stgae=1)})
    assert "did you mean stage" in consequences
    config = {**MICRO, "comet": {"api_key": "s3cret"}}
    [line] = mistakes(tmp_path, with_deepspeed(config))
    assert "comet.api_key would be written into the script" in line
    assert "s3cret" not in line
