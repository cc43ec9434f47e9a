"""A trial of all ranks: what they measured together, or why one of them failed."""

from __future__ import annotations

import dataclasses
import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from trainer.contract.code import code_loading
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import TrainerError
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.resuming import provenance
from trainer.contract.rules.engine import require
from trainer.contract.trials import Memory, TrialResult
from trainer.distributed import groups, rendezvous
from trainer.distributed.slurm_job import job_id, node_name
from trainer.faults import flight_records
from trainer.faults.machine_failures import is_out_of_memory
from trainer.faults.storage import at_rank_0
from trainer.metrics.console import Log
from trainer.metrics.timers import Times
from trainer.model import cuda_graphs
from trainer.trials import steps
from trainer.trials.steps import Trained


def measure(config: TrainerConfig, warmup: int, num_steps: int, name: str) -> TrialResult | None:
    """Train with all ranks. Returns the result on rank 0, and None on the others.

    Raises:
        TrainerError: the ranks or the device do not match the configuration, or a loss is not finite.
        LostPeersError: another rank is gone.
    """
    require(config)
    config = resolve(config)
    ranks = rendezvous.find_ranks(os.environ)
    flight_records.keep(RunDirectory.of(config))
    cuda_graphs.prepare_nccl(config)
    process_groups = groups.initialize(config, ranks, os.environ)
    with groups.reporting_lost_peers(ranks, lambda: "during the trial"):
        code_loading.use(at_rank_0(lambda: provenance.read_code(config), RunDirectory.of(config).root))
        log = Log(ranks.rank == 0, progress=False)
        trained = steps.train(config, process_groups, log, config.model.num_tokens, warmup, num_steps)
        found = _gathered(_Found(node_name(), trained, steps.used_memory(config.device)))
        groups.finalize()
    return _result(found, config, name) if ranks.rank == 0 else None


@dataclass(frozen=True)
class _Found:
    """Measurements of a rank."""

    node: str
    trained: Trained
    memory: Memory


def _gathered(own: _Found) -> list[_Found]:
    """Measurements of all ranks."""
    found: list[_Found] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    return found


def _result(found: list[_Found], config: TrainerConfig, name: str) -> TrialResult:
    step_times = found[0].trained.step_s
    step_s = statistics.median(step_times)
    busiest = max((each.trained.times for each in found), key=lambda times: times.compute_s)
    fullest = max(range(len(found)), key=lambda rank: found[rank].memory.in_use_gib)
    tokens = config.training.global_batch_size * config.model.seq_length
    return TrialResult(
        name=name,
        status="measured",
        job=job_id(),
        nodes=tuple(dict.fromkeys(each.node for each in found)),
        step_s=step_s,
        all_step_s=step_times,
        tokens_per_s=tokens / step_s,
        **_parts(busiest, sum(step_times), len(step_times)),
        fullest_rank=fullest,
        **dataclasses.asdict(found[fullest].memory),
    )


def _parts(times: Times, total_s: float, num_steps: int) -> dict[str, Any]:
    """The parts of a step of one rank."""
    return {
        "compute_s": times.compute_s / num_steps,
        "communication_s": times.communication_s / num_steps,
        "update_s": times.update_s / num_steps,
        "idle_s": max(0.0, (total_s - times.compute_s - times.communication_s - times.update_s) / num_steps),
    }


def failure(error: Exception, config: TrainerConfig, name: str) -> TrialResult:
    """The result of a trial in which this rank failed."""
    ranks, node = rendezvous.find_ranks(os.environ), node_name()
    result = TrialResult(name=name, status="failed", job=job_id(), nodes=(node,), reason=f"{error}")
    if is_out_of_memory(error):
        stage = ranks.rank * config.parallelism.pipeline_model_parallel_size // config.world_size
        where = f"rank {ranks.rank} of pipeline stage {stage} on {node}"
        memory = dataclasses.asdict(steps.used_memory(config.device))
        reason = f"{where} does not fit: {steps.asked_memory(error)}"
        return dataclasses.replace(result, status="out of memory", reason=reason, **memory)
    if isinstance(error, TrainerError):
        return result
    return dataclasses.replace(
        result,
        reason=f"rank {ranks.rank} on {node}: {type(error).__name__}: {str(error).partition(chr(10))[0]}",
    )
