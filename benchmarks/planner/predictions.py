"""Predicted steps of configurations, and the file of predictions that were frozen before the comparison."""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from benchmarks.planner.published import DATA, Configuration, Planned
from hpcgen.planning.step_time import estimate_step_time
from hpcgen.planning.step_time.kernels import Attention, Product, kernels_of

FROZEN = DATA / "predictions.csv"
FROZEN_COMMIT = "88459c25"
"""The commit that added the file, before anything was compared with it."""
SOFTMAX_BYTES = {"forward": 9, "backward": 11}
"""Bytes per score that a fused softmax and its dropout read and write in bf16, with a mask of one byte."""


@dataclass(frozen=True)
class Prediction:
    """The prediction for a configuration. Times are seconds."""

    configuration: str
    parts: dict[str, float]
    """The parts of StepTime by name, changed by what the published software did."""
    guesses: tuple[str, ...] = ()
    """See StepTime."""

    @property
    def step_s(self) -> float:
        """Time of the step."""
        return sum(self.parts.values())

    @property
    def transfers_s(self) -> float:
        """The part that waits for transfers between GPUs, without those of the pipeline."""
        return sum(self.parts.get(f"{axis}_parallel", 0) for axis in ("tensor", "context", "expert", "data"))

    @property
    def pipeline_s(self) -> float:
        """The part that waits for other pipeline stages."""
        return self.parts["pipeline_bubble"] + self.parts["pipeline_transfers"]


def predict(configuration: Configuration) -> Prediction:
    """The prediction for a published run: this trainer's, with what its software did differently."""
    planned, software = configuration.planned, configuration.software
    found = predict_planned(configuration.name, planned)
    parts = dict(found.parts)
    if software.unfused_attention:
        parts["compute"] += unfused_attention_s(planned)
    if software.dispatch == "deduplicated":
        parts["expert_parallel"] *= share_of_copies(planned)
    elif software.dispatch == "hidden":
        parts["expert_parallel"] = 0.0
    return dataclasses.replace(found, parts=parts)


def predict_planned(name: str, planned: Planned) -> Prediction:
    """The prediction for a planned run."""
    step = estimate_step_time(planned.setup, planned.machine, documents=planned.documents)
    names = (field.name for field in dataclasses.fields(step) if field.name not in ("stages", "guesses"))
    return Prediction(name, {name: getattr(step, name) for name in names}, step.guesses)


def unfused_attention_s(planned: Planned) -> float:
    """Seconds that the slowest stage computes longer if attention writes its scores to memory.

    The forward pass counts twice, because the published runs recompute it.
    """
    model, layout, kernels = planned.trainer.model, planned.setup.layout, kernels_of(planned.machine)
    batch = planned.trainer.training.micro_batch_size
    assert model.kv_channels
    seq, width = model.seq_length, model.kv_channels
    heads = batch * model.num_attention_heads // layout.tensor_model_parallel_size
    scores = Product(seq, seq, width, groups=heads)
    values = Product(seq, width, seq, groups=heads)
    one_pass = kernels.product(scores) + kernels.product(values)
    softmax = {
        direction: kernels.memory("softmax", direction, size * heads * seq**2)
        for direction, size in SOFTMAX_BYTES.items()
    }
    fused = Attention(seq, batch, heads // batch, heads // batch, width, width)
    forward = one_pass + softmax["forward"] - kernels.attention(fused)
    backward = 2 * one_pass + softmax["backward"] - kernels.attention(fused._replace(direction="backward"))
    stages = range(layout.pipeline_model_parallel_size)
    layers = max(map(layout.stage_layers, stages))
    return (2 * forward + backward) * layers * layout.num_microbatches * (1 + layout.bubble_fraction)


def share_of_copies(planned: Planned) -> float:
    """Copies of tokens that cross the network if a node gets one of each token, relative to one for each expert."""
    size, top = planned.setup.layout.expert_model_parallel_size, planned.trainer.model.moe_router_topk
    nodes = size / planned.machine.nvlink_devices
    return (1 - (1 - 1 / nodes) ** top) * nodes / top


def freeze(predictions: Iterable[Prediction]) -> None:
    """Writes the predictions to the file that is committed before the comparison."""
    rows = [
        {
            "configuration": each.configuration,
            "step_s": f"{each.step_s:.4g}",
            **{name: f"{value:.4g}" for name, value in each.parts.items()},
        }
        for each in predictions
    ]
    with FROZEN.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def frozen() -> dict[str, float]:
    """The frozen predictions: configuration -> seconds. Empty before they were frozen."""
    if not FROZEN.exists():
        return {}
    with FROZEN.open(encoding="utf-8", newline="") as file:
        return {row["configuration"]: float(row["step_s"]) for row in csv.DictReader(file)}
