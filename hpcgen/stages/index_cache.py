"""The stage index-cache: builds Megatron-Core's sample indices on CPUs, so that GPUs do not wait for them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcgen.stages.stage import TRAINER_CONFIG, TRAINER_FILE, TRAINING, Stage, Work
from hpcgen.stages.train import trainer_files

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig


class IndexCache(Stage):
    """Builds the sample indices of the training stage."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs the index builder with the training configuration, on which the names of the indices depend."""
        from hpcgen.planning.paths import trainer_data
        from hpcgen.planning.resuming import checkpoints_read

        data, load = trainer_data(config), config.checkpoint.load
        datasets = (*data.datasets, *data.train, *data.valid, *data.test)
        files = tuple(f"{dataset.prefix}{suffix}" for dataset in datasets for suffix in (".idx", ".bin"))
        return Work(
            arguments=("-m", "trainer.data.index_cache"),
            inputs=files,
            datasets=files,
            # what the run has read decides which indices it needs
            reads=(checkpoints_read(load),) if load else (),
            writes=(data.cache_dir,) if data.cache_dir else (),
            files=trainer_files(trainer),
        )


STAGES = (
    IndexCache(
        name="index-cache",
        other_names=("index", "build-index", "indices"),
        order=70,
        summary="builds Megatron's sample indices on CPUs before training",
        settings_doc="Resources for building Megatron's sample indices before training.",
        is_single_task=True,
        by_submitit=True,
        time_limit="4:00:00",
        reads_trainer_config=True,
        needs=TRAINING,
        own_variables=TRAINER_CONFIG,
        config_file=TRAINER_FILE,
        config_variable="TRAINER_CONFIG",
    ),
)
