"""Result of a search: layouts with their predictions, fastest first."""

from __future__ import annotations

from collections.abc import Mapping

from hpcgen.planning.layouts.name import layout_name
from hpcgen.planning.memory import MemoryEstimate, nccl_gib
from hpcgen.planning.step_time.result import StepTime
from trainer.contract.model.layout import Layout
from trainer.contract.record import record
from trainer.contract.rules.facts import Facts


@record(kw_only=True)
class RankedLayout:
    """A layout that is valid and fits, with its predictions."""

    facts: Facts
    """The run with this layout."""
    changes: Mapping[str, object]
    """Keys that differ from the run that the search began with, such as `parallelism.tensor_model_parallel_size`, and
    their values."""
    memory: MemoryEstimate
    """Memory of the fullest device."""
    free_share: float
    """Part of the memory of the fullest device that remains free next to tensors, CUDA and fragments. NCCL's buffers
    come out of it."""
    is_risky: bool
    """True if less remains than fragments and NCCL's buffers may take, or less than 3%. Such a run may end out of
    memory."""
    step: StepTime

    @property
    def device_gib(self) -> float:
        """Memory of a device."""
        assert self.facts.device_memory_gib is not None
        return self.facts.device_memory_gib

    @property
    def free_gib(self) -> float:
        """Free memory of the fullest device."""
        return self.free_share * self.device_gib

    @property
    def nccl_gib(self) -> float:
        """Part of the free memory that NCCL's buffers may take."""
        return nccl_gib(self.layout, self.facts.nvlink_devices)

    @property
    def layout(self) -> Layout:
        """The axes."""
        assert self.facts.layout is not None
        return self.facts.layout

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks per second."""
        return self.facts.training.global_batch_size * self.facts.model.seq_length / self.step.total

    @property
    def name(self) -> str:
        """See `layout_name`."""
        return layout_name(self.layout, self.facts.training)


@record(kw_only=True)
class Search:
    """The layouts of a run on one number of nodes."""

    num_nodes: int
    best: tuple[RankedLayout, ...]
    """The fastest layouts, fastest first. Empty if none is valid and fits."""
    own: RankedLayout | None
    """The layout of the run itself, also if it is not one of the best. None if it is not valid or does not fit."""
    num_valid: int
    """Number of layouts that were checked and obey all rules. Those that cannot be one of the best are not checked, so
    it is 0 only if there is none."""
    num_fitting: int
    """Number of those that fit the memory of the devices."""
