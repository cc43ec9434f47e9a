"""The stages of a run and of a cluster, by the names that commands and template files use."""

from __future__ import annotations

from typing import Literal, get_args

Stage = Literal[
    "image",
    "download",
    "extract",
    "concat",
    "tokenize",
    "prepare",
    "index-cache",
    "train",
    "nccl-test",
    "node-health",
    "tensorboard",
]

STAGES: tuple[Stage, ...] = get_args(Stage)
"""In the order of a model's life, then the cluster's own."""

CLUSTER_STAGES: tuple[Stage, ...] = ("image", "nccl-test", "node-health", "tensorboard")
"""Stages that need no model: they can be rendered for a cluster alone."""

ARRAY_STAGES: tuple[Stage, ...] = ("download", "extract", "concat", "tokenize", "prepare")
"""Stages that make the corpus, as job arrays: the names of hpcgen.data.unit too."""

TRAINER_STAGES: tuple[Stage, ...] = ("index-cache", "train")
"""Stages that read the trainer's configuration."""

SUBMITTED_STAGES: tuple[Stage, ...] = (*ARRAY_STAGES, *TRAINER_STAGES)
"""Stages that submitit can run as well; the others are rendered."""

FRAMES = ("base", "data")
"""Templates that those of stages extend: of all, and of ARRAY_STAGES."""

GPU_STAGES: frozenset[Stage] = frozenset(("train", "nccl-test", "node-health"))
"""Stages that take every GPU of their nodes."""


def section(stage: str) -> str:
    """The stage's key under `slurm`: nccl-test -> nccl_test."""
    return stage.replace("-", "_")
