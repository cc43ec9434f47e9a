"""Reads a Hugging Face directory: config.json and single tensors of its safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from trainer.contract.config import ConfigError, ModelConfig
from trainer.contract.errors import TrainerError
from trainer.contract.huggingface import model_of
from trainer.contract.model_family import Family
from trainer.huggingface.transforms import expected_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_INDEX_BYTES = 100 * 2**20

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of tensors that older versions of transformers stored although they follow from config.json."""

FLOATS = ("F32", "F16", "BF16")
"""safetensors' names of the data types that a checkpoint can contain."""


class HuggingFaceDirectory:
    """A directory with a supported model, whose files have all of its tensors."""

    def __init__(self, path: Path) -> None:
        """Reads config.json and the headers of the safetensors files.

        Raises:
            TrainerError: a file is missing or damaged, or the model is not supported.
        """
        self.path = path
        self.family, self.model = _read_config(path)
        self.files = _weight_files(path)
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, Any] | None = None
        shapes: dict[str, tuple[int, ...]] = {}
        for file in self.files:
            try:
                with safe_open(file, framework="pt") as tensors:
                    for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                        part = tensors.get_slice(name)
                        shapes[name] = tuple(part.get_shape())
                        if part.get_dtype() not in FLOATS and not name.endswith(BUFFERS):
                            raise TrainerError(
                                f"{file}: {name} has the type {part.get_dtype()}; supported are {', '.join(FLOATS)}"
                            )
                        self._file_of[name] = file
            except (SafetensorError, OSError) as error:
                raise TrainerError(f"{file} is not a valid safetensors file: {error}") from error
        self.model = self.family.stored(self.model, shapes)
        self._renamed = _check_tensors(path, self.family, self.model, shapes)
        self._check_copies()

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name in the family. It is a view of the file.

        Raises:
            TrainerError: the file cannot be read.
        """
        return self._load(self._renamed.get(name, name))

    def _load(self, stored: str) -> torch.Tensor:
        file = self._file_of[stored]
        try:
            if self._open is None or self._open[0] != file:
                self._open = (file, safe_open(file, framework="pt"))
            tensor: torch.Tensor = self._open[1].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise TrainerError(f"{file} cannot be read: {error}") from error
        return tensor

    def _check_copies(self) -> None:
        for name, original in self.family.copies(self.model).items():
            if name in self._file_of and not torch.equal(self._load(name), self.read(original)):
                raise TrainerError(f"{self.path}: {name} differs from {original}, which is not supported")


def _read_config(path: Path) -> tuple[Family, ModelConfig]:
    file = path / "config.json"
    if not path.is_dir():
        raise TrainerError(
            f"{path} is not a directory. Name a local copy of a Hugging Face model, "
            "from hf download MODEL --local-dir DIR"
        )
    document = read_json(file)
    try:
        return model_of(document)
    except ConfigError as error:
        raise TrainerError(f"{file}: {error}") from error


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
        TrainerError: it is missing or invalid.
    """
    try:
        if file.stat().st_size > MAX_INDEX_BYTES:
            raise TrainerError(f"{file} is larger than {MAX_INDEX_BYTES // 2**20} MiB")
        return json.loads(file.read_bytes())
    except FileNotFoundError:
        raise TrainerError(f"{file.parent} has no {file.name}, so it is not a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(f"{file} cannot be read ({error})") from error


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files, in the order of their names.

    Raises:
        TrainerError: there are none, or the index names one that is missing.
    """
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if not (path / INDEX).exists():
        others = (
            " It has weights in PyTorch's format; save it with safetensors" if any(path.glob("*.bin")) else ""
        )
        raise TrainerError(f"{path} has neither {SINGLE} nor {INDEX}.{others}")
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise TrainerError(f"{path / INDEX} has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if "/" in name or name in ("", ".", ".."):
            raise TrainerError(f"{path / INDEX} names {name!r}, which is not a file in its directory")
        if not (path / name).is_file():
            raise TrainerError(f"{path / name} is missing, but {INDEX} names it")
    return [path / name for name in names]


def _check_tensors(
    path: Path, family: Family, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Names in the files, by the names of the family, where they differ: models without a head omit a prefix.

    Raises:
        TrainerError: a tensor is missing, has another shape, or is unknown.
    """
    renamed = {}
    unused = {name for name in shapes if not name.endswith(BUFFERS)} - family.copies(model).keys()
    for weight in family.weights(model):
        for pattern, shape in expected_shapes(weight, model).items():
            for layer in range(model.num_layers if weight.in_layers else 1):
                name = pattern.format(n=layer)
                stored = name if name in shapes else name.partition(".")[2]
                if stored not in shapes:
                    raise TrainerError(f"{path} has no tensor {name}, which {family.architecture} needs")
                if shapes[stored] != shape:
                    raise TrainerError(
                        f"{path}: {stored} has the shape {list(shapes[stored])}, but config.json gives {list(shape)}"
                    )
                renamed[name] = stored
                unused.discard(stored)
    if unused:
        raise TrainerError(
            f"{path} has tensors that {family.architecture} does not: {', '.join(sorted(unused)[:5])}"
        )
    return renamed
