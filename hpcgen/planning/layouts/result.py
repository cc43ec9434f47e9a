"""What a search finds: layouts with their predictions, fastest first."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from hpcgen.planning.memory import MemoryEstimate
from hpcgen.planning.step_time.result import StepTime
from trainer.contract.model.layout import Layout
from trainer.contract.record import record
from trainer.contract.rules.facts import Facts
from trainer.contract.wording import counted


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
    """Part of the memory of the fullest device that remains free."""
    is_risky: bool
    """True if less remains than fragments and NCCL's buffers may take, or less than 3%. Such a run may end out of
    memory."""
    step: StepTime

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
        """The layout in the common notation, without axes of size 1: "TP4 PP8 VPP5 DP8 MBS1, recompute mlp".

        An uneven pipeline has the layers of its stages: "PP16 DP8 MBS1, 3+14x4+2 layers".
        """
        layout, training = self.layout, self.facts.training
        axes = {
            "TP": layout.tensor_model_parallel_size,
            "PP": layout.pipeline_model_parallel_size,
            "VPP": layout.virtual_pipeline_model_parallel_size,
            "CP": layout.context_parallel_size,
            "EP": layout.expert_model_parallel_size,
            "ETP": layout.expert_tensor_parallel_size if layout.expert_data_parallel_size else 1,
            "DP": layout.data_parallel_size,
        }
        sizes = [f"{axis}{size}" for axis, size in axes.items() if size > 1]
        return " ".join([*sizes, f"MBS{training.micro_batch_size}"]) + self._stages + self._recomputed

    @property
    def _stages(self) -> str:
        """The numbers of layers of the stages, unless they are equal."""
        runs = itertools.groupby(
            map(self.layout.stage_layers, range(self.layout.pipeline_model_parallel_size))
        )
        counts = [(layers, len([*stages])) for layers, stages in runs]
        texts = (f"{number}x{layers}" if number > 1 else f"{layers}" for layers, number in counts)
        return f", {'+'.join(texts)} layers" if len(counts) > 1 else ""

    @property
    def _recomputed(self) -> str:
        """What is recomputed, with the number of layers of each chunk if it is not all of them."""
        training = self.facts.training
        if training.recompute_granularity is None:
            return ""
        if training.recompute_granularity == "selective":
            return f", recompute {'+'.join(training.recompute_modules or ('core_attn',))}"
        if training.recompute_method == "block":
            return f", recompute {counted(training.recompute_num_layers or 1, 'layer')}"
        return ", recompute all"


@record(kw_only=True)
class Search:
    """The layouts of a run on one number of nodes."""

    num_nodes: int
    best: tuple[RankedLayout, ...]
    """The fastest layouts, fastest first. Empty if none is valid and fits."""
    own: RankedLayout | None
    """The layout of the run itself, also if it is not one of the best. None if it is not valid or does not fit."""
    num_valid: int
    """Number of layouts that obey all rules."""
    num_fitting: int
    """Number of those that fit the memory of the devices."""
