"""The prediction for a planned training run: time of a step, jobs, GPU-hours, energy and cost.

Only commands that show it import this module, since `render` needs none of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from hpcgen.config.cluster import price_per_gpu_hour
from hpcgen.config.fields import slurm_time
from hpcgen.config.plausible import price_doubts
from hpcgen.errors import Problem
from hpcgen.planning import checkpointing, resuming, storage
from hpcgen.planning.predicted_step import NoPrediction, machine_of_run, predicted_step
from hpcgen.planning.request import place_of
from hpcgen.planning.run_time import (
    NODE_WATTS,
    NODE_WATTS_SOURCE,
    Job,
    Resources,
    RunTime,
    Steps,
    remaining_steps,
    run_time,
)
from hpcgen.planning.step_time.machine import Machine
from hpcgen.planning.step_time.result import StepTime
from hpcgen.planning.storage import SaveCosts
from hpcgen.run_plan.plan import Plan
from hpcgen.run_plan.stage import StagePlan
from hpcgen.stages.train import TRAIN
from hpcgen.text import counted, duration, one_of
from trainer.contract.config import TrainerConfig
from trainer.contract.model.batch_size import batch_sizes
from trainer.contract.model.flops import flops, flops_per_sample
from trainer.contract.record import record
from trainer.contract.validation import batches_per_evaluation

YEAR_S = 365 * 86400
MUCH_OVERHEAD = 1 / 3
"""Part of a job for its start and its stop with which a warning begins."""
GOOD_OVERHEAD = 0.05
"""Part of a job for its start and its stop with the time limit that the warning advises."""
DENSE_RANGE = (0.94, 1.2)
"""Lowest and highest time of a step relative to the predicted one, for GPUs whose kernels were measured.

All 34 configurations of NVIDIA's recipes and 19 dense runs of hpcgen's trainer that do not wait for the host are in it.
Both were compared after the prediction was frozen (docs/planning.md).
Software alone changes as much: between two releases of NeMo, a 175B model in the same layout became 10% faster."""
UNMEASURED_RANGE = (0.85, 1.3)
"""`DENSE_RANGE` for GPUs whose kernels were not measured. A100s of 2022 took 0.88 to 0.97 of their predicted times."""
EXPERTS_RANGE = (0.9, 1.7)
"""`DENSE_RANGE` for models with experts, whose loads and all-to-alls between nodes are not known well. Two releases of
Megatron-Bridge took 29 and 51 s for a step of the same run."""
HOSTS = (0.5, 1.3)
"""Launch times of the fastest and the slowest host that is likely, relative to the measured one. Published runs had
hosts twice as fast, and a second machine of hpcgen's authors one that was 24% slower."""
MEASURED_HOSTS = (0.8, 1.4)
"""`HOSTS` if the launch times were measured on the cluster. On two virtual machines with H100s, two runs that waited
for the host needed 0.84 to 1.4 times the launch times that were measured some minutes earlier."""
MOST_LOST = 0.9
"""Part of the time that failures and saves may take in a prediction."""
MUCH_WAITING = 0.1
"""Share of a step that GPUs wait for the host, above which a warning says so."""


@record(kw_only=True)
class Prediction:
    """The predicted times of a training run, and what it uses."""

    trainer: TrainerConfig
    step: StepTime
    """A step with the full batch size."""
    remaining_tokens: int
    range: tuple[float, float]
    """Lowest and highest time of a step, relative to the predicted one."""
    low: RunTime
    """The rest of the run with the lowest times."""
    likely: RunTime
    """The rest of the run with the predicted times."""
    high: RunTime
    price_per_gpu_hour: float | None
    currency: str
    gpu_model: str
    is_measured: bool
    """True if the kernels of this GPU model were measured. Otherwise all times follow from constants of other GPUs."""
    guesses: tuple[str, ...]
    """Constants that were not measured on this GPU model or network, each as a line with its value."""
    warnings: tuple[Problem, ...]

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        training, model = self.trainer.training, self.trainer.model
        return training.global_batch_size * model.seq_length / self.step.total

    @property
    def tflops_per_gpu(self) -> float:
        """Throughput of a GPU in TFLOP/s with causal attention counted half, as in the trainer's log."""
        return self._per_gpu(flops_per_sample(self.trainer))

    @property
    def full_attention_tflops_per_gpu(self) -> float:
        """Throughput of a GPU in TFLOP/s with all pairs of tokens counted, as some projects do."""
        length = self.trainer.model.seq_length
        return self._per_gpu(
            flops(self.trainer.model, length, length**2, self.trainer.training.freeze, self.trainer.lora)
        )

    def _per_gpu(self, sample_flops: float) -> float:
        rate = sample_flops * self.trainer.training.global_batch_size / self.step.total
        return rate / self.trainer.world_size / 1e12

    def cost(self, of: RunTime) -> float | None:
        """Price of `low`, `likely` or `high`; None without a price."""
        return None if self.price_per_gpu_hour is None else of.gpu_hours * self.price_per_gpu_hour


def step_time_s(plan: Plan) -> float | None:
    """Seconds of a step of a planned run, even if the time of the run cannot be predicted. None if it is unknown."""
    try:
        return _rest(plan).step.total
    except NoPrediction:
        return None


def predict(plan: Plan) -> Prediction:
    """Predicts the time of a step of the training in `plan`, and the time, GPU-hours, energy and price of the run.

    Raises:
        NoPrediction: the plan has no training, or its time cannot be predicted. The message has the reason.
    """
    rest = _rest(plan)
    span = lowest, highest = rest.range
    high = rest.time(highest)
    return Prediction(
        trainer=rest.trainer,
        step=rest.step,
        remaining_tokens=rest.num_samples * rest.trainer.model.seq_length,
        range=span,
        low=rest.time(lowest),
        likely=rest.time(1),
        high=high,
        price_per_gpu_hour=price_per_gpu_hour(rest.stage.allocation.settings, plan.run.cluster),
        currency=plan.run.cluster.currency,
        gpu_model=rest.machine.gpu_model,
        is_measured=rest.kernels_are_measured,
        guesses=(*rest.step.guesses, *_power_guesses(rest.machine)),
        warnings=(
            *_restart_warnings(plan, rest, high),
            *_short_job_warnings(plan, rest, high),
            *(dataclasses.replace(problem, file="cluster") for problem in price_doubts(plan.run.cluster)),
            *_lead_warnings(plan, rest),
            *_host_warnings(rest),
        ),
    )


@record(kw_only=True)
class _Rest:
    """The rest of a run, and what its time depends on."""

    trainer: TrainerConfig
    machine: Machine
    stage: StagePlan
    costs: SaveCosts
    step: StepTime
    """A step with the full batch size."""
    smallest_step: StepTime
    """A step with the smallest batch size of the run."""
    steps: tuple[Steps, ...]

    @property
    def num_steps(self) -> int:
        """Number of steps."""
        return sum(each.count for each in self.steps)

    @property
    def num_samples(self) -> int:
        """Number of samples to read."""
        return sum(each.count * each.batch_size for each in self.steps)

    @property
    def range(self) -> tuple[float, float]:
        """Lowest and highest time of a step, relative to the predicted one: errors of the prediction, or hosts."""
        if self.trainer.model.num_moe_experts is not None:
            errors = EXPERTS_RANGE
        else:
            errors = DENSE_RANGE if self.kernels_are_measured else UNMEASURED_RANGE
        fastest, slowest = (self.with_host(host).total / self.step.total for host in self.hosts)
        return min(errors[0], fastest), max(errors[1], slowest)

    @property
    def kernels_are_measured(self) -> bool:
        """True if matrix products were measured on this GPU model."""
        return self.machine.measurements is not None and bool(self.machine.measurements.products)

    @property
    def hosts(self) -> tuple[float, float]:
        """Launch times of the fastest and the slowest host that is likely, relative to those of the prediction."""
        return MEASURED_HOSTS if self.step.host_is_measured else HOSTS

    def with_host(self, host: float) -> StepTime:
        """A step with the full batch size, whose host launches kernels in `host` times the measured time."""
        return predicted_step(self.trainer, self.machine, batch_sizes(self.trainer.training)[-1], host=host)

    def time(self, factor: float) -> RunTime:
        """The time if steps take `factor` times as long as predicted."""
        allocation = self.stage.allocation
        return run_time(
            factor * sum(each.count * self._step_s(each.batch_size) for each in self.steps),
            factor * self._num_evaluations * batches_per_evaluation(self.trainer) * self._forward_s,
            self._lost(factor * self.step.total),
            self._job,
            Resources(
                num_nodes=allocation.num_job_nodes,
                num_gpus=allocation.num_job_nodes * (allocation.gpus_per_node or allocation.ntasks_per_node),
                gpu_watts=self.machine.watts.value,
            ),
        )

    @property
    def _job(self) -> Job:
        """Times of each job."""
        job = Job(
            limit_s=self.stage.allocation.time_s,
            startup_s=self.costs.restart_s,
            lead_s=self.stage.signal_lead_s,
            last_save_s=self.costs.latency_s,
        )
        if job.training_s <= 0:
            raise NoPrediction("the time limit leaves no time to train")
        return job

    def _lost(self, step_s: float) -> float:
        """Part of the time that saves and failures take."""
        limit_s = self.stage.allocation.time_s
        lost = self.costs.lost(storage.save_interval_s(self.trainer.checkpoint, step_s, limit_s))
        if lost > MOST_LOST:
            raise NoPrediction(self._why_lost)
        return lost

    @property
    def _why_lost(self) -> str:
        """Why saves and failures take nearly all the time: the interval between saves, or the failures alone."""
        checkpoint, step_s = self.trainer.checkpoint, self.step.total
        configured_s = storage.save_interval_s(checkpoint, step_s)
        if (
            configured_s >= self.costs.best_interval_s
            or self.costs.lost(self.costs.best_interval_s) > MOST_LOST
        ):
            often = f"a failure is expected every {duration(self.costs.between_failures_s)}"
            return f"{often}, so the run would hardly progress"
        key = "save_interval" if storage.saves_by_steps(checkpoint, step_s) else "save_interval_minutes"
        often = f"checkpoint.{key} = {getattr(checkpoint, key):g}"
        save = duration(math.ceil(self.costs.latency_s))
        return f"{often} saves so often that the run would hardly progress: a save takes {save}"

    def _step_s(self, batch_size: int) -> float:
        """Seconds of a step with `batch_size` samples.

        A step takes a fixed time and a time for each microbatch. Both follow from the smallest batch and the full one.
        """
        training = self.trainer.training
        if training.rampup_batch_size is None or batch_size == training.global_batch_size:
            return self.step.total
        first = training.rampup_batch_size[0]
        share = (batch_size - first) / (training.global_batch_size - first)
        return self.smallest_step.total + share * (self.step.total - self.smallest_step.total)

    @property
    def _num_evaluations(self) -> int:
        """Evaluations of the split valid at each interval, and of valid and test at the end."""
        interval = self.trainer.training.eval_interval
        return 2 + (self.num_steps // interval if interval else 0)

    @property
    def _forward_s(self) -> float:
        """Seconds of the forward passes of a step, in proportion to those of the slowest stage."""
        slowest = max(self.step.stages, key=lambda stage: stage.forward + stage.backward)
        share = slowest.forward / (slowest.forward + slowest.backward)
        return share * (self.step.total - self.step.optimizer - self.step.data_parallel)


def _rest(plan: Plan) -> _Rest:
    """The rest of the planned run.

    Raises:
        NoPrediction: see `predict`.
    """
    trainer, stage, cluster = plan.trainer, plan.training, plan.run.cluster
    if plan.config.program is not None:
        raise NoPrediction("hpcgen predicts the time of its own trainer only, not of other programs")
    if trainer is None or stage is None:
        raise NoPrediction("no planned stage trains", f"plan the stage {TRAIN.name}")
    machine = machine_of_run(plan.run, trainer.training, stage.allocation)
    steps = tuple(remaining_steps(trainer.training, *_start(trainer)))
    if not steps:
        raise NoPrediction("the run is finished and has nothing left to train")
    sizes = batch_sizes(trainer.training)
    step = predicted_step(trainer, machine, sizes[-1])
    save_s = checkpointing.save_time_s(trainer, cluster.storage_write_gb_s)
    return _Rest(
        trainer=trainer,
        machine=machine,
        stage=stage,
        costs=storage.save_costs(trainer, save_s, cluster.startup_time_s, cluster.gpu_hours_between_failures),
        step=step,
        smallest_step=predicted_step(trainer, machine, sizes[0]) if len(sizes) > 1 else step,
        steps=steps,
    )


def _start(trainer: TrainerConfig) -> tuple[int, int]:
    """The iteration from which training continues, and the number of samples read before it.

    Raises:
        NoPrediction: they are unknown.
    """
    resumption = resuming.resumption_of(trainer)
    if resumption is None:
        return 0, 0
    try:
        if resumption.continues_from_unknown():
            raise NoPrediction(
                "only the trainer can read the iteration of the checkpoint that the run continues from"
            )
        found = resumption.record()
    except OSError as error:
        raise NoPrediction(f"{error.filename} cannot be read ({error.strerror})") from error
    return (found["iteration"], found["consumed_samples"]) if found else (0, 0)


def _power_guesses(machine: Machine) -> Iterator[str]:
    if not machine.watts.is_measured:
        yield str(machine.watts)
    yield f"a node with eight GPUs uses {NODE_WATTS:,.0f} W besides its GPUs ({NODE_WATTS_SOURCE})"


def _restart_warnings(plan: Plan, rest: _Rest, longest: RunTime) -> Iterator[Problem]:
    """Warns if the run may take more than a year, or if the job may not requeue itself often enough to complete it: at
    time limits and after failures.
    """
    stage, failures = rest.stage, round(longest.total_s / rest.costs.between_failures_s)
    restarts = longest.num_jobs - 1 + failures
    if longest.total_s > YEAR_S:  # more restarts would not help
        place = place_of(stage.kind, "nodes", plan.config, plan.run.cluster)
        reason = f"may be too few: the run may take up to {longest.total_s / YEAR_S:.1f} years"
        yield place.problem(reason, "hpcgen layouts --finish-in 30d finds how many finish in a month")
    elif (chain := stage.allocation.settings.chain) and restarts >= chain:
        reason = f"allows {counted(chain, 'job')}, but the run may need {restarts + 1}"
        place = place_of(stage.kind, "chain", plan.config, plan.run.cluster)
        yield place.problem(
            reason, f"set it to at least {restarts + 1}, or use more nodes or a longer time limit"
        )
    elif not chain and restarts > stage.allocation.max_restarts:
        reason = (
            f"allows {counted(stage.allocation.max_restarts, 'restart')}, but the run may need {restarts}"
        )
        place = place_of(stage.kind, "max_restarts", plan.config, plan.run.cluster)
        yield place.problem(
            reason, f"set it to at least {restarts}, or use more nodes or a longer time limit"
        )


def _short_job_warnings(plan: Plan, rest: _Rest, longest: RunTime) -> Iterator[Problem]:
    """Warns if each of several jobs spends much of its time on its start and its stop."""
    stage = rest.stage
    spent_s, limit_s = rest.costs.restart_s + stage.signal_lead_s, stage.allocation.time_s
    if longest.num_jobs > 1 and spent_s > MUCH_OVERHEAD * limit_s:
        reason = (
            f"is so short that each job spends {spent_s / limit_s:.0%} of it on its start and its stop "
            f"({duration(math.ceil(rest.costs.restart_s))} + {duration(stage.signal_lead_s)})"
        )
        better_s = math.ceil(spent_s / GOOD_OVERHEAD / 3600) * 3600
        place = place_of(stage.kind, "time", plan.config, plan.run.cluster)
        yield place.problem(reason, f"use {slurm_time(better_s)} or more, if the partition allows it")


def _lead_warnings(plan: Plan, rest: _Rest) -> Iterator[Problem]:
    """Warns if the lead of the signal, which is planned for slow steps, is too short for even slower ones."""
    step_s = rest.step.total
    evaluation_s = checkpointing.evaluation_s(rest.trainer, step_s)
    needed_s = checkpointing.signal_lead_s(step_s, rest.costs.latency_s, evaluation_s)
    if rest.stage.signal_lead_s < needed_s:
        reason = (
            f"results in a signal {duration(rest.stage.signal_lead_s)} before the time limit, which may be too late "
            f"for the last checkpoint if steps take {duration(step_s)}, as predicted"
        )
        place = place_of(rest.stage.kind, "signal_lead_s", plan.config, plan.run.cluster)
        yield place.problem(reason, f"set it to at least {needed_s}")


def _host_warnings(rest: _Rest) -> Iterator[Problem]:
    """Warns if GPUs wait for the host, which says more about the host and the layout than about the GPUs."""
    step = rest.step
    if step.host <= MUCH_WAITING * step.total:
        return
    reason = f"results in GPUs that wait {step.host / step.total:.0%} of a step for the host to launch kernels, as "
    if step.host_is_measured:
        reason += "predicted with the launch times of this cluster"
    else:
        shorter = 1 - rest.with_host(HOSTS[0]).total / step.total
        reason += "predicted with a measured host; one that is twice as fast makes the step "
        reason += f"{shorter:.0%} shorter"
    ways = ["more samples per microbatch"]
    training, has_adapters = rest.trainer.training, rest.trainer.lora.rank is not None
    if training.cuda_graph_impl == "none" and training.fp8 is None and not has_adapters:
        ways.append("training.cuda_graph_impl: transformer_engine")
    if rest.trainer.parallelism.tensor_model_parallel_size > 1:
        ways.append("less tensor parallelism")
    yield Problem("training.micro_batch_size", reason, f"try {one_of(ways)}")
