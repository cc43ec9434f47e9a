"""A summary of a plan: JSON data for scripts, and lines of text for people."""

from __future__ import annotations

import math
import shlex
from typing import Any

from hpcgen.config.fields import slurm_time
from hpcgen.planning import checkpointing
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.memory import GIB, estimate_memory
from hpcgen.planning.program import deepspeed_section
from hpcgen.planning.resuming import resumption_of
from hpcgen.planning.setup import Setup
from hpcgen.run_plan import pair_summary, prediction_summary, storage_summary
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.prediction import step_time_s
from hpcgen.stages.train import TRAIN
from hpcgen.text import counted, duration, size_text
from trainer.contract.config import TrainerConfig
from trainer.contract.model.adapters import adapter_parameter_count
from trainer.contract.model.batch_size import total_samples
from trainer.contract.model.experts import num_moe_layers
from trainer.contract.model.model_size import active_parameter_count, parameter_count
from trainer.contract.resuming.change import Change


def summarize(plan: Plan) -> dict[str, Any]:
    """The summary as JSON data. Keys about training or a program are present only if it is planned. Names of keys
    include the units. The warnings include those about the predicted time and the interval between checkpoints."""
    stages = {
        stage.name: {
            "nodes": stage.allocation.nodes,
            "spare_nodes": stage.allocation.spare_nodes,
            "segment": stage.allocation.segment,
            "ntasks_per_node": stage.allocation.ntasks_per_node,
            "array_tasks": stage.allocation.array.num_tasks if stage.allocation.array else None,
            "time_s": stage.allocation.time_s,
            "container_image": stage.container.title if stage.container else None,
        }
        for stage in plan.stages.values()
    }
    trains = any(stage.kind.trains or stage.kind.runs_user_program for stage in plan.stages.values())
    prediction, doubts = prediction_summary.in_json(plan) if trains else ({}, [])
    step_s = prediction["prediction"]["step_time_s"] if prediction.get("prediction") else step_time_s(plan)
    read, doubts_of_pairs = pair_summary.in_json(plan, plan.trainer) if plan.trainer else ([], [])
    stored, more_doubts = storage_summary.in_json(plan, step_s) if plan.training else ({}, [])
    return {
        "name": plan.config.name,
        "cluster": plan.run.cluster_name,
        "cluster_file": plan.run.cluster_files[0],
        "stages": stages,
        **_training(plan, read),
        **prediction,
        **stored,
        **_program(plan),
        "warnings": [*plan.warnings, *doubts_of_pairs, *doubts, *more_doubts],
    }


def _program(plan: Plan) -> dict[str, Any]:
    stage = next((stage for stage in plan.stages.values() if stage.kind.runs_user_program), None)
    if stage is None or plan.config.program is None:
        return {}
    program = plan.config.program
    return {
        "program": list(program.command),
        "launcher": program.launcher,
        "ranks": stage.allocation.nodes * stage.allocation.ranks_per_node,
        "progress": program.progress and _chosen(program.progress),
        "stop": program.stop and _chosen(program.stop),
        "done_file": program.done and program.done.file,
        "checks_nodes_first": stage.checks_nodes,
        "signal_lead_s": stage.signal_lead_s,
        "deepspeed": _deepspeed(plan, stage.allocation),
    }


def _deepspeed(plan: Plan, allocation: Allocation) -> dict[str, Any] | None:
    program = plan.config.program
    if program is None or program.deepspeed is None:
        return None
    return deepspeed_section(program.deepspeed, allocation).summary(plan.run.node_type)


def _deepspeed_for_people(deepspeed: dict[str, Any] | None) -> list[tuple[str, str]]:
    if deepspeed is None:
        return []
    batch_size = deepspeed["train_batch_size"]
    text = f"ZeRO stage {deepspeed['zero_stage']}"
    text += f", batch size {batch_size:,}" if isinstance(batch_size, int) else ""
    lines = [("deepspeed", text)]
    if deepspeed["memory_gib_per_gpu"] is not None:
        nvme = deepspeed["nvme_gib_per_node"]
        disks = f", {_gib(nvme)} of NVMe per node" if nvme else ""
        host = _gib(deepspeed["memory_gib_per_node"])
        memory = f"about {_gib(deepspeed['memory_gib_per_gpu'])} per GPU without activations, {host} per node{disks}"
        lines.append(("memory", memory))
    return lines


def _chosen(section: object) -> dict[str, str]:
    """The keys of a section that are set."""
    return {key: value for key, value in vars(section).items() if value is not None}


def _training(plan: Plan, pairs: list[dict[str, Any]]) -> dict[str, Any]:
    trainer, layout, stage = plan.trainer, plan.layout, plan.training
    if trainer is None or layout is None or stage is None:
        return {}
    tokens = trainer.training.global_batch_size * trainer.model.seq_length
    memory = estimate_memory(Setup.of(trainer, layout))
    write_gb_s = plan.run.cluster.storage_write_gb_s
    return {
        "layout": str(layout),
        "bubble_fraction": layout.bubble_fraction,
        "parameters": parameter_count(trainer.model),
        "adapter_parameters": adapter_parameter_count(trainer.lora, trainer.model),
        "active_parameters": active_parameter_count(trainer.model),
        "mtp_num_layers": trainer.model.mtp_num_layers,
        "experts": _experts(plan),
        "tokens_per_step": tokens,
        "tokens_of_the_run": total_samples(trainer.training) * trainer.model.seq_length,
        "sft": trainer.data.sft,
        "rampup_batch_size": trainer.training.rampup_batch_size,
        "dataset": trainer.data.dataset,
        "pairs": pairs,
        "precision": trainer.training.precision,
        "fp8": trainer.training.fp8,
        "fp8_recipe": trainer.training.fp8_recipe if trainer.training.fp8 else None,
        "layer_spec": trainer.model.layer_spec,
        "model_provider": trainer.model.model_provider,
        "loss": trainer.training.loss,
        "z_loss_coeff": trainer.training.z_loss_coeff,
        "metrics": list(trainer.training.metrics),
        "lr": trainer.optimizer.lr,
        "min_lr": trainer.optimizer.min_lr,
        "lr_decay_style": trainer.optimizer.lr_decay_style,
        "lr_schedule": trainer.optimizer.lr_schedule,
        "lr_wsd_decay_iters": trainer.optimizer.lr_wsd_decay_iters,
        "lr_warmup_iters": trainer.optimizer.lr_warmup_iters,
        "lr_decay_iters": trainer.optimizer.lr_decay_iters,
        "memory_gib_per_device": memory.total_gib,
        "device_memory_gib": plan.run.node_type.gpu_memory_gib,
        "parameter_gib_per_device": memory.parameter_bytes / GIB,
        "activation_gib_per_device": memory.activation_bytes / GIB,
        "kernel_gib_per_device": memory.kernel_bytes / GIB,
        "checkpoint_bytes": checkpointing.checkpoint_bytes(trainer),
        "storage_write_gb_s": write_gb_s or checkpointing.ASSUMED_WRITE_GB_S,
        "checks_nodes_first": stage.checks_nodes,
        "save_time_s": checkpointing.save_time_s(trainer, write_gb_s),
        "save_limit": checkpointing.save_limit(checkpointing.save_gb_s(trainer, write_gb_s), write_gb_s),
        "save_interval": trainer.checkpoint.save_interval,
        "save_interval_minutes": trainer.checkpoint.save_interval_minutes,
        "async_save": trainer.checkpoint.async_save,
        "staged_gib_per_node": checkpointing.staged_bytes(trainer) * stage.allocation.ntasks_per_node / GIB,
        "slow_step_s": checkpointing.slow_step_s(trainer),
        "signal_lead_s": stage.signal_lead_s,
        "evaluation_every": trainer.evaluation_every,
        "start": _start(trainer),
    }


def _start(trainer: TrainerConfig) -> dict[str, Any] | None:
    """The checkpoint that training starts from, if this machine can read it."""
    resumption = resumption_of(trainer)
    found = resumption.continuation() if resumption is not None else None
    if found is None:
        return None
    return {
        "checkpoint": str(found.path),
        "iteration": found.iteration,
        "weights_only": found.weights_only,
        "is_finished": found.is_finished,
        "changes": [[change.name, change.before, change.after] for change in found.changes],
    }


def _start_for_people(start: dict[str, Any] | None) -> list[tuple[str, str]]:
    if start is None or start["is_finished"]:
        return []
    if start["weights_only"]:
        return [("starts from", f"the weights of {start['checkpoint']} (iteration {start['iteration']:,})")]
    changes = "; ".join(str(Change(*change)) for change in start["changes"])
    text = f"iteration {start['iteration']:,} ({start['checkpoint']})"
    return [("continues from", f"{text}; changes: {changes}" if changes else f"{text}; no changes")]


def for_people(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as headings and text, without warnings."""
    file = summary["cluster_file"]
    shipped = file.startswith("shipped:")
    lines = [("name", summary["name"]), ("cluster", summary["cluster"] + ("" if shipped else f" ({file})"))]
    for name, stage in summary["stages"].items():
        container = f"container {stage['container_image']}" if stage["container_image"] else "no container"
        spares = f" and {stage['spare_nodes']} spare" if stage["spare_nodes"] else ""
        segments = f" in segments of {stage['segment']}" if stage["segment"] else ""
        nodes = f"{counted(stage['nodes'], 'node')}{spares}{segments}"
        size = f"{nodes} x {counted(stage['ntasks_per_node'], 'task')}"
        if stage["array_tasks"]:
            size = f"array of {counted(stage['array_tasks'], 'task')}, one node each"
        lines.append((name, f"{size}, limit {slurm_time(stage['time_s'])}, {container}"))
    if "program" in summary:
        return [*lines, *_program_for_people(summary)]
    if "layout" not in summary:
        return lines
    checkpoint = (
        f"{size_text(summary['checkpoint_bytes'])} {_intervals(summary)}, {_while_saving(summary)}, "
        f"about {duration(math.ceil(summary['save_time_s']))} to write at {summary['save_limit']}"
    )
    return [
        *lines,
        *_start_for_people(summary["start"]),
        ("layout", summary["layout"]),
        ("pipeline bubble", f"{summary['bubble_fraction']:.1%}"),
        ("parameters", _parameters(summary)),
        *_experts_for_people(summary["experts"]),
        ("precision", _precision(summary)),
        ("tokens", _tokens(summary)),
        *pair_summary.for_people(summary["pairs"]),
        *_dataset(summary["dataset"]),
        ("learning rate", _rate(summary)),
        *_objective(summary),
        ("memory", _memory(summary)),
        ("checkpoint", checkpoint),
        *storage_summary.for_people(summary),
        *_evaluation(summary),
        ("stop", _stop(summary)),
        ("nodes checked", _nodes_checked(summary)),
        *prediction_summary.for_people(summary),
    ]


def _stop(summary: dict[str, Any]) -> str:
    """Text that says when training is asked to stop. On a machine without Slurm, steps may take longer than a time
    limit."""
    lead_s, step = summary["signal_lead_s"], duration(math.ceil(summary["slow_step_s"]))
    if lead_s >= summary["stages"][TRAIN.name]["time_s"]:
        return (
            f"Ctrl-C asks to save a checkpoint (assumes steps of at most {step}, too long for a job of Slurm)"
        )
    return f"asked to save a last checkpoint {duration(lead_s)} before the time limit (assumes steps of at most {step})"


def _program_for_people(summary: dict[str, Any]) -> list[tuple[str, str]]:
    progress, stop = (" ".join((summary[key] or {}).values()) for key in ("progress", "stop"))
    asked = f"{stop}, {duration(summary['signal_lead_s'])} before the time limit"
    return [
        (
            "program",
            f"{shlex.join(summary['program'])} ({summary['launcher']}, {counted(summary['ranks'], 'rank')})",
        ),
        ("progress", progress or "not set: any three failed attempts in a row end the job"),
        ("stop", asked if stop else "not asked to stop before the time limit"),
        ("done", summary["done_file"] or "exit status 0"),
        ("nodes checked", _nodes_checked(summary)),
        *_deepspeed_for_people(summary["deepspeed"]),
        *prediction_summary.for_people(summary),
    ]


def _nodes_checked(summary: dict[str, Any]) -> str:
    return (
        "yes, before each attempt"
        if summary["checks_nodes_first"]
        else "no (enable with preflight.node_health)"
    )


def _gib(gib: float) -> str:
    return f"{gib:.1f} GiB" if gib >= 0.1 else f"{gib * 1024:.0f} MiB"


def _evaluation(summary: dict[str, Any]) -> list[tuple[str, str]]:
    every = summary["evaluation_every"]
    return [("evaluation", f"a job for each checkpoint of a multiple of {every:,} steps")] if every else []


def _parameters(summary: dict[str, Any]) -> str:
    custom = [summary[key] for key in ("layer_spec", "model_provider") if summary[key]]
    note = f" without changes by {' and '.join(custom)}" if custom else ""
    is_sparse = summary["active_parameters"] != summary["parameters"]
    active = f", of which {summary['active_parameters']:,} process each token" if is_sparse else ""
    layers = summary["mtp_num_layers"]
    mtp = f" including {counted(layers, 'MTP layer')}" if layers else ""
    trained = summary["adapter_parameters"]
    adapters = f", frozen, and {trained:,} of adapters" if trained else ""
    return f"{summary['parameters']:,}{mtp}{active}{note}{adapters}"


def _experts(plan: Plan) -> dict[str, Any] | None:
    trainer, layout, stage = plan.trainer, plan.layout, plan.training
    if trainer is None or layout is None or stage is None or layout.expert_data_parallel_size is None:
        return None
    assert trainer.model.num_moe_experts
    group = layout.expert_model_parallel_size * layout.expert_tensor_parallel_size
    return {
        "num_moe_experts": trainer.model.num_moe_experts,
        "moe_router_topk": trainer.model.moe_router_topk,
        "moe_layers": num_moe_layers(trainer.model),
        "experts_per_rank": trainer.model.num_moe_experts // layout.expert_model_parallel_size,
        "expert_data_parallel_size": layout.expert_data_parallel_size,
        "ranks_per_group": group,
        "nodes_per_group": _nodes_per_group(group, stage.allocation.ntasks_per_node),
    }


def _nodes_per_group(ranks: int, ranks_per_node: int) -> int:
    """Maximum number of nodes of a group of consecutive ranks."""
    firsts = (group * ranks for group in range(ranks_per_node))
    return max((first + ranks - 1) // ranks_per_node - first // ranks_per_node + 1 for first in firsts)


def _experts_for_people(experts: dict[str, Any] | None) -> list[tuple[str, str]]:
    if experts is None:
        return []
    layers = counted(experts["moe_layers"], "MoE layer")
    experts_of_layer = f"{experts['moe_router_topk']} of {experts['num_moe_experts']} per token in {layers}"
    if experts["ranks_per_group"] == 1:
        return [("experts", f"{experts_of_layer}, all on every rank")]
    nodes = experts["nodes_per_group"]
    where = "within a node" if nodes == 1 else f"over {nodes} nodes"
    groups = (
        f"{counted(experts['expert_data_parallel_size'], 'group')} of {experts['ranks_per_group']} ranks {where} per "
        "pipeline stage"
    )
    return [("experts", f"{experts_of_layer}, {experts['experts_per_rank']} on each rank; {groups}")]


def _precision(summary: dict[str, Any]) -> str:
    if summary["fp8"] is None:
        return str(summary["precision"])
    recipe = {"tensorwise": "current scaling", "delayed": "delayed scaling"}[summary["fp8_recipe"]]
    return f"{summary['precision']}, layers in FP8 ({summary['fp8']}, {recipe})"


def _tokens(summary: dict[str, Any]) -> str:
    tokens = f"{summary['tokens_per_step']:,} per step, {summary['tokens_of_the_run']:,} in total"
    if summary["sft"]:
        tokens += ", with the padding of samples of chats"
    if summary["rampup_batch_size"] is None:
        return tokens
    start, increment, samples = summary["rampup_batch_size"]
    return f"{tokens}; batch size grows from {start} in increments of {increment} over {samples:,} samples"


def _dataset(dataset: str | None) -> list[tuple[str, str]]:
    if dataset is None:
        return []
    return [("samples", f"made by {dataset}, whose code is recorded in checkpoints and whose data is not")]


def _objective(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The row for losses and metrics of the user, and for the z-loss. Empty without them."""
    parts = [
        summary["loss"],
        summary["z_loss_coeff"] and f"z-loss x {summary['z_loss_coeff']:g}",
        summary["metrics"] and f"metrics {', '.join(summary['metrics'])}",
    ]
    return [("objective", "; ".join(filter(None, parts)))] if any(parts) else []


def _rate(summary: dict[str, Any]) -> str:
    peak = f"{summary['lr']:g} after {counted(summary['lr_warmup_iters'], 'step')}"
    if summary["lr_schedule"]:
        return f"{peak}, then {summary['lr_schedule']}"
    if summary["lr_decay_style"] == "constant":
        return f"{peak}, constant"
    end = summary["lr_decay_iters"]
    start = f" from step {end - summary['lr_wsd_decay_iters']}" if summary["lr_decay_style"] == "WSD" else ""
    return f"{peak}, {summary['lr_decay_style']} decay{start} to {summary['min_lr']:g} at step {end}"


def _memory(summary: dict[str, Any]) -> str:
    total, parameters, activations, kernels = (
        _gib(summary[f"{part}_gib_per_device"]) for part in ("memory", "parameter", "activation", "kernel")
    )
    parts = f"{parameters} of weights, gradients and optimizer state, {activations} of activations"
    available = summary["device_memory_gib"]
    of_device = "" if available is None else f" of {available:g} GiB"
    return f"about {total}{of_device} on the fullest device: {parts}, and {kernels} of buffers for kernels"


def _intervals(summary: dict[str, Any]) -> str:
    steps, minutes = summary["save_interval"], summary["save_interval_minutes"]
    every = [counted(steps, "step")] if steps else []
    every += ["1 minute" if minutes == 1 else f"{minutes:g} minutes"] if minutes else []
    return f"every {' and every '.join(every)}"


def _while_saving(summary: dict[str, Any]) -> str:
    if not summary["async_save"]:
        return "while training waits"
    return f"in the background using {_gib(summary['staged_gib_per_node'])} of memory per node"
