"""The run file that `hpcgen init` writes: the most important values, with all other keys as comments."""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from hpcgen.config.keys import field_docs, inner_class
from hpcgen.config.presets import PRESETS, Preset
from hpcgen.config.run import TRAINER_SECTIONS, RunConfig
from hpcgen.config.slurm import StageSettings
from trainer.contract.config import ParallelismConfig, field_hints
from trainer.contract.model.layout import fewest_ranks, model_parallel_size

WIDTH = 110
SHAPE = {"num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 1024}
NOT_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}
"""Strings that some YAML readers parse as a different type."""
TIME = "1-00:00:00"
"""Time limit of a job if the partition allows it."""
NO_SETTINGS = StageSettings()
BATCH = {"micro_batch_size": 4, "global_batch_size": 256, "train_iters": 1000}


def starter(
    name: str,
    cluster: str,
    run_dir: str,
    preset: Preset | None,
    schema: str,
    *,
    gpus_per_node: int = 0,
    nodes: int = 1,
    of_cluster: StageSettings = NO_SETTINGS,
    time: str = TIME,
    file_name: str = "run.yaml",
) -> str:
    """The text of a new run file; `schema` is the path of its JSON Schema, for editors.

    If nodes have no GPUs, they have as many tasks as the preset's layout needs. The file leaves out everything that
    `of_cluster`, the profile's Slurm settings, already sets.
    """
    per_node = of_cluster.ntasks_per_node or gpus_per_node
    tasks = {"nodes": nodes} if per_node else _tasks(preset, nodes)
    chosen: dict[str, Any] = {
        "name": name,
        "cluster": cluster,
        "paths": {"run_dir": run_dir},
        "slurm": slurm_section(of_cluster, time, tasks),
        "data": {**starter_corpus(name, gpus_per_node), "tokenizer": _tokenizer(preset)},
    }
    if preset is not None:
        chosen["preset"] = preset.name
        chosen["training"] = micro_batch(preset, nodes * (per_node or tasks.get("ntasks_per_node", 1)))
    else:
        chosen["model"] = SHAPE
        chosen["training"] = BATCH
        chosen["optimizer"] = {"lr": 6e-4}
    return run_file(chosen, schema, preset=preset, file_name=file_name)


def slurm_section(of_cluster: StageSettings, time: str, tasks: Mapping[str, int]) -> dict[str, Any]:
    """The section slurm of a new run file: the time limit and the tasks of train, without what the profile sets."""
    return {"defaults": _without(of_cluster, {"time": time}), "train": _without(of_cluster, tasks)}


def _without(of_cluster: StageSettings, settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value != getattr(of_cluster, key)}


def program_starter(
    name: str,
    cluster: str,
    run_dir: str,
    schema: str,
    *,
    of_cluster: StageSettings = NO_SETTINGS,
    time: str = TIME,
    file_name: str = "run.yaml",
) -> str:
    """The text of a new run file for a program of the user, without the keys of hpcgen's trainer.

    It leaves out everything that `of_cluster`, the profile's Slurm settings, already sets.
    """
    settings = {"nodes": of_cluster.nodes or 1, "time": time}
    chosen = {
        "name": name,
        "cluster": cluster,
        "paths": {"run_dir": run_dir},
        "slurm": {"run": _without(of_cluster, settings)},
        "program": {"command": ["python", "train.py"]},
    }
    return run_file(chosen, schema, file_name=file_name)


def starter_corpus(name: str, gpus_per_node: int) -> dict[str, Any]:
    """The keys of the section data for a corpus in the directory `corpus`, to be replaced by the user's."""
    split = "98,1,1" if gpus_per_node else "90,5,5"  # a CPU-only machine has a small corpus
    return {"split": split, "corpus": {"directory": f"data/{name}", "source": {"directory": "corpus"}}}


def run_file(
    chosen: Mapping[str, Any],
    schema: str,
    *,
    preset: Preset | None = None,
    file_name: str = "run.yaml",
    notes: Sequence[str] = (),
) -> str:
    """The text of a run file with the values `chosen` and every other key as a comment. It begins with the notes."""
    lines = [
        f"# yaml-language-server: $schema={schema}",
        *_commands(chosen, file_name),
        *(f"# {note}" for note in notes),
        "# Commented-out keys show their defaults. Relative paths start at this file's directory.",
        "",
        *_section(RunConfig, chosen, preset.sections if preset else {}, 0),
    ]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _commands(chosen: Mapping[str, Any], file_name: str) -> Iterator[str]:
    """Yields comments with the next commands to run."""
    if "program" in chosen:
        yield "# Check this file, and queue the program:"
        yield f"#   hpcgen validate -c {file_name}"
        yield f"#   hpcgen submit run -c {file_name}"
        return
    preset = PRESETS.get(chosen.get("preset", ""))
    if preset and preset.tokenizer_repository:
        yield "# Put the model's tokenizer.json next to this file. Gated models first need access, and `hf auth login`:"
        yield f"#   {preset.tokenizer_command(PurePath())}"
    if "corpus" in chosen.get("data", {}):
        yield "# Make the data and train. Insert download before prepare if the source is not a directory:"
        yield f"#   hpcgen data plan -c {file_name}"
        yield f"#   hpcgen submit prepare index-cache train -c {file_name}"
    yield "# Check this file, and render the script of a stage:"
    yield f"#   hpcgen validate -c {file_name}"
    yield f"#   hpcgen render train -c {file_name} -o train.sh"


def parallelism_of(preset: Preset | None) -> ParallelismConfig:
    """The layout of a preset."""
    return ParallelismConfig(**preset.sections.get("parallelism", {}) if preset else {})


def _tokenizer(preset: Preset | None) -> dict[str, str]:
    """GPT-2's tokenizer. A preset with its own vocabulary needs its tokenizer.json, which the user must download."""
    if preset is None or preset.eod_token is None:
        return {"kind": "gpt2"}
    return {"kind": "huggingface", "tokenizer_file": "tokenizer.json", "eod_token": preset.eod_token}


def _tasks(preset: Preset | None, nodes: int) -> dict[str, int]:
    """The nodes, and a task on them for each rank that the preset's layout needs."""
    tasks = -(-fewest_ranks(parallelism_of(preset)) // nodes)
    return {"nodes": nodes, "ntasks_per_node": tasks} if tasks > 1 else {"nodes": nodes}


def micro_batch(preset: Preset, world_size: int) -> dict[str, int]:
    """A microbatch size of 1 if the preset's does not divide the global batch over the run's ranks."""
    training = preset.sections["training"]
    data_parallel_size = max(1, world_size // model_parallel_size(parallelism_of(preset)))
    fits = training["global_batch_size"] % (training["micro_batch_size"] * data_parallel_size) == 0
    return {} if fits else {"micro_batch_size": 1}


def _section(cls: type, chosen: Mapping[str, Any], preset: Mapping[str, Any], depth: int) -> Iterator[str]:
    docs, hints = field_docs(cls), field_hints(cls)
    unused = (*TRAINER_SECTIONS, "data") if cls is RunConfig and "program" in chosen else ()
    for field in dataclasses.fields(cls):
        if field.name in unused:
            continue
        inner = inner_class(hints[field.name])
        nested = inner is not None and typing.get_origin(hints[field.name]) not in (tuple, dict)
        given, usual = chosen.get(field.name), preset.get(field.name)
        yield from _comment(docs[field.name], depth)
        if nested and (given is not None or (depth == 0 and field.default is not None)):
            assert inner is not None
            lines = list(_section(inner, given or {}, usual or {}, depth + 1))
            is_unset = all(line.lstrip().startswith("#") or not line for line in lines)
            yield _line("# " if is_unset else "", f"{field.name}:", depth)
            yield from lines
        elif field.name in chosen:
            yield _line("", f"{field.name}: {_yaml(given)}", depth)
        elif field.name in preset:
            yield _line("# ", f"{field.name}: {_yaml(usual)}   # from the preset", depth)
        else:
            yield _line("# ", f"{field.name}: {_yaml(_default(field))}", depth)
        if depth == 0:
            yield ""


def _comment(text: str, depth: int) -> Iterator[str]:
    indent = "  " * depth
    yield from (f"{indent}# {line}" for line in textwrap.wrap(text, WIDTH - len(indent) - 2))


def _line(mark: str, text: str, depth: int) -> str:
    return f"{'  ' * depth}{mark}{text}"


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
        return {} if dataclasses.is_dataclass(value) else value
    return None


def _yaml(value: Any) -> str:
    """A value in YAML's flow style, which is JSON with bare words."""
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", value)
        and value.lower() not in NOT_WORDS
    ):
        return value
    if isinstance(value, tuple | list):
        return f"[{', '.join(_yaml(item) for item in value)}]"
    return json.dumps(value)
