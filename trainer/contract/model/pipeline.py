"""How the layers of the model are divided over the chunks of a pipeline, evenly or not.

Chunks are in pipeline order: chunk i is on stage i % PP, and is virtual stage i // PP there.
"""

from __future__ import annotations

import functools
import itertools
import operator
import re
from collections.abc import Iterator, Sequence
from typing import Any

from trainer.contract.config import ModelConfig, ParallelismConfig
from trainer.contract.problem import Problem
from trainer.contract.wording import counted

ACCOUNTED_KEYS = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
"""Keys that count the embedding and the loss as layers of their stages."""
LAYOUT = "pipeline_model_parallel_layout"
UNEVEN_KEYS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
    *ACCOUNTED_KEYS,
    LAYOUT,
)
"""Keys for pipelines whose stages have different numbers of layers."""
VPP = "virtual_pipeline_model_parallel_size"
PIPELINE_KEYS = ("pipeline_model_parallel_size", VPP, *UNEVEN_KEYS)
"""The keys on which the division of the layers depends."""
MAX_LAYOUT = 100_000
"""Maximum number of characters of a layout whose repetitions are written out."""


def uneven_keys(parallelism: ParallelismConfig) -> list[str]:
    """The keys for an uneven pipeline that are set."""
    return [key for key in UNEVEN_KEYS if getattr(parallelism, key)]


def split_problems(
    num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int | None = None
) -> Iterator[Problem]:
    """The first mistake in the keys for an uneven pipeline, if there is one."""
    yield from _split_problems(num_layers, _pipeline_values(parallelism), mtp_num_layers)


_pipeline_values = operator.attrgetter(*PIPELINE_KEYS)


def _with_pipeline(values: Sequence[Any]) -> ParallelismConfig:
    """A section with these values of PIPELINE_KEYS."""
    return ParallelismConfig(**dict(zip(PIPELINE_KEYS, values, strict=True)))


@functools.lru_cache(maxsize=1024)  # a search for layouts asks for the same pipelines many times
def _split_problems(
    num_layers: int, values: Sequence[Any], mtp_num_layers: int | None
) -> tuple[Problem, ...]:
    return tuple(_found_problems(num_layers, _with_pipeline(values), mtp_num_layers))


def _found_problems(
    num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int | None
) -> Iterator[Problem]:
    """The problems of `split_problems`.

    Source: megatron/core/transformer/transformer_config.py, TransformerConfig.__post_init__, and
    pipeline_parallel_layer_layout.py.
    """
    keys = uneven_keys(parallelism)
    if not keys:
        return
    stages = parallelism.pipeline_model_parallel_size
    if stages == 1:
        reason = "needs parallelism.pipeline_model_parallel_size > 1, but it is 1"
        yield Problem(
            f"parallelism.{keys[0]}",
            reason,
            "remove it, or use more pipeline stages",
            about=("parallelism.pipeline_model_parallel_size",),
        )
    elif len({_kind(key) for key in keys}) > 1:
        other = next(key for key in keys if _kind(key) != _kind(keys[-1]))
        yield Problem(
            f"parallelism.{keys[-1]}",
            f"cannot be combined with parallelism.{other}",
            "use one of them",
            about=(f"parallelism.{other}",),
        )
    elif keys[0] == LAYOUT:
        yield from _layout_problems(num_layers, parallelism, mtp_num_layers or 0)
    else:
        yield from _count_problems(num_layers, parallelism, keys)


def chunk_layers(
    num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int | None = None
) -> tuple[int, ...] | None:
    """Number of layers of each model chunk, in pipeline order; None if they cannot be divided this way.

    It does not include the MTP layers, which are always in the last chunk.
    """
    return _chunk_layers(num_layers, _pipeline_values(parallelism), mtp_num_layers)


@functools.lru_cache(maxsize=1024)
def _chunk_layers(
    num_layers: int, values: Sequence[Any], mtp_num_layers: int | None
) -> tuple[int, ...] | None:
    parallelism = _with_pipeline(values)
    chunks = parallelism.num_chunks
    if any(split_problems(num_layers, parallelism, mtp_num_layers)):
        return None
    if parallelism.pipeline_model_parallel_layout is not None:
        return tuple(row.count("t") for row in layout_rows(parallelism.pipeline_model_parallel_layout))
    per_stage = _layers_of_stages(num_layers, parallelism)
    if per_stage is None or any(layers % chunks for layers in per_stage):
        return None
    split = [layers // chunks for _ in range(chunks) for layers in per_stage]
    # The embedding and the loss take the place of a layer.
    split[0] -= parallelism.account_for_embedding_in_pipeline_split
    split[-1] -= parallelism.account_for_loss_in_pipeline_split
    return tuple(split) if min(split) >= 0 else None


@functools.lru_cache(maxsize=64)
def layout_rows(layout: str) -> tuple[str, ...]:
    """The chunks of a layout as strings of E (embedding), t (transformer layer), m (MTP layer) and L (loss).

    Raises:
        ValueError: the layout is too long when its repetitions are written out.
    """
    text = re.sub(r"[,\s]", "", layout)
    for pattern in (r"\(([^()]+)\)\*(\d+)", r"(.)\*(\d+)"):
        length = len(text) + sum(len(found[1]) * int(found[2]) for found in re.finditer(pattern, text))
        if length > MAX_LAYOUT:
            raise ValueError(f"has more than {MAX_LAYOUT:,} characters when its repetitions are written out")
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return tuple(text.split("|"))


def almost_even_layout(num_layers: int, chunks: int, mtp_num_layers: int = 0) -> str:
    """A layout whose chunks have the same number of layers, except that the first ones may have one more."""
    each, more = divmod(num_layers, chunks)
    rows = [f"t*{each + (index < more)}" for index in range(chunks)]
    return f"E{'|'.join(rows)}{'m' * mtp_num_layers}L"


def layout_of(chunk_layers: Sequence[int], mtp_num_layers: int = 0) -> str:
    """The layout whose chunks have these numbers of layers, such as Et*3|(t*4|)*14t*2mL."""
    first, *between, last = map(_repeated, chunk_layers)
    runs = [(row, len([*equal])) for row, equal in itertools.groupby(between)]
    middle = "".join(f"({row}|)*{number}" if number > 1 else f"{row}|" for row, number in runs)
    return f"E{first}|{middle}{last}{'m' * mtp_num_layers}L"


def _repeated(number: int) -> str:
    return "t" * number if number <= 2 else f"t*{number}"


def mtp_chunk(parallelism: ParallelismConfig) -> int:
    """Index of the model chunk with the MTP layers, from the last one: -1, or -2 for a layout such as Et|tm|L."""
    layout = parallelism.pipeline_model_parallel_layout
    return -1 if layout is None else _mtp_row(layout)


@functools.lru_cache(maxsize=64)
def _mtp_row(layout: str) -> int:
    rows = layout_rows(layout)
    return next((index - len(rows) for index, row in enumerate(rows) if "m" in row), -1)


def mtp_stage(parallelism: ParallelismConfig) -> int:
    """Pipeline stage of the MTP layers."""
    return parallelism.pipeline_model_parallel_size + mtp_chunk(parallelism)


def embedding_stages(model: ModelConfig, parallelism: ParallelismConfig) -> list[int]:
    """Pipeline stages with a copy of the embedding: the first stage, the stage with the MTP layers, and the last stage
    if the embedding is tied."""
    stages = {0}
    if model.mtp_num_layers is not None:
        stages.add(mtp_stage(parallelism))
    if not model.untie_embeddings_and_output_weights:
        stages.add(parallelism.pipeline_model_parallel_size - 1)
    return sorted(stages)


def core_layout(
    num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int | None = None
) -> list[list[str]] | None:
    """Megatron-Core's pipeline_model_parallel_layout for the keys of an uneven pipeline. None if it is even."""
    chunks = chunk_layers(num_layers, parallelism, mtp_num_layers)
    if chunks is None or not uneven_keys(parallelism):
        return None
    rows = [["decoder"] * layers for layers in chunks]
    rows[0].insert(0, "embedding")
    rows[mtp_chunk(parallelism)] += ["mtp"] * (mtp_num_layers or 0)
    rows[-1].append("loss")
    return rows


def _kind(key: str) -> str:
    """The method of division that a key belongs to. Megatron-Core refuses keys of several methods."""
    return key.partition("_")[0]


def _layers_of_stages(num_layers: int, parallelism: ParallelismConfig) -> list[int] | None:
    """Number of layers of each stage. The embedding and the loss count as layers if the keys say so."""
    first, last = (
        parallelism.num_layers_in_first_pipeline_stage,
        parallelism.num_layers_in_last_pipeline_stage,
    )
    first_stages = [] if first is None else [first]
    last_stages = [] if last is None else [last]
    accounted = (
        parallelism.account_for_embedding_in_pipeline_split + parallelism.account_for_loss_in_pipeline_split
    )
    layers_left = num_layers + accounted - sum(first_stages) - sum(last_stages)
    stages_left = parallelism.pipeline_model_parallel_size - len(first_stages) - len(last_stages)
    if stages_left == 0:
        return None if layers_left else [*first_stages, *last_stages]
    if layers_left <= 0 or layers_left % stages_left:
        return None
    return [*first_stages, *[layers_left // stages_left] * stages_left, *last_stages]


def _count_problems(
    num_layers: int, parallelism: ParallelismConfig, keys: Sequence[str]
) -> Iterator[Problem]:
    """Mistakes in the numbers of layers of the first and last stage, or in what counts as a layer."""
    stages, chunks = (
        parallelism.pipeline_model_parallel_size,
        parallelism.num_chunks,
    )
    per_stage = _layers_of_stages(num_layers, parallelism)
    uneven = () if per_stage is None else [layers for layers in per_stage if layers % chunks]
    if uneven:
        yield Problem(
            f"parallelism.{keys[0]}",
            f"results in a stage of {uneven[0]} layers, which VPP = {chunks} does not divide",
            "",
        )
    elif per_stage is None and _kind(keys[0]) == "account":
        total = f"{num_layers} + {len(keys)} = {num_layers + len(keys)}"
        reason = (
            f"results in model.num_layers + {len(keys)} = {total} layers, which PP = {stages} does not divide"
        )
        yield Problem(
            f"parallelism.{keys[0]}",
            reason,
            "change model.num_layers or the number of pipeline stages",
            about=("model.num_layers",),
        )
    elif per_stage is None:
        left = num_layers - sum(getattr(parallelism, key) for key in keys)
        reason = f"leaves {left} of {num_layers} layers for {counted(stages - len(keys), 'other stage')}"
        yield Problem(f"parallelism.{keys[0]}", f"{reason}, which cannot share them evenly", "")


def _layout_problems(
    num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int
) -> Iterator[Problem]:
    """Mistakes in pipeline_model_parallel_layout."""
    try:
        rows = layout_rows(parallelism.pipeline_model_parallel_layout or "")
    except ValueError as error:
        yield Problem(f"parallelism.{LAYOUT}", str(error), "write a shorter layout")
        return
    stages, text = parallelism.pipeline_model_parallel_size, "".join(rows)
    chunks, rest = divmod(len(rows), stages)
    hint = _example(num_layers, parallelism, mtp_num_layers)
    # one message: after a mistake, the counts below would be wrong as well
    if strange := sorted(set(text) - set("EtmL")):
        known = "E (embedding), t (transformer layer), m (MTP layer), L (loss), |, commas, and repetitions "
        known += "such as t*3 or (tt|)*2"
        yield Problem(f"parallelism.{LAYOUT}", f"has {strange[0]!r}", f"use {known}")
    elif [text.find("E"), text.rfind("E"), text.find("L")] != [0, 0, len(text) - 1] or not (
        rows[0] and rows[-1]
    ):
        yield Problem(f"parallelism.{LAYOUT}", "must begin with its only E and end with its only L", hint)
    elif text.count("t") != num_layers:
        yield Problem(
            f"parallelism.{LAYOUT}",
            f"has {text.count('t')} layers, but model.num_layers = {num_layers}",
            hint,
            about=("model.num_layers",),
        )
    elif text.count("m") != mtp_num_layers:
        yield Problem(
            f"parallelism.{LAYOUT}",
            f"has {counted(text.count('m'), 'm')}, but model.mtp_num_layers = {mtp_num_layers}",
            hint,
            about=("model.mtp_num_layers",),
        )
    elif mtp_num_layers and (
        problem := _mtp_problem(
            rows, stages, (not rest and _with_mtp_before_loss(rows)) or hint or "write mL"
        )
    ):
        yield problem
    elif rest:
        yield Problem(
            f"parallelism.{LAYOUT}",
            f"has {len(rows)} parts between |, which PP = {stages} does not divide",
            hint,
        )
    elif not all(rows):
        yield Problem(
            f"parallelism.{LAYOUT}", f"has no layer in part {rows.index('') + 1} of {len(rows)}", hint
        )
    elif chunks != parallelism.num_chunks:
        reason = f"does not fit parallelism.{LAYOUT}, which has {len(rows)} parts for {stages} stages"
        yield Problem(
            f"parallelism.{VPP}",
            reason,
            f"set it to {chunks if chunks > 1 else 'null'}",
            about=("parallelism.pipeline_model_parallel_layout",),
        )


def _mtp_problem(rows: Sequence[str], stages: int, hint: str) -> Problem | None:
    """The problem of MTP layers in the wrong place; None if the place is right."""
    found = re.fullmatch(r"[^m]*m+(\|?)L", "|".join(rows))
    if found is None:
        reason = "must have all MTP layers (m) after the last t, directly before L or |L"
    elif found[1] and stages == 2:
        reason = "has MTP layers (m) on the first stage, where Megatron-Core does not support them"
    else:
        return None
    return Problem(f"parallelism.{LAYOUT}", reason, hint)


def _with_mtp_before_loss(rows: Sequence[str]) -> str:
    """A hint with the MTP layers of the same layout moved to the loss. Empty if that leaves a part without a layer."""
    moved = [row.replace("m", "") for row in rows]
    moved[-1] = moved[-1].replace("L", "m" * "".join(rows).count("m") + "L")
    short = re.sub(r"(.)\1{2,}", lambda found: f"{found[1]}*{len(found[0])}", "|".join(moved))
    return f"use for example {short}" if all(moved) else ""


def _example(num_layers: int, parallelism: ParallelismConfig, mtp_num_layers: int) -> str:
    """A hint with a layout that is almost even."""
    parts = parallelism.pipeline_model_parallel_size * parallelism.num_chunks
    is_short = parts <= min(num_layers, 16)
    return f"use for example {almost_even_layout(num_layers, parts, mtp_num_layers)}" if is_short else ""
