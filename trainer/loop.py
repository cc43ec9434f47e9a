"""The training loop: step, record, save and evaluate until the last iteration or a stop request."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from megatron.core.process_groups_config import ProcessGroupCollection

from trainer.answers import Answers
from trainer.checkpoint import Checkpoints
from trainer.contract.config import TrainerConfig
from trainer.contract.model.batch_size import Batches
from trainer.contract.validation import config_of_split
from trainer.contract.wording import ASKED_TO_STOP
from trainer.data.loader import data_iterators
from trainer.faults.stopping import StopRequest
from trainer.faults.stragglers import StragglerWatch
from trainer.faults.watch import Phase, Watch
from trainer.metrics.console import Log
from trainer.metrics.profiling import Profiler
from trainer.metrics.record import Metrics
from trainer.metrics.timers import Timers
from trainer.model.cuda_graphs import LayerGraphs
from trainer.step import DataIterators, StepResult, TrainingState, Vote, train_step
from trainer.validation import mean_losses


@dataclass(frozen=True)
class Instruments:
    """Work of a rank between steps that has no effect on results: profiles, CUDA graphs, straggler checks."""

    timers: Timers
    profiler: Profiler
    graphs: LayerGraphs
    stragglers: StragglerWatch

    def before(self, iteration: int) -> bool:
        """Do what is due before `iteration`. Returns whether that took time."""
        recorded, profiled = self.graphs.before(iteration), self.profiler.before(iteration)
        return recorded or profiled

    def close(self, iteration: int) -> None:
        """End recordings in progress before `iteration`."""
        self.profiler.close(iteration)
        self.graphs.close()


@dataclass(frozen=True)
class TrainingLoop:
    """The steps of one attempt, with saves and evaluations between them. Every rank runs the same loop."""

    state: TrainingState
    datasets: dict[str, torch.utils.data.Dataset | None]
    """Datasets by split. Splits without data are left out."""
    config: TrainerConfig
    groups: ProcessGroupCollection
    checkpoints: Checkpoints
    stop: StopRequest
    watch: Watch
    instruments: Instruments
    metrics: Metrics
    log: Log
    answers: Answers | None = None
    """The answers of the model to prompts, if the run has prompts."""

    def run(self) -> None:
        """Train from state.iteration to the last iteration or until asked to stop. The last step is always saved.

        Raises:
            NonFiniteError: see `train_step`.
        """
        batches = self._batches()
        self.watch.beat(Phase.TRAIN, self.state.iteration)
        self.metrics.paused("startup_s")
        # The attempt that saved this iteration may have stopped before the evaluation.
        self._evaluate()
        is_stopping = False
        while not self._is_finished() and not is_stopping:
            if self.instruments.before(self.state.iteration + 1):
                self.metrics.paused("recording_s")
            result = train_step(self.state, batches, self.config, self.groups, self._vote)
            is_stopping = result.vote.stop
            self._record(result)
            self._save_if_due(result.vote)
            if not is_stopping or self._is_complete():
                self._evaluate()
        if not is_stopping and not self._is_complete():
            self._end_early()
        self.instruments.close(self.state.iteration + 1)

    def _is_complete(self) -> bool:
        return self.state.iteration >= self.config.training.train_iters

    def _is_finished(self) -> bool:
        return self._is_complete() or self.state.best.reason_to_stop() is not None

    def _end_early(self) -> None:
        """End a run whose evaluations no longer improve, as at the last iteration."""
        iteration, reason = self.state.iteration, self.state.best.reason_to_stop()
        assert reason is not None
        self.log.line(reason)
        self.metrics.stop(iteration, reason)
        self.stop.agreed()
        self._save(wait=True)
        self._evaluate_split("test")
        if self.answers is not None and self.answers.last != iteration:
            self._answer(self.answers)

    def _batches(self) -> DataIterators:
        state, config = self.state, self.config
        remaining = Batches(config.training, state.iteration, state.consumed_samples)
        iterators = data_iterators(state.model, self.datasets["train"], config, self.groups, remaining)
        return [iterator and self.instruments.timers.waited_for(iterator) for iterator in iterators]

    def _vote(self) -> Vote:
        return dataclasses.replace(self.checkpoints.vote(), stop=self.stop.reason() is not None)

    def _record(self, result: StepResult) -> None:
        iteration = self.state.iteration
        self.watch.stepped(iteration)
        self.metrics.step(iteration, result)
        if self.checkpoints.advance(result.vote):
            self.metrics.paused("save_s")
        self.metrics.stragglers(iteration, self.instruments.stragglers.step())
        if result.vote.stop:
            reason = f"{ASKED_TO_STOP} ({self.stop.reason() or 'by a signal to another rank'})"
            self.log.line(f"iteration {iteration}: {reason}")
            self.metrics.stop(iteration, reason)

    def _save_if_due(self, vote: Vote) -> None:
        interval = self.config.checkpoint.save_interval
        is_leaving = vote.stop or self._is_complete()
        if is_leaving:
            self.stop.agreed()
        is_due = interval is not None and self.state.iteration % interval == 0
        if is_leaving or is_due or vote.save or self.checkpoints.retry_pending:
            self._save(wait=is_leaving)

    def _save(self, *, wait: bool) -> None:
        self.metrics.catch_up(self.state.iteration)
        self.watch.beat(Phase.SAVE)
        self.checkpoints.save(self.state, wait=wait)
        self.watch.beat(Phase.TRAIN, self.state.iteration)
        self.metrics.paused("save_s")

    def _evaluate(self) -> None:
        """Evaluate the splits and answer the prompts that are due."""
        state = self.state
        if self.answers is not None and self.answers.is_due(state.iteration, self.config):
            self._answer(self.answers)
        is_best = False
        for split in due_evaluations(state.iteration, self.config):
            losses = self._evaluate_split(split)
            if split == state.best.split:
                value = _of_rank_0((losses or {}).get(state.best.column), self.config)
                is_best = state.best.observe(state.iteration, value)
        self.watch.beat(Phase.TRAIN, state.iteration)
        if is_best and self.config.checkpoint.keep_best:
            self.watch.beat(Phase.SAVE)
            self.checkpoints.keep_best(state)
            self.watch.beat(Phase.TRAIN, state.iteration)
            self.metrics.paused("save_s")

    def _answer(self, answers: Answers) -> None:
        self._beat_evaluation()
        with self.instruments.timers.paused():
            answers.answer(self.state, self.config, self.groups, self._beat_evaluation)
        self.metrics.paused("evaluation_s")

    def _evaluate_split(self, split: str) -> dict[str, float] | None:
        """The losses of a split, which are recorded. None if there are none."""
        if split not in self.datasets:
            return None
        state, config = self.state, config_of_split(self.config, split)
        with self.instruments.timers.paused():
            losses = mean_losses(
                state.model,
                state.objective,
                self.datasets[split],
                config,
                self.groups,
                self._beat_evaluation,
            )
        seconds = self.metrics.paused("evaluation_s")
        self.metrics.evaluation(state.iteration, split, losses, config.training, seconds)
        return losses

    def _beat_evaluation(self) -> None:
        self.watch.beat(Phase.EVALUATE)


def _of_rank_0(value: float | None, config: TrainerConfig) -> float | None:
    """The value of rank 0, so that all ranks decide alike, whatever their sums are rounded to."""
    box = torch.tensor([math.nan if value is None else value], dtype=torch.float64, device=config.device)
    torch.distributed.broadcast(box, 0)
    found = float(box.item())
    return None if math.isnan(found) else found


def due_evaluations(iteration: int, config: TrainerConfig) -> list[str]:
    """Splits to evaluate after an iteration: validation sets at each interval and at the end, test only at the end."""
    training, sets = config.training, ["valid", *(each.split for each in config.data.validation)]
    if training.eval_iters == 0 or iteration == 0:
        return []
    if iteration == training.train_iters:
        return [*sets, "test"]
    if training.eval_interval is not None and iteration % training.eval_interval == 0:
        return sets
    return []
