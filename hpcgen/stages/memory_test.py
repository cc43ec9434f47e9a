"""The stage memory-test: measures on one node the memory that each pipeline stage of the training needs."""

from __future__ import annotations

from collections.abc import Iterator

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.errors import Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.config_text import config_text
from hpcgen.planning.kind import Export, Stage, Work
from hpcgen.planning.memory import estimate_stage
from hpcgen.planning.setup import Setup
from hpcgen.stages.train import TRAIN
from trainer.contract.config import TrainerConfig
from trainer.contract.memory_test import RESULT, MemoryTestConfig
from trainer.contract.model.layout import Layout
from trainer.contract.model.pipeline import LAYOUT, mtp_chunk


class MemoryTest(Stage):
    """Runs trainer.memory_test."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Runs a rank of each pipeline stage of the training, as many at once as the node has GPUs. Reads no data."""
        arguments = ("-m", "trainer.memory_test")
        if trainer is None:
            return Work(arguments=arguments)
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
        return Work(arguments=arguments, files={self.config_file: config_text(test)})

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields a layout in which the shape of what a rank receives depends on its neighbors."""
        if trainer is not None and mtp_chunk(trainer.parallelism) != -1:
            reason = "has MTP layers before the last part. Ranks would have to learn the sizes of what they receive "
            reason += "from each other, but memory-test runs each of them alone"
            yield Problem(f"parallelism.{LAYOUT}", reason, "measure the layout with mL in place of m|L")

    def results(self, config: RunConfig) -> str:
        """The file with the figures of every stage."""
        return f"{config.paths.run_dir}/{RESULT}"

    @property
    def environment_of(self) -> str:
        """Training, since its variables affect the memory of libraries."""
        return TRAIN.name

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the variables of training."""
        yield from TRAIN.exports(run, config)


STAGES = (MemoryTest.of("memory-test"),)
