"""Two trainings as one of their ranks, and the time of a layer. Imports megatron.core: after `device.prepare`."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from trainer.contract.config import TrainerConfig
from trainer.distributed import groups
from trainer.distributed.rendezvous import Ranks
from trainer.metrics.console import Log
from trainer.model.cuda_graphs import prepare_nccl
from trainer.trials.steps import train

WARMUP_STEPS = 6
STEPS = 10


def write_launch_times(trainings: Sequence[TrainerConfig], ranks: Ranks, path: Path) -> None:
    """Train both, which must have the same layout, and write their `launch_times` as JSON."""
    prepare_nccl(trainings[0])
    process_groups = groups.initialize(trainings[0], ranks, os.environ)
    log = Log(ranks.rank == 0, progress=False)
    steps_s = [
        statistics.median(
            train(config, process_groups, log, config.model.num_tokens, WARMUP_STEPS, STEPS).step_s
        )
        for config in trainings
    ]
    path.write_text(json.dumps(launch_times(steps_s, trainings)))
    groups.finalize()


def launch_times(steps_s: Sequence[float], trainings: Sequence[TrainerConfig]) -> dict[str, float]:
    """Microseconds per microbatch, from the steps of the two trainings: of a layer as `us`, and of the rest of the step
    as `outside_us`, if noise leaves anything of it."""
    (fewer_s, more_s), (fewer, more) = steps_s, trainings
    microbatches = more.training.global_batch_size
    layer_us = (more_s - fewer_s) / (more.model.num_layers - fewer.model.num_layers) / microbatches * 1e6
    outside_us = fewer_s / microbatches * 1e6 - fewer.model.num_layers * layer_us
    return {"us": layer_us} | ({"outside_us": outside_us} if outside_us > 0 else {})
