"""A training run, from its configuration to its last checkpoint."""

from __future__ import annotations

import contextlib
import datetime
import gc
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.process_groups_config import ProcessGroupCollection

from trainer import checkpoint
from trainer.answers import open_answers
from trainer.contract.code import code_loading
from trainer.contract.code.code_record import SHA256_DIGITS
from trainer.contract.code.user_code import UserCode
from trainer.contract.config import ConfigError, TrainerConfig, fingerprint, to_dict
from trainer.contract.config.resolve import resolve
from trainer.contract.errors import Scope, TrainerError
from trainer.contract.files import finished
from trainer.contract.files.hashing import sha256
from trainer.contract.files.run_directory import RunDirectory, publish, set_aside
from trainer.contract.model.batch_size import batch_size_at
from trainer.contract.resuming import provenance
from trainer.contract.resuming.confirmations import Confirmations
from trainer.contract.resuming.record_shape import CONFIRMED
from trainer.contract.rules.engine import require
from trainer.contract.wording import counted
from trainer.data.datasets import Reading, open_datasets, plan
from trainer.data.index_files import LogLine
from trainer.data.loader import num_microbatches, reads_samples
from trainer.data.own import KEY as OWN_DATASET
from trainer.data.own_run import NEW, OwnReading, Saved, open_own
from trainer.data.progress import fresh, resumed
from trainer.distributed import groups, rendezvous
from trainer.distributed.peers import Peers
from trainer.distributed.rendezvous import Ranks
from trainer.faults import flight_records, lock
from trainer.faults.best import BestWatch
from trainer.faults.heartbeat import Heartbeat
from trainer.faults.spikes import SpikeWatch
from trainer.faults.stopping import StopRequest, announce
from trainer.faults.storage import at_rank_0
from trainer.faults.stragglers import StragglerWatch, gather_places
from trainer.faults.watch import Phase, Watch
from trainer.loop import Instruments, TrainingLoop
from trainer.loss import Objective
from trainer.metrics import repository
from trainer.metrics.console import Log
from trainer.metrics.profiling import Profiler
from trainer.metrics.record import Metrics
from trainer.metrics.start_up import StartUp
from trainer.metrics.timers import Timers
from trainer.model import cuda_graphs, experts, kernels
from trainer.model.build import build_model
from trainer.optimizer.build import build_optimizer
from trainer.optimizer.schedule import Schedule
from trainer.optimizer.weight_average import WeightAverage
from trainer.step import TrainingState

PEERS_TIMEOUT = datetime.timedelta(minutes=5)
"""Timeout of the ranks' second connection to the store, after all of them have met."""


def train(config: TrainerConfig, stop_file: Path | None = None, progress: bool = False) -> None:
    """Train from the newest checkpoint, or from random weights, to train_iters or until asked to stop.

    Writes DONE to the run directory if the last iteration is saved. Writes STOPPED if the run stops earlier.

    Raises:
        ConfigError: the configuration contradicts itself or the data.
        TrainerError: the ranks, the device or a checkpoint do not match the configuration.
        NonFiniteError: the loss or the gradient norm is not finite.
        LostPeersError: another rank is gone.
    """
    start_up = StartUp()
    require(config)
    config = resolve(config)
    ranks = rendezvous.find_ranks(os.environ)
    is_rank_0 = ranks.rank == 0
    stop = StopRequest(stop_file if is_rank_0 else None)
    log = Log(is_rank_0, progress)
    run = RunDirectory.of(config)
    flight_records.keep(run)
    cuda_graphs.prepare_nccl(config)
    process_groups = groups.initialize(config, ranks, os.environ)
    with groups.reporting_lost_peers(ranks, lambda: "while the ranks met"):
        store = rendezvous.open_store(ranks, os.environ, PEERS_TIMEOUT, hosts=False, waits=False)
    peers = Peers(ranks, store)
    start_up.met()
    with (
        Watch(run, ranks, peers, config.training) as watch,
        Heartbeat(run.heartbeat, watch) if is_rank_0 else contextlib.nullcontext(),
        groups.reporting_lost_peers(ranks, lambda: str(watch)),
    ):
        stop.answer_sigterm(
            ranks, peers, is_worth_saving=lambda: watch.has_stepped, shorten_timeout=watch.shorten_timeout
        )
        try:
            _Attempt(config, ranks, process_groups, run, stop, watch, log, start_up).train()
        except TrainerError as error:
            stop.agreed()
            announce(error, run)
            raise


@dataclass(frozen=True)
class _Attempt:
    """One attempt of a run, once the ranks have met."""

    config: TrainerConfig
    ranks: Ranks
    groups: ProcessGroupCollection
    run: RunDirectory
    stop: StopRequest
    watch: Watch
    log: Log
    start_up: StartUp

    def train(self) -> None:
        """Train from the newest checkpoint, and mark the end in the run directory."""
        config, run, log, watch = self.config, self.run, self.log, self.watch
        codes = at_rank_0(lambda: provenance.read_code(config), run.root)
        code_loading.use(codes)
        if at_rank_0(lambda: _open_run_directory(run, config, codes), run.root, "written"):
            early = at_rank_0(lambda: finished.early_end(run, config), run.root)
            last = early or config.training.train_iters
            log.line(f"{config.name}: iteration {last} is done, nothing to do")
            if early is None:
                _mark_end(run, last, config)
            else:
                groups.finalize()  # DONE says why
            return
        source = checkpoint.find(run.checkpoints, config, codes, log, lambda: watch.beat(Phase.START))
        at_rank_0(lambda: run.stopped.unlink(missing_ok=True), run.stopped, "removed")
        loop = self._prepare(source, codes)
        gc.collect()
        gc.freeze()  # scanning these permanent objects would take longer than launching a layer
        self._run(loop)
        watch.beat(Phase.END)
        loop.metrics.close()
        log.close()
        _mark_end(run, loop.state.iteration, config, loop.state.best.reason_to_stop())

    def _prepare(self, source: checkpoint.Source | None, codes: Mapping[str, UserCode]) -> TrainingLoop:
        """The loop that continues from `source`, or starts from random weights."""
        config, run, log, watch = self.config, self.run, self.log, self.watch
        origins = (
            source.origins
            if source
            else at_rank_0(lambda: provenance.examine(config, codes=codes).origins, run.root)
        )
        confirmed = source.confirmed if source else Confirmations(config.checkpoint.changed).after(())
        state = self._state(source)
        watch.beat(Phase.DATA, state.iteration)
        datasets, reading = _open_datasets(config, run, state, source, origins, log.line)

        answers = open_answers(config, run, state.iteration, log)
        timers = Timers(config.device)
        timers.attach(state.model, state.optimizer)
        places = gather_places(self.ranks, self.groups)
        stragglers = StragglerWatch(timers, places, self.ranks.rank, config.device)
        metrics = Metrics(config, run, log, timers, state.iteration, self.ranks.rank == 0)

        def record_start() -> None:
            directories = list(repository.directories(codes.values()))
            code = [_code_entry(each) for each in directories]
            start_up = self.start_up.record(watch)
            metrics.start(state.iteration, places, source, code, start_up, state.objective)
            _record_start(run, config, directories)

        # only now, since everything that can refuse to start has passed
        at_rank_0(record_start, run.root, "written")
        log.start(state.iteration, config.training.train_iters, state.objective.names)
        checkpoints = checkpoint.Checkpoints(
            run.checkpoints,
            config,
            self.groups,
            log,
            metrics.checkpoint,
            lambda: watch.beat(Phase.SAVE),
            {"origins": origins, CONFIRMED: confirmed},
            reading,
        )
        checkpoints.prepare(state)
        graphs = cuda_graphs.LayerGraphs(config, state, self.groups, log)
        instruments = Instruments(timers, Profiler(config, run, self.ranks.rank), graphs, stragglers)
        return TrainingLoop(
            state,
            datasets,
            config,
            self.groups,
            checkpoints,
            self.stop,
            watch,
            instruments,
            metrics,
            log,
            answers,
        )

    def _state(self, source: checkpoint.Source | None) -> TrainingState:
        """The state with the weights of `source`, or random ones."""
        config = self.config
        self.watch.beat(Phase.BUILD)
        state = build_state(config, self.groups, self.log)
        if source is not None:
            self.watch.beat(Phase.LOAD)
            tokens = config.model.vocab_size if config.checkpoint.resize_vocabulary else None
            checkpoint.load(source, state, self.groups, tokens)
        self.log.line(_summary(config, self.groups, source, state))
        return state

    def _run(self, loop: TrainingLoop) -> None:
        """Run the loop. An error is announced and recorded, and a save in progress is completed if it can be."""
        try:
            loop.run()
        except TrainerError as error:
            self.stop.agreed()
            announce(error, self.run)
            if error.scope is Scope.ALL_RANKS:
                # the other ranks are still there, so a save that waits for all of them can end
                _finish_save(loop.checkpoints, self.log)
            loop.metrics.stop(loop.state.iteration, str(error))
            loop.metrics.close()
            raise
        except Exception:
            loop.metrics.close()  # waits for the thread that writes the lines
            raise


def build_state(config: TrainerConfig, groups: ProcessGroupCollection, log: Log) -> TrainingState:
    """Build the model with random weights, and its optimizer."""
    chosen = kernels.choose(config)
    log.line(f"kernels: {chosen}")
    model = build_model(config, groups, chosen)
    optimizer = build_optimizer(config, model)
    spikes = SpikeWatch(config.training.loss_spike_factor, config.training.skip_loss_spikes)
    schedule = Schedule(config.optimizer, optimizer, config.training.train_iters)
    objective, routers = Objective(config, model), experts.routers(model)
    decay, best = config.training.ema_decay, BestWatch(config.training)
    if best.column not in (known := ("loss", *objective.names)):
        raise ConfigError(
            f"training.early_stopping.monitor: evaluations have no column {best.column!r}; they have {', '.join(known)}"
        )
    return TrainingState(
        model,
        optimizer,
        schedule,
        spikes,
        objective,
        best,
        routers,
        is_partly_frozen=bool(config.training.freeze),
        average=None if decay is None else WeightAverage(optimizer, decay),
        has_adapters=config.lora.rank is not None,
    )


def _open_datasets(
    config: TrainerConfig,
    run: RunDirectory,
    state: TrainingState,
    source: checkpoint.Source | None,
    origins: dict[str, Any],
    log: LogLine,
) -> tuple[dict[str, Any], Reading | OwnReading]:
    """Open the datasets of all splits. The reading counts what the run reads of its training data, on rank 0."""
    progress = fresh(config, origins)
    if source is not None and not source.weights_only:
        progress = resumed(config, origins, source.sections, state.iteration, state.consumed_samples)
    rows = config.model.num_rows
    blends = plan(config, run.index_cache, rows, progress=progress)
    is_needed = any(reads_samples(chunk, config.data) for chunk in state.model)
    datasets = open_datasets(blends, config, run.index_cache, rows, is_needed)
    if config.data.dataset is not None:
        saved = NEW if source is None or source.weights_only else _saved_dataset(source, config)
        own, own_reading = open_own(config, saved, progress, is_needed, log)
        return datasets | own, own_reading
    return datasets, Reading(blends["train"], datasets["train"], state.consumed_samples)


def _saved_dataset(source: checkpoint.Source, config: TrainerConfig) -> Saved:
    """Facts about the run's own dataset in the checkpoint."""
    record = source.sections
    is_other = any(change.name == OWN_DATASET and not change.is_content for change in source.changes)
    confirmations = Confirmations.of(config.checkpoint.changed, record)
    return Saved(
        consumed=record["consumed_samples"] if source.foreign is None else source.foreign.consumed_samples,
        dataset=None if is_other else record.get("dataset"),
        may_change=OWN_DATASET in confirmations.names,
    )


def _finish_save(checkpoints: checkpoint.Checkpoints, log: Log) -> None:
    """Complete the save that was in progress when the run failed. An error here is only logged."""
    try:
        checkpoints.finish()
    except TrainerError as error:
        log.line(str(error))


def _open_run_directory(run: RunDirectory, config: TrainerConfig, codes: Mapping[str, UserCode]) -> bool:
    """Create the run directory and remove FAILED of an earlier attempt. Returns whether the run is done.

    DONE and STOPPED stay until it is certain that the run does not start over, since they show that it was saved.

    Raises:
        TrainerError: the run is finished, and `config` differs from it.
        RunDirectoryBusyError: another process is training in the run directory.
    """
    run.root.mkdir(parents=True, exist_ok=True)
    run.refuse_foreign_links()
    busy = f"another process is training in {run.root}. Wait for it to end, or use another paths.run_dir"
    lock.hold(run.root / lock.RUN, busy)
    run.failed.unlink(missing_ok=True)
    is_done = finished.is_done(run, config, codes)
    set_aside(run.stacks)
    return is_done


def _record_start(
    run: RunDirectory, config: TrainerConfig, directories: Sequence[repository.CodeDirectory]
) -> None:
    """Record the configuration and code of this attempt, once all checks have passed."""
    run.done.unlink(missing_ok=True)
    publish(run.trained_with, json.dumps(to_dict(config), indent=1) + "\n")
    for directory in directories:
        run.code.mkdir(exist_ok=True)
        for name, content in directory.sources.items():
            publish(run.code / _copy_name(content, name), content)
        if directory.diff:
            # It shows what was removed, such as a password, so it is only for the owner.
            publish(run.code / _diff_name(directory), directory.diff, mode=0o600)


def _code_entry(directory: repository.CodeDirectory) -> dict[str, Any]:
    """A directory of the code in the metrics."""
    return {
        "directory": str(directory.path),
        "files": directory.hashes,
        "commit": directory.commit,
        "dirty": None if directory.commit is None else bool(directory.diff),
        "diff": _diff_name(directory) if directory.diff else None,
    }


def _diff_name(directory: repository.CodeDirectory) -> str:
    return _copy_name(directory.diff, f"{directory.path.name}.diff")


def _copy_name(content: bytes, name: str) -> str:
    return f"{sha256(content)[:SHA256_DIGITS]}-{name.replace('/', '.')}"


def _mark_end(run: RunDirectory, iteration: int, config: TrainerConfig, early: str | None = None) -> None:
    """Write DONE or STOPPED, then wait for all ranks. `early` says why a run ends before its last iteration."""
    if iteration >= config.training.train_iters:
        marker, text = run.done, f"{iteration}\n{fingerprint(config)}\n"
    elif early is not None:
        marker, text = run.done, f"{iteration}\n{fingerprint(config)}\n{early}\n"
    else:
        marker, text = run.stopped, f"{iteration}\n"
    at_rank_0(lambda: publish(marker, text), marker, "written")
    groups.finalize()


def _summary(
    config: TrainerConfig,
    groups: ProcessGroupCollection,
    source: checkpoint.Source | None,
    state: TrainingState,
) -> str:
    batch_size = batch_size_at(config.training, state.consumed_samples)
    sizes = (f"{name} {getattr(groups, name.lower()).size()}" for name in ("TP", "PP", "CP", "DP"))
    has_experts = config.model.num_moe_experts is not None
    expert_sizes = f", EP {groups.ep.size()} x ETP {groups.expt_tp.size()}" if has_experts else ""
    micro_batches = counted(num_microbatches(batch_size, config, groups), "microbatch", "microbatches")
    return (
        f"{config.name}: {_beginning(source)}, "
        f"to iteration {config.training.train_iters}; {counted(config.world_size, 'rank')} on {config.device}: "
        f"{' x '.join(sizes)}, VPP {config.parallelism.num_chunks}{expert_sizes}, "
        f"{micro_batches} of {config.training.micro_batch_size} per step, "
        f"{config.training.precision}"
    )


def _beginning(source: checkpoint.Source | None) -> str:
    if source is None:
        return "starts from random weights"
    if source.base is source.checkpoint:
        return f"starts new adapters of {source.path} (iteration {source.checkpoint.iteration})"
    if source.weights_only:
        return f"starts from the weights of {source.path} (iteration {source.checkpoint.iteration})"
    changed = f" with {', '.join(map(str, source.changes))}" if source.changes else ""
    return (
        f"continues from {source.path} (iteration {source.checkpoint.iteration}){changed}{_model_of(source)}"
    )


def _model_of(source: checkpoint.Source) -> str:
    """The model of the adapters that a checkpoint contains, for the log."""
    return "" if source.base is None else f" on the model {source.base.path}"
