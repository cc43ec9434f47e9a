"""The section `slurm` of a run file: the defaults, and a section for each stage."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from hpcgen.config.slurm import StageSettings
from hpcgen.stages import STAGES, Stage
from trainer.contract.config import FORBID_UNKNOWN_KEYS

T = TypeVar("T")


def _with_stages(cls: type[T]) -> type[T]:
    """Adds a field for each stage to a class that is about to become a dataclass."""
    for stage in STAGES.values():
        settings = stage.settings
        cls.__annotations__[stage.section] = settings
        documented = field(default_factory=settings, metadata={"doc": stage.settings_doc})
        setattr(cls, stage.section, documented)
    return cls


@dataclass(frozen=True, kw_only=True)
@_with_stages
class SlurmConfig:
    """Slurm settings for all stages (`defaults`) and for each."""

    __pydantic_config__: ClassVar[dict[str, Any]] = FORBID_UNKNOWN_KEYS

    defaults: StageSettings = field(default_factory=StageSettings)
    """For every stage that does not say otherwise."""

    def of(self, stage: Stage) -> StageSettings:
        """The section of a stage."""
        settings: StageSettings = getattr(self, stage.section)
        return settings
