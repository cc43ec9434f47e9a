"""Activities between the steps that do not affect training results: profiles, CUDA graphs, straggler checks."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.faults.stragglers import StragglerWatch
from trainer.metrics.profiling import Profiler
from trainer.metrics.timers import Timers
from trainer.model.cuda_graphs import LayerGraphs


@dataclass(frozen=True)
class Instruments:
    """Instruments of one rank."""

    timers: Timers
    profiler: Profiler
    graphs: LayerGraphs
    stragglers: StragglerWatch

    def before(self, iteration: int) -> bool:
        """Do what is due before `iteration`. Returns whether that took time."""
        recorded, profiled = self.graphs.before(iteration), self.profiler.before(iteration)
        return recorded or profiled

    def close(self, iteration: int) -> None:
        """End recordings in progress before `iteration`."""
        self.profiler.close(iteration)
        self.graphs.close()
