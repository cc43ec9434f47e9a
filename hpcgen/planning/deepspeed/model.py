"""The number of parameters of the model that a program trains, from its config.json or from the run file."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hpcgen.config.from_huggingface import read_model
from hpcgen.config.program import DeepSpeedConfig
from hpcgen.errors import HpcgenError
from hpcgen.planning.deepspeed.memory import ModelSize
from trainer.contract.model.model_size import parameter_count


def model_size(section: DeepSpeedConfig) -> ModelSize | None:
    """The size of the model; None if the section does not give it. The path in `model` is absolute.

    Raises:
        HpcgenError: config.json cannot be read, or its architecture is unknown.
    """
    if section.model is None and section.parameters is None:
        return None
    parameters: float
    largest: float
    if section.model is not None:
        parameters, largest = _from_config(Path(section.model))
    else:
        parameters, largest = section.parameters or 0, section.largest_layer_parameters or 0
    trainable = parameters if section.trainable_parameters is None else section.trainable_parameters
    return ModelSize(parameters=parameters, trainable=trainable, largest_layer=largest)


def _from_config(path: Path) -> tuple[int, int]:
    """The parameters of the model and of its largest module: the embedding, or a matrix of the MLP or attention."""
    try:
        family, model = read_model(path / "config.json" if path.is_dir() else path)
    except HpcgenError as error:
        hint = "set program.deepspeed.parameters instead" if path.exists() else ""
        raise HpcgenError(str(error), hint) from error
    model = dataclasses.replace(model, padded_vocab_size=model.vocab_size)
    assert model.vocab_size
    assert model.ffn_hidden_size
    fused_qkv = 3 * model.hidden_size if family == "gpt2" else 0
    widest = max(model.vocab_size, model.ffn_hidden_size, fused_qkv)
    return parameter_count(model), widest * model.hidden_size
