"""Names that other programs have for keys, and names of features that hpcgen lacks. `other_names.txt` lists them.

A hint only names a key that does what the user asked for. A name that can mean several things needs its section to be
answered.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcgen.config import megatron_options
from hpcgen.config.sbatch_options import SBATCH_OPTIONS, SBATCH_OPTIONS_OF_SOME
from hpcgen.config.slurm import OWN_OPTIONS, SETTING_NAMES

EXPERTS = ("moe_", "expert_", "router_")
"""Beginnings of names of settings of experts."""

SHORTEST = 5
"""Length of the shortest word of another program whose misspellings are recognized."""

OF_SUBMISSION = ("help", "usage", "version", "parsable", "test-only", "wait", "quiet", "verbose")
"""Options of sbatch that change nothing in the job."""

OTHER_PROGRAM = "remove the key, or run a program that has it with `program` (docs/program.md)"


def is_known(name: str) -> bool:
    """Returns True for the name of an option of another program."""
    return any(
        name in names for names in (*map(table, ("keys", "needless", "lacks")), megatron_options.names())
    )


def names() -> list[str]:
    """Names of keys and features in other programs, without the many that only Megatron has."""
    sections = ("keys", "needless", "lacks", "instead")
    return [name for section in sections for name in table(section) if not name.endswith("_")]


def key(name: str) -> str:
    """The key that has this name in another program; empty if there is none."""
    return key_of(table("keys").get(name, ""))


def key_of(use: str) -> str:
    """The key at the beginning of an answer."""
    return use.partition(" ")[0].rstrip(",;")


def answer(name: str) -> str:
    """The hint for an unknown key that is a name in another program; empty for any other name."""
    if use := table("keys").get(name):
        return f"use {use}"
    if reason := table("needless").get(name):
        return f"remove it, because {reason}"
    if feature := _entry("lacks", name):
        return f"hpcgen's trainer does not support {feature}; {OTHER_PROGRAM}"
    if row := megatron_options.names().get(name):
        return f"{row.program} has it, but hpcgen's trainer does not; {OTHER_PROGRAM}"
    return "docs/moe.md lists the keys of mixtures of experts" if name.startswith(EXPERTS) else ""


def instead(name: str) -> str:
    """The hint for the name of something that hpcgen does differently; empty for any other name."""
    return _entry("instead", name)


def choice(value: str) -> str:
    """The choice of a key for another program's `value`, with a remark after a comma; empty for any other value."""
    return table("values").get(value.lower(), "")


def names_in_section(document: str, section: Sequence[str]) -> Mapping[str, str]:
    """Names that other programs have for keys of `section` -> the key to use, with a remark. In other sections, they
    mean something else.

    `document` is the name of the class of the document.
    """
    path = ".".join(section)
    if "slurm" not in section[:1]:
        return sections(document).get(path, {})
    stage = "slurm.train" if path == "slurm" and document == "RunConfig" else path
    return {name: f"{stage}.{use}" for name, use in slurm_names().items()} | sections(document)["slurm"]


def set_by_hpcgen(section: Sequence[str], name: str) -> str:
    """The option of sbatch with this name that has no key, because hpcgen's scripts depend on its value; else empty."""
    option = name.replace("_", "-")
    return option if "slurm" in section[:1] and option in OWN_OPTIONS else ""


@functools.cache
def slurm_names() -> dict[str, str]:
    """Name in a section below `slurm` -> its key, with a remark."""
    with_key = {name.replace("_", "-") for name in SETTING_NAMES}
    options = sorted((SBATCH_OPTIONS | SBATCH_OPTIONS_OF_SOME) - OWN_OPTIONS - with_key - set(OF_SUBMISSION))
    directives = {
        option.replace("-", "_"): f"extra_directives with --{option}"
        for option in options
        if not option.startswith("container")
    }
    return directives | table("slurm")


@functools.cache
def sections(document: str) -> dict[str, dict[str, str]]:
    """Section of a document -> its own names -> the key to use, with a remark."""
    titles = re.findall(rf"^\[({document}(?: .*)?)\]$", _names_file(), re.MULTILINE)
    return {title.removeprefix(document).strip(): table(title) for title in titles}


def _entry(section: str, name: str) -> str:
    """The entry of a name, or of a beginning of the name that ends in an underscore."""
    entries = table(section)
    begun = (text for start, text in entries.items() if start.endswith("_") and name.startswith(start))
    return entries.get(name) or next(begun, "")


@functools.cache
def table(section: str) -> dict[str, str]:
    """Name -> text, in a section of other_names.txt and in the table of Megatron-LM's options."""
    lines = _names_file().partition(f"[{section}]\n")[2].partition("\n\n")[0].splitlines()
    rows = (line.rpartition(": ") for line in lines)
    return _options(section) | {name: answer for answer, _, names in rows for name in names.split()}


@functools.cache
def _names_file() -> str:
    return Path(__file__).with_name("other_names.txt").read_text(encoding="utf-8")


def _options(section: str) -> dict[str, str]:
    """The part of a section that follows from Megatron-LM's options."""
    named = {name: row for name, row in megatron_options.names().items() if row.exists}
    if section == "needless":
        return {
            name: "the trainer always does this"
            for name, row in named.items()
            if row.kind == "usual" and not row.values
        }
    if section == "keys":
        return {
            name: f"{row.key}, with the opposite value" if row.kind == "negated" else row.key
            for name, row in named.items()
            if row.key.rpartition(".")[2] not in ("", name)
        }
    return {}
