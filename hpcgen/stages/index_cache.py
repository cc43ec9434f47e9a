"""The stage index-cache: builds Megatron-Core's sample indices on CPUs, so that GPUs do not wait for them."""

from __future__ import annotations

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.inputs import blend_files
from hpcgen.planning.kind import Stage, Work
from hpcgen.planning.paths import trainer_data
from hpcgen.planning.resuming import loaded
from hpcgen.stages.train import trainer_files
from trainer.contract.config import TrainerConfig


class IndexCache(Stage):
    """Builds the sample indices of the training stage."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs the index builder with the training configuration, on which the names of the indices depend."""
        data, load = trainer_data(config), config.checkpoint.load
        return Work(
            arguments=("-m", "trainer.data.index_cache"),
            inputs=tuple(blend_files(config)),
            # what the run has read decides which indices it needs
            reads=(loaded(load).directory,) if load else (),
            writes=(data.cache_dir,) if data.cache_dir else (),
            files=trainer_files(trainer),
        )


STAGES = (IndexCache.of("index-cache"),)
