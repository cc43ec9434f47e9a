"""hpcgen data download, extract, concat and prepare: one task of the stage of that name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.data.stage import run_stage, task_options, verify_option
from hpcgen.stages import STAGES

if TYPE_CHECKING:
    from hpcgen.data.unit import DataStage

HELP: dict[DataStage, str] = {
    "download": "Fetch the files of the corpus that are not there yet.",
    "extract": "Uncompress the files of the corpus.",
    "concat": "Join the extracted files into exactly num_output_files files.",
    "prepare": "Make the .bin/.idx pairs straight from the compressed files, in one pass.",
}


def _command(stage: DataStage, text: str) -> click.Command:
    @click.command(stage, help=text)
    @task_options
    def command(**options: Any) -> None:
        run_stage(stage, **options)

    return verify_option(command) if STAGES[stage].makes_pairs else command


commands = {stage: _command(stage, text) for stage, text in HELP.items()}
