"""The run file: one document for all stages of a run. The trainer's sections are in trainer.contract.config."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from hpcgen.config.container import ContainerConfig
from hpcgen.config.corpus import CorpusConfig
from hpcgen.config.fields import EnvironmentName, MinimumVersion, Name, ProfileName, RunPath
from hpcgen.config.huggingface_export import ExportConfig
from hpcgen.config.image import ImageConfig
from hpcgen.config.notify import NotifyConfig
from hpcgen.config.program import ProgramConfig
from hpcgen.config.slurm import SlurmConfig
from hpcgen.config.tokenizer import TokenizerConfig
from trainer.contract.config import (
    AnswersSettings,
    BlendConfig,
    CheckpointConfig,
    Count,
    LoggingConfig,
    LoraConfig,
    ModelConfig,
    NonNegative,
    OptimizerConfig,
    ParallelismConfig,
    TrainingConfig,
)
from trainer.contract.evaluation import EvaluationSettings
from trainer.contract.generation import GenerationSettings
from trainer.contract.record import config_section


@config_section
class PathsConfig:
    """Paths of the run."""

    run_dir: RunPath
    """Directory for the run's logs, metrics and checkpoints, on storage shared by all nodes."""


@config_section
class DataConfig(BlendConfig):
    """Source of the training samples: `datasets`, `train`/`valid`/`test`, `mock`, or only a corpus, whose pairs are
    then used."""

    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    """Tokenizer of the corpus. Its vocabulary determines the size of the embedding."""
    corpus: CorpusConfig | None = None
    """Corpus that the data stages convert to .bin/.idx pairs; null if the data is already tokenized."""


@config_section
class PreflightConfig:
    """Node checks before training, and spare nodes."""

    node_health: bool = False
    """Check every node before training. A bad node is replaced by a spare. Without a spare, the job is requeued
    with the node excluded."""
    max_exclusions: NonNegative = 3
    """Maximum number of times the job requeues itself because of bad nodes."""
    spare_nodes: NonNegative = 0
    """Extra nodes to allocate beyond slurm.train.nodes or slurm.run.nodes. A spare replaces a node that is bad or
    fails. Implies node_health."""


@config_section
class TuneConfig:
    """Trials of the stage tune: candidates that train some steps each on the nodes of the training."""

    candidates: tuple[str, ...] = ()
    """Candidates to measure in addition to the run itself. Each is one or more assignments as for --set, such as
    "parallelism.tensor_model_parallel_size=2 training.micro_batch_size=4". Default of `hpcgen tune`: the layouts that
    `hpcgen layouts` finds."""
    steps: Count = 10
    """Number of measured steps of each candidate."""
    warmup_steps: NonNegative = 3
    """Number of steps before the measured ones. Recording CUDA graphs is added."""
    trial_minutes: Count = 10
    """Time limit of each candidate in minutes, including its start. A candidate without a result has then hung."""
    calibrate: bool = True
    """Also measure the kernels, transfers and host times that predictions for the candidates need, unless they were
    measured on the cluster before."""


TRAINER_SECTIONS = (
    *("preset", "model", "parallelism", "training", "optimizer", "lora", "checkpoint", "logging"),
    *("evaluation", "answers", "generation", "export", "tune"),
)
"""Keys of a run file that only hpcgen's trainer and its models use. A run file with `program` has none of them."""

OMITTED_SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 1, "hidden_size": 1, "num_attention_heads": 1, "seq_length": 1},
    "training": {"micro_batch_size": 1, "global_batch_size": 1, "train_iters": 1},
    "optimizer": {"lr": 1},
}
"""Sections that a run file may omit if none of its stages needs them (`Stage.needs`), each with the value to use
instead."""


@config_section
class RunConfig:
    """A run file. Every key is documented here; unknown keys are errors."""

    name: Name
    """Name of the run and of its Slurm jobs."""
    cluster: ProfileName
    """Cluster profile: a name (azure-ndv5, local) or the path of a .yaml file. Default: the one that defaults.yaml of
    the user or the site names."""
    requires_hpcgen: MinimumVersion | None = None
    """Oldest version of hpcgen that can read this file, such as ">=0.3"; null for any."""
    preset: Name | None = None
    """Preset that provides defaults for the model and optimizer (see `hpcgen presets`); null for none."""
    paths: PathsConfig
    """Paths of the run."""
    share: Literal["private", "group"] = "private"
    """Read access to the run's files: only you (private) or the run directory's group (group)."""
    secrets: tuple[EnvironmentName, ...] = ()
    """Names of environment variables that the job inherits from the submitting shell. Values are never written."""
    environment: dict[EnvironmentName, str] = field(default_factory=dict)
    """Environment variables of the job. They override the node type's and the cluster's."""
    container: ContainerConfig = field(default_factory=ContainerConfig)
    """Container in which stages run."""
    image: ImageConfig = field(default_factory=ImageConfig)
    """Container image that the image stage builds."""
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    """Slurm resources of each stage."""
    memory_check: Literal["error", "warning"] = "error"
    """Kind of problem if the estimate is more memory than the GPUs have: an error, so that nothing is rendered or
    submitted, or a warning."""
    preflight: PreflightConfig = field(default_factory=PreflightConfig)
    """Node checks before training, and spare nodes."""
    notify: NotifyConfig | None = None
    """Command that is told what happens to the job, such as a failure or a loss spike; null for none."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus, tokenizer and data blend."""
    program: ProgramConfig | None = None
    """Training program of your own, which stage run starts in place of hpcgen's trainer; null for hpcgen's trainer."""
    model: ModelConfig
    """Shape of the GPT model."""
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    """Model parallelism."""
    training: TrainingConfig
    """Batch size, length, precision, recomputation and evaluation."""
    optimizer: OptimizerConfig
    """AdamW and the learning-rate schedule."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters that are trained in place of the weights of the model in checkpoint.load."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Saving, loading and retention of checkpoints."""
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    """Metrics, TensorBoard, Weights & Biases and profiling."""
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    """Evaluation of checkpoints by the stage evaluate."""
    answers: AnswersSettings = field(default_factory=AnswersSettings)
    """Prompts that the model answers while it trains."""
    generation: GenerationSettings = field(default_factory=GenerationSettings)
    """Texts that the stage generate continues."""
    export: ExportConfig = field(default_factory=ExportConfig)
    """Model that the stage export writes."""
    tune: TuneConfig = field(default_factory=TuneConfig)
    """Trials of the stage tune."""
