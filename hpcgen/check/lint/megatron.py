"""Megatron-LM's options, and the equivalent keys of a run file."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping

from hpcgen.check.lint.launch import Flag, Launch
from hpcgen.check.lint.words import Word
from hpcgen.config.megatron_options import in_group, of_kind, rows
from hpcgen.text import nearest
from trainer.contract.problem import Setting, in_yaml

KEYS = {row.name: row.key for row in of_kind("key")}
"""Option -> key of a run file with the same value."""

OPTIONS = {path: option for option, path in reversed(KEYS.items())}
"""Key of a run file -> Megatron-LM's option."""

NEGATED = {row.key: row.name for row in of_kind("negated")}
"""Key of a run file -> Megatron-LM's option with the opposite value."""

UNEVEN = {row.name: row.key for row in in_group("uneven layers")}
"""Options that divide the layers unevenly over the pipeline stages -> key of a run file."""

OTHER_LAYERS = frozenset(row.name for row in in_group("other layers"))
"""Options for layers of several kinds, which the rules for pipelines do not cover."""

DOCUMENT_MASK = "reset-attention-mask"
PACKED_DOCUMENTS = "dataloader-inter-document-masking"
"""Core 0.19's option that separates documents by packed sequences."""


@functools.cache
def nearest_option(option: str) -> str | None:
    """The option closest to a misspelled one; None if the option exists or none is close."""
    if _is_known(option):
        return None
    existing = [name for name, row in rows().items() if row.exists and row.kind != "removed"]
    if (dashed := option.replace("_", "-")) in existing:
        return dashed
    return nearest(option, existing)


def unknown_options(launch: Launch) -> frozenset[str]:
    """The options of a command line that Megatron-LM never had."""
    return frozenset(name for name in launch.flags if not _is_known(name))


def _is_known(name: str) -> bool:
    """True for an option of any release, or of another program."""
    row = rows().get(name)
    return row is not None and row.kind != "name"


def word_of(launch: Launch, option: str) -> Word | None:
    """The value of an option that is certainly given; None otherwise."""
    flag = launch.flags.get(option)
    return flag.value if flag and flag.value and flag.value.certain else None


def is_of_a_fork(launch: Launch) -> bool:
    """True if a command line may be for a program that is not Megatron-LM's own."""
    return bool(unknown_options(launch)) or launch.is_open


def integer(launch: Launch, option: str) -> int | None:
    """The integer value of an option; None if unknown."""
    word = word_of(launch, option)
    return word.number if word else None


def real(launch: Launch, option: str) -> float | None:
    """The numeric value of an option; None if unknown."""
    word = word_of(launch, option)
    if (
        word
        and word.known
        and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", word.text, re.ASCII)
    ):
        return float(word.text)
    return None


def in_options(text: str, keys: Iterable[str]) -> str:
    """A text that names `keys` of a run file, with Megatron-LM's options in their place."""
    words: dict[str, str] = {}
    for path in keys:
        key = path.rpartition(".")[2]
        if option := OPTIONS.get(path):
            # "lr", "split" and similar are also words
            words |= dict.fromkeys((path, key) if "_" in key else (path,), f"--{option}")
        if option := NEGATED.get(path):
            words |= dict.fromkeys((f"{path} = true", f"{key} = true"), f"a run without --{option}")
    names = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.sub(rf"\b(?:{names})\b", lambda found: words[found[0]], text) if words else text


def change(setting: Setting) -> str:
    """Words for a message: how to change the command line to get the effect of a run file's setting."""
    path, value = setting.path, setting.value
    if option := NEGATED.get(path):
        return f"{'remove' if value else 'add'} --{option}"
    option = OPTIONS[path]
    if value is True:
        return f"add --{option}"
    return f"remove --{option}" if value in (None, False) else f"set --{option} to {in_yaml(value)}"


def ignores_document_mask(flags: Mapping[str, Flag]) -> bool:
    """True if tokens see other documents of their sample in spite of --reset-attention-mask.

    The attention is causal. Transformer Engine's kernels then read no mask, and neither does the fused softmax of
    Megatron-Core's local layers.
    """
    layers = flags.get("transformer-impl")
    is_local = layers is not None and layers.value is not None and layers.value.text == "local"
    return not (is_local and "no-masked-softmax-fusion" in flags)


def knows_layers(launch: Launch) -> bool:
    """True if the number of layers of each pipeline stage is known."""
    given = [launch.flags[name] for name in UNEVEN.keys() & launch.flags.keys()]
    if not given:
        return launch.flags.keys().isdisjoint(OTHER_LAYERS)
    values = [flag.value for flag in (*given, launch.flags.get("num-layers")) if flag and flag.value]
    return (
        launch.flags.keys().isdisjoint(OTHER_LAYERS)
        and "num-layers" in launch.flags
        and all(value.certain for value in values)
    )


def counted_as_layers(launch: Launch) -> int:
    """Number of layers by which the embedding and the loss increase num_layers when stages are divided evenly."""
    return sum(name in launch.flags for name in UNEVEN if name.startswith("account"))


def virtual_stages(layers: int, stages: int, per_stage: int) -> int | None:
    """Virtual stages per rank for --num-layers-per-virtual-pipeline-stage; None if it does not divide a stage."""
    each = stages * per_stage
    return layers // each if each > 0 and layers % each == 0 else None
