"""The stage memory-test: measures on one node the memory that each pipeline stage of the training needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hpcgen.errors import Problem
from hpcgen.stages.stage import TRAINING, Export, Stage, Work
from hpcgen.stages.train import TRAIN

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig

CONFIG_FILE = "memory-test.config.json"


class MemoryTest(Stage):
    """Runs trainer.memory_test."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs a rank of each pipeline stage of the training, as many at once as the node has GPUs. Reads no data."""
        arguments = ("-m", "trainer.memory_test")
        if trainer is None:
            return Work(arguments=arguments)
        from hpcgen.planning.config_text import config_text
        from hpcgen.planning.memory import Setup, estimate_stage
        from trainer.contract.memory_test import MemoryTestConfig
        from trainer.contract.model.layout import Layout

        layout = Layout.make(trainer.model, trainer.parallelism, trainer.training, trainer.world_size)
        assert layout is not None  # the rules have accepted the training
        setup = Setup.of(trainer, layout)
        test = MemoryTestConfig(
            trainer=trainer,
            at_once=run.node_type.gpus_per_node or 1,
            estimated_gib=tuple(
                round(estimate_stage(setup, stage).total_gib, 4)
                for stage in range(layout.pipeline_model_parallel_size)
            ),
        )
        return Work(arguments=arguments, files={CONFIG_FILE: config_text(test)})

    def problems(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields a layout in which the shape of what a rank receives depends on its neighbors."""
        from trainer.contract.model.pipeline import LAYOUT, mtp_chunk

        if trainer is not None and mtp_chunk(trainer.parallelism) != -1:
            reason = "has MTP layers before the last part. Ranks would have to learn the sizes of what they receive "
            reason += "from each other, but memory-test runs each of them alone"
            yield Problem(f"parallelism.{LAYOUT}", reason, "measure the layout with mL in place of m|L")

    def results(self, config: RunConfig) -> str:
        """The file with the figures of every stage."""
        from trainer.contract.memory_test import RESULT

        return f"{config.paths.run_dir}/{RESULT}"

    @property
    def environment_of(self) -> str:
        """Training, since its variables affect the memory of libraries."""
        return TRAIN.name

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the variables of training."""
        yield from TRAIN.exports(run, config)


STAGES = (
    MemoryTest(
        name="memory-test",
        other_names=("memory-check", "oom-test"),
        order=78,
        summary="measures on one node whether the training fits its GPUs",
        settings_doc="Resources for measuring the memory of training.",
        uses_gpus=True,
        is_single_task=True,
        by_submitit=True,
        time_limit="30:00",
        reads_trainer_config=True,
        needs=TRAINING,
        own_variables={"MEMORY_TEST_CONFIG": f"RUN_DIR/jobs/JOBID/{CONFIG_FILE}"},
        config_file=CONFIG_FILE,
        config_variable="MEMORY_TEST_CONFIG",
    ),
)
