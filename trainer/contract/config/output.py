"""Checkpoints, metrics and profiles of a run."""

from __future__ import annotations

from trainer.contract.config.path import FilePath
from trainer.contract.config.values import Count, NonNegative, PositiveFloat
from trainer.contract.record import config_section


@config_section
class CheckpointConfig:
    """Checkpoints in Megatron-LM's directory layout (torch_dist), loadable at any TP/PP/DP."""

    save: FilePath | None = None
    """Directory for checkpoints. Default: `checkpoints` in the run directory."""
    load: FilePath | None = None
    """Directory of checkpoints (hpcgen's or Megatron-LM's) to start from if `save` contains none, or one `iter_...`
    directory in it. Default: start from random weights."""
    finetune: bool = False
    """Load only the weights from `load`. The iteration, optimizer state and data order start from the beginning."""
    resize_vocabulary: bool = False
    """With finetune: allow more tokens than `load` has. In the embedding and the output layer, the rows of new tokens
    are the mean of the others, and all other tokens keep their IDs."""
    save_interval: Count | None = None
    """Optimizer steps between checkpoints. A checkpoint is always saved at the last step and when the job is asked to
    stop."""
    save_interval_minutes: PositiveFloat | None = None
    """Minutes between checkpoints, in addition to or in place of save_interval. Default without save_interval: 30."""
    async_save: bool = True
    """Write checkpoints in the background, one at a time, while training continues; false waits for the storage."""
    keep_last: Count | None = None
    """Number of newest checkpoints to keep. Older ones are removed when a new one is complete. Default: keep all."""
    keep_every: Count | None = None
    """Always keep checkpoints whose iteration is a multiple of this number."""
    keep_best: bool = False
    """Save a checkpoint after each evaluation that is the best so far, and keep the best one. Its iteration is in
    best_checkpointed_iteration.txt. The number is that of training.early_stopping, by default the validation loss."""
    changed: tuple[str, ...] = ()
    """Names of hyperparameters, such as optimizer.lr, that may differ from the checkpoint's, and so may the files that
    they name. A name counts once in a run. Later changes need the checkpoint's iteration: optimizer.lr@12000."""
    discard_up_to: NonNegative | None = None
    """Start over if all checkpoints are gone and the last one was at this iteration or earlier. Default: refuse to
    start over."""


@config_section
class LoggingConfig:
    """Metrics, TensorBoard, Weights & Biases and profiling."""

    log_interval: Count = 1
    """Optimizer steps between entries in metrics.jsonl and in the log."""
    tensorboard: bool = True
    """Write TensorBoard event files to `tensorboard` in the run directory."""
    wandb_project: str | None = None
    """Weights & Biases project to log to. WANDB_API_KEY comes from the environment; without it, W&B runs offline."""
    wandb_entity: str | None = None
    """Weights & Biases team or user. Default: your default entity."""
    wandb_exp_name: str | None = None
    """Name of the run in Weights & Biases. Default: `name`."""
    prometheus: bool = False
    """Write the newest figures for Prometheus to metrics.prom in the run directory, with each entry of the log."""
    prometheus_directory: FilePath | None = None
    """Directory of the text files that node_exporter reads on the job's first node. Default: the run directory."""
    prometheus_port: Count | None = None
    """Port at which rank 0 also serves the figures, at /metrics. Default: none."""
    prometheus_address: str = "127.0.0.1"
    """Address of the port. Other machines can connect only if it is one of the node's own, or 0.0.0.0."""
    profile_step_start: NonNegative | None = None
    """First iteration to record with torch's profiler; null disables profiling."""
    profile_step_end: Count | None = None
    """Iteration before which profiling stops. Default: profile_step_start + 2."""
    profile_ranks: tuple[NonNegative, ...] = (0,)
    """Ranks to profile."""
    record_memory_history: bool = False
    """Write a GPU memory snapshot with allocation stacks at the end of profiling."""
