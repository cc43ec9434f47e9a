"""The stage generate: continues the prompts of a file with the newest checkpoint of the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import PurePosixPath

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import tokenizer_name
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.kind import ONE_THREAD, Export, Stage, Work
from hpcgen.planning.paths import chat_of, checkpoint_directory
from hpcgen.planning.request import make_allocation
from hpcgen.planning.resuming import model_of_adapters
from hpcgen.stages.prompts import prompt_files, prompt_problems
from hpcgen.text import counted
from trainer.contract.config import TrainerConfig
from trainer.contract.generation import DIRECTORY, GenerationSettings


class Generate(Stage):
    """Runs trainer.inference."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Continues the prompts on all ranks. A replica of the model has TP x PP of them.

        Raises:
            ConfigErrors: there are no prompts.
        """
        settings, tokenizer = config.generation, config.data.tokenizer
        if settings.prompts is None:
            raise ConfigErrors([])  # `needs` reports it
        checkpoints, output = checkpoint_directory(config), _output(config)
        end = () if tokenizer.eod_token is None else (f"--eod-token={tokenizer.eod_token}",)
        return Work(
            arguments=(
                *("-m", "trainer.inference", checkpoints),
                *(f"--prompts={settings.prompts}", f"--output={output}"),
                *(f"--tokenizer={tokenizer_name(tokenizer)}", *end),
                *chat_options(config),
                *(f"--device={run.node_type.device}", f"--tensor-model-parallel-size={_tensor_size(config)}"),
                *_options(settings),
            ),
            inputs=prompt_files(config, settings.prompts),
            reads=(checkpoints, *model_of_adapters(config)),
            writes=(str(PurePosixPath(output).parent),),
            values={"output": output},
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields options and prompts that the trainer would refuse, and ranks that TP x PP does not divide."""
        for problem in run.config.generation.problems():
            yield dataclasses.replace(problem, path=f"generation.{problem.path}")
        if (prompts := config.generation.prompts) is not None:
            yield from prompt_problems(config, prompts, "generation.prompts")
        allocation = make_allocation(self, run.config, run.cluster, run.node_type)
        yield from _layout_problems(run.config, allocation.num_tasks)

    def results(self, config: RunConfig) -> str:
        """The file with the texts."""
        return _output(config)

    def exports(self, run: Run, config: RunConfig) -> Iterator[Export]:
        """Yields the number of threads."""
        yield ONE_THREAD


def chat_options(config: RunConfig) -> Iterator[str]:
    """The options of trainer.inference that name the chat template."""
    chat = chat_of(config)
    named = {
        "chat-template": chat.chat_template_file,
        "chat-template-name": chat.chat_template,
        "chat-date": chat.date,
    }
    yield from (f"--{option}={value}" for option, value in named.items() if value is not None)


def _tensor_size(config: RunConfig) -> int:
    return config.generation.tensor_model_parallel_size or config.parallelism.tensor_model_parallel_size


def _layout_problems(config: RunConfig, num_ranks: int) -> Iterator[Problem]:
    tensor, pipeline = _tensor_size(config), config.generation.pipeline_model_parallel_size
    if num_ranks % (tensor * pipeline) == 0:
        return
    reason = (
        f"results in TP x PP = {tensor} x {pipeline} = {tensor * pipeline}, which does not divide the "
        f"{counted(num_ranks, 'rank')} of the job"
    )
    hint = "use another size, or change slurm.generate.nodes or ntasks_per_node"
    yield Problem("generation.tensor_model_parallel_size", reason, hint)


def _output(config: RunConfig) -> str:
    settings = config.generation
    name = PurePosixPath(settings.prompts or "texts.jsonl").name
    return settings.output or f"{config.paths.run_dir}/{DIRECTORY}/{name}"


def _options(settings: GenerationSettings) -> Iterator[str]:
    """The options of trainer.inference that have the name of a key, where the run file changes the default."""
    defaults = GenerationSettings()
    others = {"prompts", "output", "tensor_model_parallel_size", "stop"}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in others and value != getattr(defaults, field.name):
            yield f"--{field.name.replace('_', '-')}={value}"
    for string in settings.stop:
        yield f"--stop={string}"


STAGES = (Generate.of("generate"),)
