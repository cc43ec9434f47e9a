"""The complete configuration, from and to plain data."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from trainer.contract.config.answers import AnswersConfig
from trainer.contract.config.data import BlendConfig
from trainer.contract.config.lora import LoraConfig
from trainer.contract.config.model import ModelConfig
from trainer.contract.config.optimizer import OptimizerConfig
from trainer.contract.config.output import CheckpointConfig, LoggingConfig
from trainer.contract.config.parallelism import ParallelismConfig
from trainer.contract.config.resume import field_hints
from trainer.contract.config.training import TrainingConfig
from trainer.contract.config.values import Count, PositiveFloat, Range
from trainer.contract.errors import TrainerError
from trainer.contract.files.hashing import sha256
from trainer.contract.files.shared_files import read_configuration
from trainer.contract.problem import FilePlace, Problem
from trainer.contract.record import config_section
from trainer.contract.wording import shown


@config_section
class TrainerConfig:
    """Complete configuration of one training job. The trainer reads nothing from the run file."""

    name: str
    """Name of the run."""
    run_dir: str
    """Absolute path of the directory that holds everything this run writes."""
    device: Literal["cuda", "cpu"]
    """Device that the ranks compute on. The trainer never falls back from cuda to cpu."""
    world_size: Count
    """Number of ranks that the layout was planned for. The trainer refuses any other number."""
    peak_tflops: PositiveFloat | None = None
    """Dense peak of one device in `precision` (TFLOP/s), for MFU; null leaves MFU out."""
    model: ModelConfig
    parallelism: ParallelismConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    data: BlendConfig
    lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    logging: LoggingConfig = dataclasses.field(default_factory=LoggingConfig)
    answers: AnswersConfig | None = None
    """Prompts that the model answers while it trains; null for none."""
    evaluation_every: Count | None = None
    """Keep checkpoints whose iteration is a multiple of this number until they are evaluated. Default: none."""


WITHOUT_EFFECT = ("answers", "evaluation_every")
"""Keys that do not affect training."""


class ConfigError(TrainerError):
    """The configuration is invalid. The message says where and why."""


T = TypeVar("T")


def read(path: Path) -> TrainerConfig:
    """Reads the trainer's JSON file.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit TrainerConfig.
    """
    return read_as(TrainerConfig, path)


def read_as(cls: type[T], path: Path) -> T:
    """Reads a JSON file as the configuration class `cls`.

    Raises:
        ConfigError: the file is missing, is not JSON, or does not fit `cls`.
    """
    try:
        document = json.loads(read_configuration(path))
    except (OSError, ValueError) as error:
        raise ConfigError(str(error), where=path) from error
    return from_dict(cls, document, where=FilePlace(path))


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a configuration to plain data, which `json.dumps` accepts and `from_dict` reads back."""
    result: dict[str, Any] = dataclasses.asdict(config)
    return result


def fingerprint(config: TrainerConfig) -> str:
    """SHA-256 of all values of `config` that affect training and differ from their defaults.

    A resolved configuration keeps it when written as JSON and read back, and when a later version has more keys.
    """
    values = _non_defaults(config)
    for name in WITHOUT_EFFECT:
        values.pop(name, None)
    if not values["lora"]:  # the section did not exist in earlier versions
        del values["lora"]
    text = json.dumps(values, sort_keys=True, default=dataclasses.asdict)
    return sha256(text.encode())


def _non_defaults(section: Any) -> dict[str, Any]:
    values = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            values[field.name] = _non_defaults(value)
        elif value != field.default:
            values[field.name] = value
    return values


def from_dict(cls: type[T], document: Any, where: str) -> T:
    """Builds `cls` from plain data, checking keys, types and ranges.

    Raises:
        ConfigError: the first invalid key or value, with its dotted path after `where`.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"expected a mapping, got {document!r}", where=where)
    hints = field_hints(typing.cast(type, cls))
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key in document:
        if key in fields:
            continue
        raise ConfigError(f"unknown key {key!r}; known are {', '.join(sorted(fields))}", where=where)
    values = {}
    for name, field in fields.items():
        if name in document:
            values[name] = typed_value(hints[name], document[name], name, where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ConfigError(Problem(name, "is missing", where=where))
    return cls(**values)


def typed_value(hint: Any, value: Any, path: str, where: str = "") -> Any:
    """`value` as the type `hint`. `path` is its key in the section or file `where`.

    Raises:
        ConfigError: it has another type, or is out of range.
    """
    origin = typing.get_origin(hint)
    if origin is Annotated:
        inner, *metadata = typing.get_args(hint)
        value = typed_value(inner, value, path, where)
        for limits in metadata:
            if isinstance(limits, Range) and (problem := limits.problem(path, value)):
                raise _invalid(value, path, problem.reason, where)
        return value
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        [inner] = [
            arg for arg in typing.get_args(hint) if arg is not type(None)
        ]  # the only union is with null
        return typed_value(inner, value, path, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise _invalid(value, path, "must be a list", where)
        inner = typing.get_args(hint)[0]
        return tuple(typed_value(inner, item, f"{path}[{i}]", where) for i, item in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise _invalid(value, path, "must be a mapping", where)
        of_key, of_value = typing.get_args(hint)
        return {
            typed_value(of_key, key, path, where): typed_value(of_value, item, f"{path}.{key}", where)
            for key, item in value.items()
        }
    if origin is Literal:
        if not isinstance(value, str) or value not in typing.get_args(hint):
            raise _invalid(value, path, f"must be one of {typing.get_args(hint)}", where)
        return value
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, f"{where}: {path}" if where else path)
    if hint is Any:
        return value
    accepted = (int, float) if hint is float else (hint,)
    # True is an int in Python
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise _invalid(value, path, f"must be of type {hint.__name__}", where)
    # JSON writes 1 and 1.0 differently, and fingerprints are hashes of JSON.
    return float(value) if hint is float else value


def _invalid(value: Any, path: str, reason: str, where: str) -> ConfigError:
    return ConfigError(Problem(path, reason, subject=f"{path} = {shown(value)}", where=where, value=value))
