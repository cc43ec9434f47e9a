"""How far a run has read its data when an attempt begins, and where the run will end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.contract.config import TrainerConfig
from trainer.contract.files import checkpoint_files
from trainer.contract.files.checkpoint_files import Checkpoint
from trainer.contract.files.run_directory import RunDirectory
from trainer.contract.model.batch_size import total_samples
from trainer.contract.resuming import hyperparameters, provenance, sampling
from trainer.contract.resuming.data_stages import StageEnd, stages_left
from trainer.contract.resuming.record_shape import origins
from trainer.contract.resuming.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class OneBlend:
    """Data of a checkpoint that does not record its streams: all of its samples come from one blend of Megatron-Core.

    Checkpoints of Megatron-LM and of the trainer of hpcgen 0.2.0 are such.
    """

    data: Mapping[str, Any]
    """Section `data` of its record."""
    pairs: Sequence[Mapping[str, Any] | None]
    """Identities of its training pairs; empty if they are not known."""
    seq_length: int
    seed: int
    num_samples: int
    """Number of samples that the blend was planned for."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The position of a run in its data."""

    consumed: int
    """Number of samples that the run has read."""
    stages: Sequence[StageEnd]
    """The current stage of the data and those that follow (data.stages). A run without stages has one."""
    pairs: Sequence[Mapping[str, Any]]
    """Identities of the configuration's training pairs, in order. Empty for mock data."""
    earlier: Sampling | OneBlend = field(default_factory=Sampling)
    """Samples that the run has read of each pair."""

    @property
    def end(self) -> int:
        """Number of samples that the run will have read at its end."""
        return self.stages[-1].end


def fresh(config: TrainerConfig, origins: Mapping[str, Any] | None = None) -> Progress:
    """The progress of a run that begins at its first sample. `origins` come from `provenance.examine`."""
    stages = stages_left(config.data, config.training, 0, 0)
    return Progress(consumed=0, stages=stages, pairs=_pairs(config, origins))


def resumed(
    config: TrainerConfig,
    origins: Mapping[str, Any],
    record: Mapping[str, Any],
    iteration: int,
    consumed: int,
) -> Progress:
    """The progress of a run that resumes from a checkpoint. `record` is the checkpoint's record. For a checkpoint of
    Megatron-LM, it has the sections that are known.
    """
    earlier = (
        sampling.from_dict(record["sampling"])
        if record.get("sampling")
        else _one_blend(config, record, iteration, consumed)
    )
    stages = stages_left(config.data, config.training, iteration, consumed)
    return Progress(consumed=consumed, stages=stages, pairs=_pairs(config, origins), earlier=earlier)


def of_next_attempt(config: TrainerConfig) -> Progress | None:
    """The progress with which the next attempt of a run will begin, judged by its newest checkpoint's record.

    None if this is a checkpoint of Megatron-LM, which only the trainer reads.

    Raises:
        OSError: the checkpoints or the pairs cannot be read.
    """
    newest = newest_checkpoint(config)
    if newest is None:
        return fresh(config, provenance.examine(config, codes={}).origins)
    record = newest.record
    if record is None:
        return None
    files = provenance.examine(config, record, codes={})
    differing = checkpoint_files.file_problems(Path("/"), files.to_hash, hashes=True)
    files.add_changed_pairs(list(differing), provenance.pairs_key(config))
    return resumed(config, files.origins, record, record["iteration"], record["consumed_samples"])


def newest_checkpoint(config: TrainerConfig) -> Checkpoint | None:
    """The checkpoint that the next attempt will resume from, judged by the records alone; None if it begins at 0."""
    paths = checkpoint_files.list_paths(RunDirectory.of(config).checkpoints)
    if not paths and config.checkpoint.load and not config.checkpoint.finetune:
        paths = checkpoint_files.paths_to_load(Path(config.checkpoint.load))
    found = map(checkpoint_files.describe, paths)
    return next((each for each in found if each.is_complete or each.is_foreign), None)


def _pairs(config: TrainerConfig, origins: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Identities of the training pairs; without `origins`, only their prefixes."""
    key = provenance.pairs_key(config)
    if origins is not None:
        return list(origins["pairs"].get(key, []))
    return [{"prefix": dataset.prefix} for dataset in config.data.datasets or config.data.train]


def _one_blend(
    config: TrainerConfig, record: Mapping[str, Any], iteration: int, consumed: int
) -> Sampling | OneBlend:
    current = hyperparameters.sections(config)
    data = record.get("data") or {}
    if data.get("mock") or data.get("dataset"):
        return Sampling()
    # Megatron-LM's pairs may be in a file that it does not save.
    if not (data.get("datasets") or data.get("train")):
        data = current["data"]
    key = "data.datasets" if data.get("datasets") else "data.train"
    training = {**current["training"], **record.get("training", {})}
    planned = hyperparameters.planned_training(
        {"training": training, "iteration": iteration, "consumed_samples": consumed}
    )
    return OneBlend(
        data=data,
        pairs=origins(record).get("pairs", {}).get(key, []),
        seq_length=record["model"].get("seq_length", config.model.seq_length),
        seed=training["seed"],
        num_samples=total_samples(planned),
    )
