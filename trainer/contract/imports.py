"""Loads the user's own functions, which the configuration names by import path.

An import path is `package.module:function`, for modules that are installed or on PYTHONPATH, or
`path/of/file.py:function`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from trainer.contract.config import ConfigError, OptimizerConfig
from trainer.contract.wording import did_you_mean

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

FUNCTION_KEYS = ("model.layer_spec", "model.model_provider", "optimizer.lr_schedule")
"""Keys of the configuration that name a user's function."""

IMPORT_PATH = re.compile(r"(?P<source>[^:\n]+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


class LayerSpec(Protocol):
    """Signature of `model.layer_spec`, which returns the layers of the decoder."""

    def __call__(
        self, core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
    ) -> TransformerBlockSubmodules | ModuleSpec:
        """Return either a block that replaces `usual`, this rank's default chunk, or one layer spec for all layers."""


class ModelProvider(Protocol):
    """Signature of `model.model_provider`: a subclass of GPTModel, or a function that is called instead of it."""

    def __call__(
        self,
        *,
        config: TransformerConfig,
        transformer_layer_spec: TransformerBlockSubmodules | ModuleSpec,
        vocab_size: int,
        max_sequence_length: int,
        pre_process: bool,
        post_process: bool,
        share_embeddings_and_output_weights: bool,
        position_embedding_type: str,
        rotary_base: int,
        pg_collection: ProcessGroupCollection,
        vp_stage: int | None,
    ) -> GPTModel:
        """Return chunk `vp_stage` of this rank. It embeds tokens if `pre_process`, has the loss if `post_process`."""


class Rate(Protocol):
    """Signature of `optimizer.lr_schedule`, the learning rate after the warm-up."""

    def __call__(self, iteration: int, optimizer: OptimizerConfig) -> float:
        """Return the learning rate of the step that follows `iteration` steps of the run. `optimizer` is resolved."""


def file_of(path: str) -> str | None:
    """The file in an import path; None for a module or an invalid import path."""
    match = IMPORT_PATH.fullmatch(path)
    return match["source"] if match and match["source"].endswith(".py") else None


def with_file(path: str, file: str) -> str:
    """Import path of the same function in another file."""
    return f"{file}:{path.rpartition(':')[2]}"


def load(path: str, what: str) -> Callable[..., Any]:
    """Load the function at an import path. `what` is the key of the configuration that names it.

    Raises:
        ConfigError: the import path is invalid, the module or file is missing or fails, or lacks the function.
    """
    match = IMPORT_PATH.fullmatch(path)
    where = f"{what} = {path!r}"
    if match is None:
        raise ConfigError(f"{where} is not an import path. Use package.module:function or file.py:function")
    source, name = match["source"], match["name"]
    module = _run_file(Path(source), where) if source.endswith(".py") else _import(source, where)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise ConfigError(f"{where}: {name} is a {type(function).__name__}, not a function")
    defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    known = did_you_mean(name, defined) or f"it defines {', '.join(sorted(defined)) or 'none'}"
    raise ConfigError(f"{where}: {module.__file__} has no function {name}; {known}")


def _import(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(where, error) from error
        searched = os.environ.get("PYTHONPATH") or "not set"
        raise ConfigError(
            f"{where}: there is no module {error.name}. Install it for {sys.executable}, put it in a "
            f"directory of PYTHONPATH ({searched}), or name its file: /path/of/{name.split('.')[-1]}.py:function"
        ) from error
    except Exception as error:
        raise _failed(where, error) from error


def _run_file(file: Path, where: str) -> ModuleType:
    """Import a file as a module of the same name. It can import other files in its directory."""
    file = file.absolute()
    if not file.is_file():
        raise ConfigError(
            f"{where}: there is no file {file}. Every node and the container must have it at this path"
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that files there never shadow installed modules
    found = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if (
        found is None
        or found.origin is None
        or not Path(found.origin).exists()
        or not file.samefile(found.origin)
    ):
        raise ConfigError(
            f"{where}: {file.stem} is not a valid module name, or another module has this name. Rename the file"
        )
    try:
        return importlib.import_module(file.stem)
    except Exception as error:
        raise _failed(where, error) from error


def _failed(where: str, error: Exception) -> ConfigError:
    import traceback  # needed only for error messages

    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if not f.filename.startswith("<frozen")), None)
    at = f" ({last.filename}:{last.lineno})" if last else ""
    return ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}{at}")
