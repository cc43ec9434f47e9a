"""Functions of users, named in the configuration by an import path; standard library only, for hpcgen reads the paths.

An import path is `package.module:function`, of what is installed or on PYTHONPATH, or `path/of/file.py:function`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from trainer.contract.config import ConfigError, OptimizerConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

IMPORT_PATH = re.compile(r"(?P<source>[^:\n]+\.py|[^\W\d]\w*(\.[^\W\d]\w*)*):(?P<name>[^\W\d]\w*)")


class LayerSpec(Protocol):
    """What `model.layer_spec` names: the layers of the decoder."""

    def __call__(
        self, core: TransformerConfig, vp_stage: int | None, usual: TransformerBlockSubmodules
    ) -> TransformerBlockSubmodules | ModuleSpec:
        """In place of `usual`, what this rank's chunk would be made of: such a block, or one layer's spec for all."""


class ModelProvider(Protocol):
    """What `model.model_provider` names: a subclass of GPTModel, or a function that is called in its place."""

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
        """This rank's chunk `vp_stage`: `pre_process` if it embeds tokens, `post_process` if it computes the loss."""


class Rate(Protocol):
    """What `optimizer.lr_schedule` names: the learning rate after the warm-up."""

    def __call__(self, iteration: int, optimizer: OptimizerConfig) -> float:
        """The rate of the step that begins after `iteration` steps of the run; `optimizer` has no nulls."""


def file_of(path: str) -> str | None:
    """The file that an import path names; None for a module, or when it is no import path."""
    match = IMPORT_PATH.fullmatch(path)
    return match["source"] if match and match["source"].endswith(".py") else None


def with_file(path: str, file: str) -> str:
    """The import path of the same function in another file."""
    return f"{file}:{path.rpartition(':')[2]}"


def load(path: str, what: str) -> Callable[..., Any]:
    """The function at an import path; `what` is the key of the configuration that names it.

    Raises:
        ConfigError: it is no import path, the module or file is not found or fails, or holds no such function.
    """
    match = IMPORT_PATH.fullmatch(path)
    where = f"{what} = {path!r}"
    if match is None:
        raise ConfigError(f"{where} is no import path: write package.module:function, or file.py:function")
    source, name = match["source"], match["name"]
    module = _run_file(Path(source), where) if source.endswith(".py") else _import(source, where)
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    if function is not None:
        raise ConfigError(f"{where}: {name} is a {type(function).__name__} there, not a function")
    defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    near = difflib.get_close_matches(name, defined, n=1)
    known = f"did you mean {near[0]}?" if near else f"it has {', '.join(sorted(defined)) or 'none'}"
    raise ConfigError(f"{where}: {module.__file__} has no function {name}; {known}")


def _import(name: str, where: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _failed(where, error) from error
        searched = os.environ.get("PYTHONPATH") or "not set"
        raise ConfigError(
            f"{where}: there is no module {error.name}. It must be installed for {sys.executable} or lie in a "
            f"directory of PYTHONPATH ({searched}); or name its file, as /path/of/{name.split('.')[-1]}.py:function"
        ) from error
    except Exception as error:
        raise _failed(where, error) from error


def _run_file(file: Path, where: str) -> ModuleType:
    """The module that a file is, by its own name; files beside it can be imported from it."""
    file = file.absolute()
    if not file.is_file():
        raise ConfigError(
            f"{where}: there is no file {file}; every node, and the container, must see it under this path"
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last: nothing there takes the place of what is installed
    found = importlib.util.find_spec(file.stem) if file.stem.isidentifier() else None
    if (
        found is None
        or found.origin is None
        or not Path(found.origin).exists()
        or not file.samefile(found.origin)
    ):
        raise ConfigError(
            f"{where}: {file.stem} is no name for a module, or another module's; rename the file"
        )
    try:
        return importlib.import_module(file.stem)
    except Exception as error:
        raise _failed(where, error) from error


def _failed(where: str, error: Exception) -> ConfigError:
    frames = traceback.extract_tb(error.__traceback__)
    last = next((f for f in reversed(frames) if not f.filename.startswith("<frozen")), None)
    at = f" ({last.filename}:{last.lineno})" if last else ""
    return ConfigError(f"{where} cannot be imported: {type(error).__name__}: {error}{at}")
