"""Batch sizes: train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x copies of the model.

Sources: runtime/config.py, _set_batch_related_parameters and _batch_assertion; transformers/integrations/deepspeed.py,
trainer_config_process, for "auto".
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeGuard

from hpcgen.errors import Problem
from hpcgen.planning.deepspeed.file import CONFIG
from hpcgen.text import counted

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
SIZES = (TRAIN, MICRO, STEPS)


def data_parallel_size(config: Mapping[str, Any], copies: int) -> int:
    """Number of micro-batches that all ranks process at the same time. `copies` is the number of copies of the model.

    Ranks of a sequence-parallel group share a micro-batch (runtime/config.py, DeepSpeedConfig.__init__). Ranks of
    AutoTP count one by one, because DeepSpeed multiplies by its world size there.
    """
    sequence = config.get("sequence_parallel_size", 1)
    return copies // sequence if _is_size(sequence) else copies


def filled(config: Mapping[str, Any], copies: int) -> dict[str, Any]:
    """The configuration with the third batch size, if two are numbers. Hugging Face's Trainer fills in "auto"."""
    ranks = data_parallel_size(config, copies)
    given = {size: config[size] for size in SIZES if config.get(size) is not None}
    if len(given) != 2 or not all(map(_is_size, given.values())):
        return dict(config)
    if TRAIN not in given:
        missing = {TRAIN: given[MICRO] * given[STEPS] * ranks}
    elif MICRO not in given:
        missing = {MICRO: given[TRAIN] // (given[STEPS] * ranks)}
    else:
        missing = {STEPS: given[TRAIN] // (given[MICRO] * ranks)}
    return {**given, **missing, **{key: value for key, value in config.items() if key not in SIZES}}


def problems(config: Mapping[str, Any], copies: int) -> Iterator[Problem]:
    """Yields missing and contradictory batch sizes. Expects values of valid types."""
    ranks = data_parallel_size(config, copies)
    train: Any
    train, micro, steps = (config.get(size) for size in SIZES)
    if train is None and micro is None:
        reason = f"has neither {TRAIN} nor {MICRO}; DeepSpeed needs one of them"
        yield Problem(CONFIG, reason, f"set {MICRO} and {STEPS}")
        return
    if not _is_size(train) or "auto" in (micro, steps):
        return
    parts = ((MICRO, micro), (STEPS, steps))
    given = [(key, value) for key, value in parts if _is_size(value)]
    product = ranks * math.prod(value for _, value in given)
    if train % product or (len(given) == len(parts) and train != product):
        factors = "".join(f"{key} = {value} x " for key, value in given)
        is_complete = len(given) == len(parts)
        verb = "is not" if is_complete else "is not a multiple of"
        hint = (
            f"use {product}, or remove one of the three sizes"
            if is_complete
            else f"use a multiple of {product}"
        )
        yield Problem(
            f"{CONFIG}.{TRAIN}", f"{verb} {factors}{counted(ranks, 'copy', 'copies')} of the model", hint
        )


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
