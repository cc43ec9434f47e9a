"""Mistakes in DeepSpeed's configuration: each configuration has one, and the same one without it has none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from hpcgen.config.program import DeepSpeedConfig
from hpcgen.errors import Problem
from hpcgen.planning.deepspeed import batch
from hpcgen.planning.deepspeed.check import deepspeed_problems, key_problems
from hpcgen.planning.deepspeed.facts import Facts
from hpcgen.planning.deepspeed.file import CONFIG
from hpcgen.planning.deepspeed.rules import RULES
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


BROKEN: list[tuple[dict[str, Any], str, str]] = [
    # keys and types
    (
        {"zero_optimisation": {}},
        "zero_optimisation",
        "check.key_problems",
    ),
    (
        zero(2, offload_optimizer={"devices": "cpu"}),
        "zero_optimization.offload_optimizer.devices",
        "check.key_problems",
    ),
    ({"elasticity": {"enabled": True}}, "elasticity", "check.key_problems"),
    (zero(3, mics_shard_size=8), "zero_optimization.mics_shard_size", "check.key_problems"),
    (zero(2, cpu_offload=True), "zero_optimization.cpu_offload", "check.key_problems"),
    ({"bf16": {"enabled": "true"}}, "bf16.enabled", "check.key_problems"),
    (zero(2, reduce_bucket_size=0), "zero_optimization.reduce_bucket_size", "check.key_problems"),
    (
        zero(2, stage3_max_live_parameters="auto"),
        "zero_optimization.stage3_max_live_parameters",
        "check.key_problems",
    ),
    ({"communication_data_type": "int8"}, "communication_data_type", "check.key_problems"),
    (
        {"optimizer": {"type": "AdamW", "params": {"lrr": 1e-3}}},
        "optimizer.params.lrr",
        "check.key_problems",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}},
        "optimizer.params.max_grad_norm",
        "check.key_problems",
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"betas": [0.9]}}},
        "optimizer.params.betas",
        "check.key_problems",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}},
        "scheduler.params.warmup_num_steps",
        "check.key_problems",
    ),
    ({"aio": {"queue_depth": 0}}, "aio.queue_depth", "check.key_problems"),
    (
        {"activation_checkpointing": {"partitioned_activations": True}},
        "activation_checkpointing.partitioned_activations",
        "check.key_problems",
    ),
    # ZeRO
    (zero(4), "zero_optimization.stage", "zero.stage_exists"),
    (
        zero(3, prefetch_bucket_size=1, stage3_prefetch_bucket_size=1),
        "zero_optimization.prefetch_bucket_size",
        "zero.one_spelling_of_each_key",
    ),
    (
        zero(2, zero_quantized_weights=True),
        "zero_optimization.zero_quantized_weights",
        "zero.quantized_communication_needs_stage_3",
    ),
    (
        zero(3, zero_hpz_partition_size=16),
        "zero_optimization.zero_hpz_partition_size",
        "zero.hpz_partition_fits_nvlink",
    ),
    (
        zero(1, allgather_bucket_size=99),
        "zero_optimization.allgather_bucket_size",
        "zero.allgather_bucket_is_even",
    ),
    (
        {**zero(2), "prescale_gradients": True},
        "prescale_gradients",
        "zero.scaled_gradients_need_all_reduce",
    ),
    (
        {**zero(3), "gradient_allreduce_op": "sum"},
        "gradient_allreduce_op",
        "zero.summed_gradients",
    ),
    (
        zero(1, compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "zero.gradient_norm_can_be_skipped",
    ),
    (
        zero(3, compute_grad_norm=False),
        "zero_optimization.compute_grad_norm",
        "zero.gradient_norm_can_be_skipped",
    ),
    (zero(1, legacy_stage1=True), "zero_optimization.legacy_stage1", "zero.old_stage_1"),
    (
        {**zero(1, overlap_comm=True), "managed_gradient_accumulation": False},
        "zero_optimization.overlap_comm",
        "zero.unmanaged_accumulation",
    ),
    # offload
    (zero(2, offload_param=CPU), "zero_optimization.offload_param.device", "offload.offload_needs_its_stage"),
    (
        zero(0, offload_optimizer=CPU),
        "zero_optimization.offload_optimizer.device",
        "offload.offload_needs_its_stage",
    ),
    (
        zero(2, offload_optimizer={"device": "nvme", "nvme_path": "/n"}),
        "zero_optimization.offload_optimizer.device",
        "offload.offload_needs_its_stage",
    ),
    (
        zero(3, offload_optimizer={"device": "nvme"}),
        "zero_optimization.offload_optimizer",
        "offload.nvme_needs_a_path",
    ),
    (
        zero(3, offload_param={"device": "nvme", "nvme_path": "swap"}),
        "zero_optimization.offload_param.nvme_path",
        "offload.nvme_needs_a_path",
    ),
    (
        zero(2, offload_optimizer={**CPU, "ratio": 0.5}),
        "zero_optimization.offload_optimizer.ratio",
        "offload.partial_offload_needs_stage_3",
    ),
    (
        zero(2, offload_optimizer={**CPU, "super_offload": True}),
        "zero_optimization.offload_optimizer.super_offload",
        "offload.partial_offload_needs_stage_3",
    ),
    (zero(2, zenflow={}), "zero_optimization.zenflow", "offload.zenflow_needs_cpu_offload"),
    # precision
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "fp16.enabled", "precision.one_precision"),
    ({"bf16": {}, "bfloat16": {"enabled": True}}, "bfloat16", "precision.one_precision"),
    (
        {"fp16": {"enabled": True, "loss_scale_window": 0}},
        "fp16.loss_scale_window",
        "precision.dynamic_loss_scale_can_change",
    ),
    (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        "fp16.fp16_master_weights_and_grads",
        "precision.low_precision_masters",
    ),
    (
        {**zero(2), "bf16": {"bf16_master_weights_and_grads": True}},
        "bf16.bf16_master_weights_and_grads",
        "precision.low_precision_masters",
    ),
    (
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "data_types.grad_accum_dtype",
        "precision.gradients_without_zero",
    ),
    (
        {"bf16": {"enabled": True}, "data_types": {"param_dtype": "fp16"}},
        "data_types.param_dtype",
        "precision.parameters_have_the_enabled_type",
    ),
    # optimizer and scheduler
    ({"optimizer": {"type": "OneBitAdam"}}, "optimizer.type", "optimizer.optimizer_exists"),
    ({"optimizer": {"type": "AdamWW"}}, "optimizer.type", "optimizer.optimizer_exists"),
    ({**zero(1), "optimizer": {"type": "AdamQ"}}, "optimizer.type", "optimizer.optimizer_exists"),
    ({"optimizer": {"params": {}}}, "optimizer", "optimizer.optimizer_exists"),
    ({**zero(1), "optimizer": {"type": "SGD"}}, "optimizer.type", "optimizer.zero_knows_the_optimizer"),
    (
        {**zero(3), "optimizer": {"type": "Muon"}},
        "optimizer.type",
        "optimizer.optimizer_runs_on_its_device",
    ),
    (
        {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}},
        "optimizer.params.amsgrad",
        "optimizer.amsgrad_is_torchs",
    ),
    (
        {"scheduler": {"type": "WarmupDecayLR", "params": {}}},
        "scheduler.params",
        "optimizer.scheduler_exists",
    ),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "optimizer.scheduler_exists"),
    (
        {"scheduler": {"type": "Warmup", "params": {}}},
        "scheduler.type",
        "optimizer.scheduler_exists",
    ),
    # parallelism and features
    ({"sequence_parallel_size": 3}, "sequence_parallel_size", "parallel.sequence_parallel_divides_ranks"),
    (
        {"sequence_parallel_size": 4, "data_parallel_size": 2},
        "data_parallel_size",
        "parallel.sequence_parallel_divides_ranks",
    ),
    (
        {"tensor_parallel": {"tp": {}, "tensor_parallel": {}}},
        "tensor_parallel.tensor_parallel",
        "parallel.one_spelling_of_each_key",
    ),
    (
        {"tensor_parallel": {"autotp_size": 5}},
        "tensor_parallel.autotp_size",
        "parallel.tensor_parallel_divides_ranks",
    ),
    (
        {"tensor_parallel": {"autotp_size": 4, "tp": {"tp_size": 2}}},
        "tensor_parallel.tp.tp_size",
        "parallel.tensor_parallel_divides_ranks",
    ),
    ({**zero(2), "pipeline": {"stages": 2}}, "pipeline.stages", "parallel.pipeline_needs_stage_1"),
    (
        {"expert_parallel": {"enabled": True, "autoep_size": 3}},
        "expert_parallel.autoep_size",
        "parallel.experts_divide_ranks",
    ),
    (
        {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
        "data_efficiency.data_sampling.curriculum_learning",
        "features.data_efficiency_is_complete",
    ),
    (
        {"comet": {"api_key": "k"}},
        "comet.api_key",
        "features.secrets_stay_out",
    ),
    ({"autotuning": {"enabled": True}}, "autotuning", "features.autotuning_needs_the_launcher"),
    # batch sizes
    (
        {"train_batch_size": 100},
        "train_batch_size",
        "batch.problems",
    ),
    ({"train_batch_size": 64, "gradient_accumulation_steps": 2}, "train_batch_size", "batch.problems"),
]


"""Configurations, with the path of the mistake in each and the function that reports it."""


def refused(directory: Path, **config: Any) -> list[Problem]:
    """The problems of a configuration of 16 ranks."""
    return list(deepspeed_problems(DeepSpeedConfig(config={**MICRO, **config}), 16, 8))


def reporter(config: dict[str, Any], problem: Problem) -> str:
    """The function that reports `problem`, with its module: "zero.stage_exists"."""
    facts = Facts(config=config, ranks=16, ranks_per_node=8, model_parallel_size=1)
    checks: list[tuple[Callable[..., object], Iterable[Problem]]] = [
        (key_problems, key_problems(config)),
        (batch.problems, batch.problems(config, 16)),
        *((rule, rule(facts)) for rule in RULES),
    ]
    check = next(check for check, problems in checks if problem in problems)
    return f"{check.__module__.rpartition('.')[2]}.{check.__name__}"


@pytest.mark.parametrize(("config", "path", "rule"), BROKEN, ids=lambda value: str(value)[:60])
def test_each_rule_finds_its_mistake(config: dict[str, Any], path: str, rule: str, tmp_path: Path) -> None:
    [problem] = refused(tmp_path, **config)
    assert problem.path == f"{CONFIG}.{path}"
    assert reporter({**MICRO, **config}, problem) == rule


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


@pytest.mark.parametrize(
    ("size", "ranks", "said"),
    [
        (8, 144, []),
        (72, 144, []),
        (16, 144, ["does not divide the 72 ranks of the 18 nodes that NVLink connects; use 72"]),
        (32, 64, ["does not divide the 72 ranks of the 18 nodes that NVLink connects; use 8"]),
    ],
)
def test_a_secondary_partition_may_be_as_large_as_what_nvlink_connects(size, ranks, said):
    section = DeepSpeedConfig(config={**MICRO, **zero(3, zero_hpz_partition_size=size)})
    found = deepspeed_problems(section, ranks, 4, nvlink_nodes=18)
    assert [str(problem).partition(" ")[2] for problem in found] == said
