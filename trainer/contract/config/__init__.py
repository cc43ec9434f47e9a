"""The configuration that hpcgen writes and the trainer reads, as plain dataclasses.

Both programs import this module, so it uses only the standard library. Names are those of Megatron-Core, or of
Megatron-LM's flags where Core has none. The trainer reads a JSON file with these sections (`read`); hpcgen fills the
same sections from a run file. A string under a field is its documentation: `hpcgen init` and the JSON Schema print it.
"""

from trainer.contract.config.answers import AnswersConfig, AnswersSettings
from trainer.contract.config.data import NAMED_SPLIT, BlendConfig, Dataset, DataStage, ValidationSet
from trainer.contract.config.document import (
    ConfigError,
    TrainerConfig,
    fingerprint,
    from_dict,
    read,
    read_as,
    to_dict,
    typed_value,
)
from trainer.contract.config.lora import LoraConfig
from trainer.contract.config.model import ModelConfig, RopeScaling
from trainer.contract.config.optimizer import OptimizerConfig, ParameterGroup
from trainer.contract.config.output import CheckpointConfig, LoggingConfig
from trainer.contract.config.parallelism import ParallelismConfig
from trainer.contract.config.path import FilePath, NamedPath, PathKind, paths_in, with_paths
from trainer.contract.config.resume import field_hints
from trainer.contract.config.training import DISCARDS_OUTPUT, EarlyStopping, RecomputeModule, TrainingConfig
from trainer.contract.config.values import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PositiveFloat,
    Range,
)

__all__ = [
    "DISCARDS_OUTPUT",
    "NAMED_SPLIT",
    "AnswersConfig",
    "AnswersSettings",
    "BlendConfig",
    "CheckpointConfig",
    "ConfigError",
    "Count",
    "DataStage",
    "Dataset",
    "EarlyStopping",
    "FilePath",
    "Fraction",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "NamedPath",
    "NonNegative",
    "NonNegativeFloat",
    "OptimizerConfig",
    "ParallelismConfig",
    "ParameterGroup",
    "PathKind",
    "PositiveFloat",
    "Range",
    "RecomputeModule",
    "RopeScaling",
    "TrainerConfig",
    "TrainingConfig",
    "ValidationSet",
    "field_hints",
    "fingerprint",
    "from_dict",
    "paths_in",
    "read",
    "read_as",
    "to_dict",
    "typed_value",
    "with_paths",
]
