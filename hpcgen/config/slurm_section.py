"""The section `slurm` of a run file: defaults and a section for each stage."""

from __future__ import annotations

from dataclasses import field
from typing import TypeVar

from hpcgen.config.slurm import ArraySettings, StageSettings
from hpcgen.config.stages import STAGE_ROWS, StageRow, stage_called
from trainer.contract.config.section import config_section

T = TypeVar("T")


def _with_stages(cls: type[T]) -> type[T]:
    """Adds a field for each stage to a class before it becomes a dataclass."""
    for stage in STAGE_ROWS.values():
        settings = ArraySettings if stage.is_array else StageSettings
        cls.__annotations__[stage.section] = settings
        documented = field(default_factory=settings, metadata={"doc": stage.settings_doc})
        setattr(cls, stage.section, documented)
    return cls


@config_section
@_with_stages
class SlurmConfig:
    """Slurm settings for all stages (`defaults`) and for each stage."""

    defaults: StageSettings = field(default_factory=StageSettings)
    """Defaults for all stages."""

    def of(self, stage: StageRow) -> StageSettings:
        """The section of a stage."""
        settings: StageSettings = getattr(self, stage.section)
        return settings


def section_called(word: str) -> str:
    """The section of the stage with this name, here or in other programs; empty if there is none."""
    stage = stage_called(word)
    return stage.section if stage else ""
