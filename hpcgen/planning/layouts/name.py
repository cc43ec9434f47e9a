"""How a layout is called."""

from __future__ import annotations

import itertools

from trainer.contract.config import TrainingConfig
from trainer.contract.config.training import RECOMPUTED_BY_DEFAULT
from trainer.contract.model.layout import Layout
from trainer.contract.wording import counted


def layout_name(layout: Layout, training: TrainingConfig) -> str:
    """The layout in the common notation, without axes of size 1: "TP4 PP8 VPP5 DP8 MBS1, recompute mlp".

    An uneven pipeline has the layers of its stages: "PP16 DP8 MBS1, 3+14x4+2 layers".
    """
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
    return " ".join([*sizes, f"MBS{training.micro_batch_size}"]) + _stages(layout) + _recomputed(training)


def _stages(layout: Layout) -> str:
    """The numbers of layers of the stages, unless they are equal."""
    runs = itertools.groupby(map(layout.stage_layers, range(layout.pipeline_model_parallel_size)))
    counts = [(layers, len([*stages])) for layers, stages in runs]
    texts = (f"{number}x{layers}" if number > 1 else f"{layers}" for layers, number in counts)
    return f", {'+'.join(texts)} layers" if len(counts) > 1 else ""


def _recomputed(training: TrainingConfig) -> str:
    """The recomputed parts, with the number of layers of each chunk if it is not all of them."""
    if training.recompute_granularity is None:
        return ""
    if training.recompute_granularity == "selective":
        return f", recompute {'+'.join(training.recompute_modules or RECOMPUTED_BY_DEFAULT)}"
    if training.recompute_method == "block":
        return f", recompute {counted(training.recompute_num_layers or 1, 'layer')}"
    return ", recompute all"
