"""Time of a layer, and of several that are recomputed together or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hpcgen.planning.setup import Setup
from hpcgen.planning.step_time.host import FORWARD_SHARE, with_waits
from hpcgen.planning.step_time.work import Part, Passes, Seconds, added
from trainer.contract.record import record


@record
class Layer:
    """Time of a layer for one microbatch."""

    kept: Passes
    """Without full recomputation."""
    recomputed: Passes
    """With it: the backward pass begins with a forward pass."""

    @classmethod
    def of(cls, setup: Setup, parts: Sequence[Part], host: float) -> Layer:
        """A layer with these parts, whose kernels the host launches in `host` seconds."""
        passes = added(part.passes for part in parts)
        again = sum((part.passes.forward for part in parts if _is_recomputed(setup, part)), Seconds())
        return cls(
            with_waits(passes + Passes(backward=again), host),
            with_waits(passes + Passes(backward=passes.forward), (1 + FORWARD_SHARE) * host),
        )


def _is_recomputed(setup: Setup, part: Part) -> bool:
    """True if selective recomputation computes `part` again. Experts include their activation function."""
    if part.module is None:
        return False
    return setup.recomputes(part.module) or (part.module == "moe_act" and setup.recomputes("moe"))


def chunk_time(setup: Setup, layers: Mapping[bool, Layer], kinds: Sequence[bool]) -> Passes:
    """Time of a model chunk whose layers have these kinds: True with experts, False if dense.

    With full recomputation, all layers are recomputed (uniform), or the first recompute_num_layers (block).
    """
    recomputed = 0
    if setup.recomputes_layers:
        is_uniform = setup.training.recompute_method == "uniform"
        recomputed = len(kinds) if is_uniform else setup.training.recompute_num_layers or 1
    again, rest = kinds[:recomputed], kinds[recomputed:]
    parts = []
    for kind, layer in layers.items():
        parts += [layer.recomputed.times(number)] if (number := again.count(kind)) else []
        parts += [layer.kept.times(number)] if (number := rest.count(kind)) else []
    return added(parts)
