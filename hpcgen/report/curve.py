"""The loss curve of a run as text and as an image."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hpcgen.files import private_file, publish
from hpcgen.runs.history import decode
from hpcgen.text import counted, harmless
from trainer.contract.files.metrics_line import number_or_none
from trainer.contract.files.regular_file import open_regular
from trainer.contract.files.run_directory import RunDirectory

BLOCKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Curve:
    """Training losses by iteration, and the losses of evaluations by split and iteration (nats per token)."""

    train: dict[int, float]
    evaluations: dict[str, dict[int, float]]


def read_curve(run_dir: Path) -> Curve:
    """Reads the curve from a run's metrics and ignores damaged lines, such as an incomplete last one."""
    train: dict[int, float] = {}
    evaluations: dict[str, dict[int, float]] = {}
    with open_regular(run_dir / RunDirectory.METRICS) as file:
        for event in filter(None, map(decode, file)):
            loss = number_or_none(event.get("loss"))
            if loss is None:
                continue
            if event["event"] == "step":
                train[event["iteration"]] = loss
            elif event["event"] == "evaluation":
                evaluations.setdefault(harmless(str(event.get("split"))), {})[event["iteration"]] = loss
    return Curve(train, evaluations)


def draw_text(curve: Curve, width: int = 60) -> str:
    """Draws the training loss as a line of blocks, each the mean of several steps, and lists the evaluation losses.

    The loss of a single step varies with its batch, so the line ends with the mean of the last tenth of the steps.
    """
    losses = list(curve.train.values())
    if not losses:
        return "no steps: the run was already done"
    share = max(1, -(-len(losses) // width))
    means = [
        sum(losses[start : start + share]) / len(losses[start : start + share])
        for start in range(0, len(losses), share)
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    blocks = "".join(BLOCKS[round((mean - low) / span * (len(BLOCKS) - 1))] for mean in means)
    last = losses[-max(1, len(losses) // 10) :]
    which = "last" if len(last) == 1 else f"mean of the last {len(last):,}"
    mean = f"{sum(last) / len(last):.3f} ({which} of {counted(len(losses), 'step')})"
    text = f"loss {losses[0]:.3f} {blocks} {mean}"
    for split, values in curve.evaluations.items():
        text += (
            f"\n{split} loss {', '.join(f'{loss:.3f} at {iteration}' for iteration, loss in values.items())}"
        )
    return text


def draw_png(curve: Curve, path: Path, title: str) -> Path | None:
    """Draws the curve as a PNG file. Returns None without matplotlib, which is optional."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(list(curve.train), list(curve.train.values()), linewidth=1, label="train")
    for split, values in curve.evaluations.items():
        axes.plot(list(values), list(values.values()), marker="o", linestyle="--", label=split)
    axes.set(title=title, xlabel="iteration", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.legend()
    with private_file(path) as file:
        figure.savefig(file, dpi=120, format="png")
        publish(file, path)
    pyplot.close(figure)
    return path
