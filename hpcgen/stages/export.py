"""The stage export: writes the newest checkpoint of the run as a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from hpcgen.config.loader import Run
from hpcgen.config.run import RunConfig
from hpcgen.config.tokenizer import tokenizer_name, tokenizer_problems
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.allocation import Allocation
from hpcgen.planning.inputs import chat_template_file, chat_template_options, tokenizer_files
from hpcgen.planning.kind import Stage, Work
from hpcgen.planning.paths import checkpoint_directory
from hpcgen.planning.resuming import model_of_adapters
from trainer.contract.config import TrainerConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.families.huggingface import nearest_family


class Export(Stage):
    """Runs trainer.huggingface."""

    def work(
        self, run: Run, config: RunConfig, allocation: Allocation, trainer: TrainerConfig | None
    ) -> Work:
        """Exports the checkpoint with the run's tokenizer. One byte per token is not a tokenizer of transformers.

        Raises:
            ConfigErrors: there is no directory.
        """
        settings, tokenizer = config.export, config.data.tokenizer
        if settings.directory is None:
            raise ConfigErrors([])  # `needs` reports it
        checkpoints, directory = checkpoint_directory(config), settings.directory
        options = {
            "--dtype": settings.dtype,
            "--family": settings.family,
            "--tokenizer": None if tokenizer.kind == "bytes" else tokenizer_name(tokenizer),
            "--eos-token": tokenizer.eod_token,
            **chat_template_options(config),
        }
        return Work(
            arguments=(
                *("-m", "trainer.huggingface", "export", checkpoints, f"--to={directory}"),
                *(f"{name}={value}" for name, value in options.items() if value is not None),
                *(("--adapter",) if settings.adapter else ()),
            ),
            inputs=(*tokenizer_files(config), *chat_template_file(config)),
            reads=(checkpoints, *model_of_adapters(config)),
            large=(str(PurePosixPath(directory).parent),),
            values={"destination": directory},
        )

    def problems(self, run: Run, config: RunConfig, trainer: TrainerConfig | None) -> Iterator[Problem]:
        """Yields each key of the model that its family cannot express, and export.adapter without adapters."""
        if run.config.export.adapter and run.config.lora.rank is None:
            reason = "has no effect, because lora.rank is null, so the run has no adapters"
            yield Problem("export.adapter", reason, "remove it to export the model")
        yield from tokenizer_problems(run.config.data.tokenizer, "export.directory")
        model = resolve_model(run.config.model)
        family = nearest_family(model, run.config.export.family)
        for misfit in family.misfits(model):
            reason = f"cannot be exported: {family.architecture} does not support it"
            hint = misfit.needed and f"use {misfit.needed}"
            yield Problem(f"model.{misfit.key}", reason, hint)

    def results(self, config: RunConfig) -> str:
        """The directory of the exported model."""
        return config.export.directory or ""


STAGES = (Export.of("export"),)
