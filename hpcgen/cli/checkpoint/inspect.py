"""hpcgen checkpoint inspect: show what a checkpoint contains and verify it."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcgen.checkpoints.finding import find_checkpoint, find_problems
from hpcgen.checkpoints.index import read_tensors
from hpcgen.checkpoints.listing import size_of
from hpcgen.cli.checkpoint.paths import path_argument
from hpcgen.cli.options import json_option
from hpcgen.errors import Problem
from hpcgen.report.essentials import shown, text
from hpcgen.report.words import moment
from hpcgen.text import counted, few, harmless, size_text
from trainer.contract.files.checkpoint_files import FORMAT, consumed_tokens
from trainer.contract.resuming import base_model, record_shape, sampling

if TYPE_CHECKING:
    from hpcgen.checkpoints.index import Tensor
    from trainer.contract.files.checkpoint_files import Checkpoint

SHOWN_PROBLEMS = 20


@click.command("inspect")
@path_argument
@click.option("--verify", is_flag=True, help="Read every file and compare its hash with the record.")
@click.option("--tensors", is_flag=True, help="List the tensors with name, type and shape.")
@json_option
@click.pass_context
def command(ctx: click.Context, path: Path, verify: bool, tensors: bool, as_json: bool) -> None:
    """PATH is a checkpoint. For a run directory or a directory of checkpoints, the newest complete checkpoint is shown.
    Exits with status 1 if a file is missing or differs from the record.
    """
    checkpoint = find_checkpoint(path)
    problems = _problems(checkpoint, verify)
    found = read_tensors(checkpoint.path) if tensors else []
    if as_json:
        click.echo(json.dumps(_inspection_json(checkpoint, problems, found, verify, tensors), indent=1))
    else:
        for title, line in _lines(checkpoint, size_of(checkpoint)):
            click.echo(f"{click.style(f'{title:<12}', bold=True)}{harmless(line)}")
        if tensors:
            _print_tensors(found)
        _print_problems(checkpoint, problems, verify)
    if problems:
        ctx.exit(1)


def _problems(checkpoint: Checkpoint, verify: bool) -> list[Problem]:
    if not verify or checkpoint.record is None:
        return find_problems(checkpoint, hashes=False)
    total = size_of(checkpoint)
    with click.progressbar(length=total, label=f"reading {size_text(total)}", file=sys.stderr) as bar:
        return find_problems(checkpoint, hashes=True, on_bytes=bar.update)


def _inspection_json(
    checkpoint: Checkpoint, problems: Sequence[Problem], found: Sequence[Tensor], verify: bool, tensors: bool
) -> dict[str, Any]:
    return {
        "path": str(checkpoint.path),
        "iteration": checkpoint.iteration,
        "is_complete": checkpoint.is_complete,
        "is_foreign": checkpoint.is_foreign,
        "is_pinned": checkpoint.is_pinned,
        "verified": verify and checkpoint.record is not None,
        "problems": list(map(str, problems)),
        "record": checkpoint.record,
        **({"tensors": [dataclasses.asdict(tensor) for tensor in found]} if tensors else {}),
    }


def _lines(checkpoint: Checkpoint, num_bytes: int) -> Iterator[tuple[str, str]]:
    """Yields the title and text of each line about the checkpoint."""
    pinned = ", pinned" if checkpoint.is_pinned else ""
    yield "checkpoint", f"{checkpoint.path}{pinned}"
    record = checkpoint.record
    if record is None:
        yield "iteration", f"{checkpoint.iteration:,}"
        yield "size", size_text(num_bytes)
        if checkpoint.is_foreign:
            yield "written by", "Megatron-LM, without a record to compare with"
        return
    if record.get("format", FORMAT) > FORMAT:
        yield (
            "format",
            f"{record['format']}, written by a newer trainer; use its version of hpcgen, or --json for the raw record",
        )
        return
    if record.get("weights_only"):
        yield "iteration", f"{record['iteration']:,}, weights only"
        yield _origin_of_weights(record)
        yield (
            "size",
            f"{size_text(num_bytes)} in {counted(len(record['files']), 'file')}, {record['precision']}",
        )
        yield from _adapters(record)
        yield "model", _section("model", record["model"])
        return
    model, training = record["model"], record["training"]
    tokens = consumed_tokens(record)
    yield "iteration", f"{record['iteration']:,} of {training['train_iters']:,}"
    yield "complete", moment(record["time"])
    yield "consumed", f"{counted(record['consumed_samples'], 'sample')}, {counted(tokens, 'token')}"
    for stream in sampling.from_dict(record["sampling"]).streams if record.get("sampling") else ():
        epochs = stream.epochs(stream.read)
        read = f"{counted(stream.read, 'sample')} of {counted(stream.seq_length, 'token')} ({epochs:,.2f} epochs)"
        yield "pair", f"{stream.prefix}: {read}"
    if dataset := record.get("dataset"):
        yield "own data", _own_data(record["consumed_samples"] - dataset["first"], dataset)
    yield "size", f"{size_text(num_bytes)} in {counted(len(record['files']), 'file')}"
    ranks = counted(record["world_size"], "rank")
    yield "written by", f"{ranks} ({_layout(record['layout'], model)}), {record['precision']}"
    yield from _adapters(record)
    for section in ("model", "training", "optimizer"):
        yield section, _section(section, record[section])
    yield "data", _data(record.get("data") or {})
    yield "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())


def _own_data(read: int, dataset: Mapping[str, Any]) -> str:
    """The position of a run in the samples of data.dataset."""
    so_far, length, state = counted(read, "sample"), dataset["length"], dataset["state"]
    if length is not None:
        return f"{so_far} of {length:,} ({read / length:,.2f} epochs)"
    return f"{so_far} of a stream" if state is None else f"{so_far} of a stream, with its state"


def _origin_of_weights(record: Mapping[str, Any]) -> tuple[str, str]:
    """How the weights of a checkpoint without optimizer state were made."""
    if averaged := record.get("averaged"):
        iterations = ", ".join(f"{each['iteration']:,}" for each in averaged)
        of = Path(averaged[-1]["path"]).parent
        what = "the mean of iterations" if len(averaged) > 1 else "the moving average of iteration"
        return "averaged", f"{moment(record['time'])}, {what} {iterations} of {of}"
    origins = record_shape.origins(record)
    if peft := origins.get("peft"):
        return "imported", f"{moment(record['time'])} from {peft['name']} (PEFT)"
    origin = origins.get("huggingface", {})
    return "imported", f"{moment(record['time'])} from {origin.get('name')} ({origin.get('family')})"


def _adapters(record: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The adapters that a checkpoint contains in place of a model, and the model that they belong to."""
    if base_model.has_adapters(record):
        yield "adapters", f"{_section('lora', record['lora'])}, of {harmless(base_model.path_of(record))}"


def _section(name: str, values: dict[str, Any]) -> str:
    """The keys that the report shows of a section, on one line."""
    rows = (
        (key, f"[{text(value)}]" if isinstance(value, list) else text(value))
        for key, value in shown(name, values)
    )
    return ", ".join(f"{key} {value}" for key, value in rows)


def _layout(layout: dict[str, Any], model: dict[str, Any]) -> str:
    names = {"tensor": "TP", "pipeline": "PP", "virtual_pipeline": "VPP"}
    sizes = {short: layout.get(f"{name}_model_parallel_size") for name, short in names.items()}
    sizes["CP"] = layout.get("context_parallel_size")
    if model.get("num_moe_experts"):
        sizes["EP"] = layout.get("expert_model_parallel_size")
        sizes["ETP"] = layout.get("expert_tensor_parallel_size")
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size is not None)


def _data(data: dict[str, Any]) -> str:
    if data.get("mock"):
        return "mock data"
    datasets = data.get("datasets") or data.get("train") or []
    return few([dataset["prefix"] for dataset in datasets])


def _print_tensors(found: Sequence[Tensor]) -> None:
    weights = sum(tensor.elements for tensor in found if tensor.is_weight)
    names = [harmless(tensor.name) for tensor in found]
    width = max(map(len, names), default=0)
    for name, tensor in zip(names, found, strict=True):
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        click.echo(f"{name:<{width}}  {harmless(tensor.dtype):<8}  {shape}")
    click.echo(f"{counted(len(found), 'tensor')}, {counted(weights, 'weight')}", err=True)


def _print_problems(checkpoint: Checkpoint, problems: Sequence[Problem], verify: bool) -> None:
    """Prints the problems to stdout, or "ok" to stderr if there are none."""
    for problem in problems[:SHOWN_PROBLEMS]:
        click.secho(harmless(str(problem)), fg="red")
    if len(problems) > SHOWN_PROBLEMS:
        click.echo(f"and {len(problems) - SHOWN_PROBLEMS} more (--json lists them all)")
    if not problems and checkpoint.record is not None:
        verdict = (
            "ok: every file matches its recorded hash"
            if verify
            else "ok: every file has its recorded size (--verify also compares hashes)"
        )
        click.secho(verdict, fg="green", err=True)
