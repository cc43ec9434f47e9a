"""hpcgen presets: list the model presets for run files."""

from __future__ import annotations

import json

import click

from hpcgen.cli.options import json_option
from hpcgen.config.presets import PRESETS
from hpcgen.errors import ConfigErrors, HpcgenError, Problem
from trainer.contract.config import ModelConfig
from trainer.contract.config.resolve import resolve_model
from trainer.contract.model.model_size import active_parameter_count, parameter_count

REFERENCE_VOCAB = 50304
"""Padded GPT-2 vocabulary size, used to count the parameters of presets that set no vocabulary."""


@click.command("presets")
@json_option
def command(as_json: bool) -> None:
    """The counts are computed from the shapes of the models. Active parameters are the parameters that process each
    token."""
    rows, mistakes = [], list[Problem]()
    for name in PRESETS:
        try:
            preset = PRESETS[name]
        except HpcgenError as error:
            mistakes += error.mistakes
            continue
        shape = {"padded_vocab_size": REFERENCE_VOCAB, **preset.sections["model"]}
        if "vocab_size" in preset.sections["model"]:
            del shape["padded_vocab_size"]
        model = resolve_model(ModelConfig(**shape))
        parallelism = preset.sections.get("parallelism", {})
        rows.append(
            {
                "name": preset.name,
                "parameters": parameter_count(model),
                "active_parameters": active_parameter_count(model),
                "num_layers": model.num_layers,
                "hidden_size": model.hidden_size,
                "num_attention_heads": model.num_attention_heads,
                "seq_length": model.seq_length,
                "tensor_model_parallel_size": parallelism.get("tensor_model_parallel_size", 1),
                "pipeline_model_parallel_size": parallelism.get("pipeline_model_parallel_size", 1),
                "expert_model_parallel_size": parallelism.get("expert_model_parallel_size", 1),
                "global_batch_size": preset.sections["training"]["global_batch_size"],
                "lr": preset.sections["optimizer"]["lr"],
                "description": preset.description,
                "file": str(preset.file) if preset.file else "shipped",
            }
        )
    if as_json:
        click.echo(json.dumps(rows, indent=1))
    else:
        _print_table(rows)
    if mistakes:  # after the presets that work, which do not depend on the others
        raise ConfigErrors(mistakes)


def _print_table(rows: list[dict[str, object]]) -> None:
    from hpcgen.cli.terminal import new_table, print_table

    table = new_table()
    titles = ("parameters", "active", "layers", "hidden", "heads", "seq", "TP", "PP", "EP", "batch", "lr")
    for title in ("preset", *titles):
        table.add_column(title, justify="left" if title == "preset" else "right", no_wrap=True)
    table.add_column("description")
    table.add_column("from")
    for row in rows:
        cells = [
            f"{value / 1e9:.3f} B" if isinstance(value, int) and "parameters" in name else str(value)
            for name, value in row.items()
        ]
        table.add_row(*cells)
    print_table(table, 250)
