"""hpcgen data download, extract and so on: run one task of a data stage."""

from __future__ import annotations

from typing import Any

import click

from hpcgen.cli.data.stage import run_stage, task_options, verify_option
from hpcgen.data.stages import DATA_STAGES
from hpcgen.data.stages.base import DataStage


def _command(stage: DataStage) -> click.Command:
    @click.command(stage.name)
    @task_options
    def command(**options: Any) -> None:
        run_stage(stage.name, **options)

    return verify_option(command) if stage.makes_pairs else command


commands = {name: _command(stage) for name, stage in DATA_STAGES.items()}
