"""The stage generate: continues the prompts of a file with the newest checkpoint of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from hpcgen.errors import ConfigErrors, Problem
from hpcgen.stages.stage import Export, Stage, Work

if TYPE_CHECKING:
    from hpcgen.config.loader import Run
    from hpcgen.config.run import RunConfig
    from hpcgen.planning.allocation import Allocation
    from trainer.contract.config import TrainerConfig
    from trainer.contract.generation import GenerationSettings


class Generate(Stage):
    """Runs trainer.inference."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Continues the prompts on all ranks. A replica of the model has TP x PP of them.

        Raises:
            ConfigErrors: TP x PP does not divide the number of ranks.
        """
        from hpcgen.config.validation import describe
        from hpcgen.planning.paths import checkpoint_directory
        from hpcgen.planning.trainer_tokenizer import tokenizer_files, tokenizer_name

        settings, tokenizer = config.generation, config.data.tokenizer
        tensor = settings.tensor_model_parallel_size or config.parallelism.tensor_model_parallel_size
        problem = _layout_problem(tensor, settings.pipeline_model_parallel_size, allocation.num_tasks)
        if problem is not None:
            raise ConfigErrors([describe(problem, run.document, run.config)])
        checkpoints, output = checkpoint_directory(config), _output(config)
        end = () if tokenizer.eod_token is None else (f"--eod-token={tokenizer.eod_token}",)
        prompts = settings.prompts or ""
        return Work(
            arguments=(
                *("-m", "trainer.inference", checkpoints),
                *(f"--prompts={prompts}", f"--output={output}"),
                *(f"--tokenizer={tokenizer_name(tokenizer)}", *end),
                *(f"--device={run.node_type.device}", f"--tensor-model-parallel-size={tensor}"),
                *_options(settings),
            ),
            inputs=(prompts, *tokenizer_files(tokenizer)),
            reads=(checkpoints,),
            writes=(str(PurePosixPath(output).parent),),
            values={"output": output},
        )

    def problems(self, run: Run, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields missing prompts, and options that the trainer would refuse."""
        from hpcgen.planning.trainer_tokenizer import tokenizer_problems

        settings = run.config.generation
        if settings.prompts is None:
            yield Problem("generation.prompts", "is missing", "name a JSON Lines file with prompts")
        if mistake := settings.mistake():
            name, _, reason = mistake.partition(" ")
            yield Problem(f"generation.{name}", reason)
        yield from tokenizer_problems(run.config.data.tokenizer, "generation.prompts")

    def results(self, config: RunConfig) -> str:
        """The file with the texts."""
        return _output(config)

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the number of threads."""
        yield Export("OMP_NUM_THREADS", "1", "One OpenMP thread per rank; more would oversubscribe its CPUs.")


def _layout_problem(tensor: int, pipeline: int, num_ranks: int) -> Problem | None:
    if num_ranks % (tensor * pipeline) == 0:
        return None
    reason = (
        f"results in TP x PP = {tensor} x {pipeline} = {tensor * pipeline}, which does not divide the {num_ranks} "
        "ranks of the job"
    )
    hint = "change it, or slurm.generate.nodes or ntasks_per_node"
    return Problem("generation.tensor_model_parallel_size", reason, hint, depends_on=("slurm", "parallelism"))


def _output(config: RunConfig) -> str:
    from trainer.contract.generation import DIRECTORY

    settings = config.generation
    name = PurePosixPath(settings.prompts or "texts.jsonl").name
    return settings.output or f"{config.paths.run_dir}/{DIRECTORY}/{name}"


def _options(settings: GenerationSettings) -> Iterator[str]:
    """The options of trainer.inference that have the name of a key, where the run file changes the default."""
    from trainer.contract.generation import GenerationSettings

    defaults = GenerationSettings()
    others = {"prompts", "output", "tensor_model_parallel_size", "stop"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in others and value != getattr(defaults, field.name):
            yield f"--{field.name.replace('_', '-')}={value}"
    for string in settings.stop:
        yield f"--stop={string}"


STAGES = (
    Generate(
        name="generate",
        order=86,
        summary="continues the prompts of a file with the newest checkpoint",
        settings_doc="Resources for generating text.",
        uses_gpus=True,
        one_node_by_default=True,
        by_submitit=True,
        time_limit="4:00:00",
    ),
)
