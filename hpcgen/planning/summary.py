"""What a plan will do, in figures for people and scripts."""

from __future__ import annotations

import math
from typing import Any

from hpcgen.config.fields import slurm_time
from hpcgen.planning import checkpointing
from hpcgen.planning.memory import estimate_memory
from hpcgen.planning.model_size import checkpoint_bytes, parameter_count
from hpcgen.planning.plan import Plan


def summarize(plan: Plan) -> dict[str, Any]:
    """Name of the figure -> its value; the training figures only when training is planned."""
    summary: dict[str, Any] = {"name": plan.config.name, "cluster": plan.run.cluster_name}
    for stage in plan.stages.values():
        allocation = stage.allocation
        summary[stage.name] = (
            f"{allocation.nodes} nodes x {allocation.ntasks_per_node} tasks, limit {slurm_time(allocation.time_s)}, "
            + (f"container {stage.container.image}" if stage.container else "no container")
        )
    return summary | _training(plan)


def _training(plan: Plan) -> dict[str, Any]:
    trainer, layout = plan.trainer, plan.layout
    if trainer is None or layout is None:
        return {}
    memory = estimate_memory(trainer.model, trainer.parallelism, trainer.training, layout)
    optimizer, batch = trainer.optimizer, trainer.training.global_batch_size
    tokens = batch * trainer.model.seq_length
    save_s = checkpointing.save_time_s(trainer, plan.run.cluster.storage_write_gb_s)
    return {
        "layout": str(layout),
        "pipeline bubble": f"{layout.bubble_fraction:.1%}",
        "parameters": f"{parameter_count(trainer.model):,}",
        "tokens per step": f"{tokens:,}",
        "tokens of the run": f"{tokens * trainer.training.train_iters:,}",
        "learning rate": f"{optimizer.lr:g} after {optimizer.lr_warmup_iters} steps, "
        f"{optimizer.lr_decay_style} to {optimizer.min_lr:g} at step {optimizer.lr_decay_iters}",
        "memory per device": f"about {memory.total_gib:.1f} GiB",
        "checkpoint": f"{checkpoint_bytes(trainer.model, trainer.training.precision) / 1e9:.1f} GB, "
        f"about {math.ceil(save_s)} s to write",
        "warned": f"{plan.stages['train'].signal_lead_s} s before the time limit",
    }
