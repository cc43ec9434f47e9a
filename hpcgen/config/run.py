"""The run file: one document for all stages of a run. Its sections for the trainer are in trainer.contract.config."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpcgen.config.container import ContainerConfig
from hpcgen.config.corpus import CorpusConfig
from hpcgen.config.fields import EnvironmentName, FilePath, Name, RunPath
from hpcgen.config.image import ImageConfig
from hpcgen.config.preflight import PreflightConfig
from hpcgen.config.slurm import SlurmConfig
from hpcgen.config.tokenizer import TokenizerConfig
from trainer.contract.config import (
    FORBID_UNKNOWN_KEYS,
    BlendConfig,
    CheckpointConfig,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)


@dataclass(frozen=True, kw_only=True)
class PathsConfig:
    """Where the run lives."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    run_dir: RunPath
    """Directory for logs, metrics, checkpoints and markers of this run, on storage that every node sees."""


@dataclass(frozen=True, kw_only=True)
class DataConfig(BlendConfig):
    """Where samples come from. Give datasets, or train/valid/test, or mock; or a corpus alone, whose pairs are used."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """The tokenizer of the corpus; its vocabulary sizes the embedding."""
    corpus: CorpusConfig | None = None
    """The corpus that the data stages make .bin/.idx pairs of; null when the data is tokenized already."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A run file. Every key is documented here; unknown keys are errors."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    name: Name
    """Name of the run; Slurm shows it."""
    cluster: FilePath
    """Cluster profile: a name (azure-ndv5, local) or the path of a .yaml."""
    preset: Name | None = None
    """Shape and optimisation defaults to start from (`hpcgen presets`); null gives the whole shape here."""
    paths: PathsConfig
    """Where the run lives."""
    share: Literal["private", "group"] = "private"
    """Who may read what the run writes: only you, or the group of the run directory."""
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that the job takes from the submitting shell; values are never written."""
    environment: dict[EnvironmentName, str] = field(default_factory=dict)
    """Environment variables of the job, over those of node type and cluster."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """The container that stages run in."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """The image that the image stage makes."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """What each stage asks of Slurm."""
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    """Checks of the nodes before training starts on them, and nodes in reserve."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus, tokenizer and blend."""
    model: ModelConfig
    """The shape of the GPT."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """How the model is cut over ranks."""
    training: TrainingConfig
    """Batch, length, precision."""
    optimizer: OptimizerConfig
    """AdamW and its schedule."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """When and where checkpoints are written."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """What the trainer writes while it runs."""
