"""The stages of a run and of a cluster, by the names that commands and template files use."""

from __future__ import annotations

from typing import Literal, get_args

Stage = Literal["image", "tokenize", "train", "nccl-test", "node-health", "tensorboard"]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order of a model's life, then the cluster's own."""

CLUSTER_STAGES: tuple[Stage, ...] = ("image", "nccl-test", "node-health", "tensorboard")
"""Stages that need no model: they can be rendered for a cluster alone."""

SUBMITTED_STAGES: tuple[Stage, ...] = ("tokenize", "train")
"""Stages that submitit can run as well; the others are rendered."""

GPU_STAGES: frozenset[Stage] = frozenset(("train", "nccl-test", "node-health"))
"""Stages that take every GPU of their nodes."""


def section(stage: str) -> str:
    """The stage's key under `slurm`: nccl-test -> nccl_test."""
    return stage.replace("-", "_")
