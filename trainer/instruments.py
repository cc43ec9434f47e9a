"""What looks at the steps from the side: none of it changes what is trained."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.profiling import Profiler
from trainer.stragglers import StragglerWatch
from trainer.timers import Timers


@dataclass(frozen=True)
class Instruments:
    """Those of one rank."""

    timers: Timers
    profiler: Profiler
    stragglers: StragglerWatch
