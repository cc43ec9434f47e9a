"""hpcgen data download, extract, concat and prepare: run one task of a data stage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from hpcgen.cli.data.stage import run_stage, task_options, verify_option
from hpcgen.stages import STAGES

if TYPE_CHECKING:
    from hpcgen.data.unit import DataStage

HELP: dict[DataStage, str] = {
    "download": "Download the missing files of the corpus.",
    "extract": "Make plain JSON Lines from compressed and Parquet files.",
    "concat": "Join the extracted files into num_output_files files.",
    "prepare": "Make .bin/.idx pairs directly from the files of the corpus.",
}


def _command(stage: DataStage, text: str) -> click.Command:
    @click.command(stage, help=text)
    @task_options
    def command(**options: Any) -> None:
        run_stage(stage, **options)

    return verify_option(command) if STAGES[stage].makes_pairs else command


commands = {stage: _command(stage, text) for stage, text in HELP.items()}
