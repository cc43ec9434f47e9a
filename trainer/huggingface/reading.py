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
from trainer.contract.families.huggingface import model_of
from trainer.contract.families.model_family import HEAD, Family
from trainer.contract.files.git_lfs import pointer_problem
from trainer.contract.files.regular_file import read_bytes, require_regular
from trainer.contract.wording import few, shown
from trainer.huggingface import layouts
from trainer.huggingface.places import TensorPart, places
from trainer.huggingface.transforms import expected_shapes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_INDEX_BYTES = 100 * 2**20
MAX_NAME_LENGTH = 255

BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""Endings of tensors that older versions of transformers stored although they follow from config.json."""

FLOATS = ("F32", "F16", "BF16")
"""safetensors' names of the data types that a checkpoint can contain."""


class TensorFile:
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            TrainerError: the file is missing or damaged, or has a tensor of a type that a checkpoint cannot contain.
        """
        self.path = path
        self.shapes = _header(path)
        """Shape of each tensor by name."""
        self._open: Any = None

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """A tensor, or the part of it at `index`.

        Raises:
            TrainerError: the file cannot be read.
        """
        try:
            self._open = self._open or safe_open(self.path, framework="pt")
            tensor: torch.Tensor = self._open.get_slice(name)[index] if index else self._open.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise TrainerError(f"{self.path} cannot be read: {error}") from error
        return tensor

    def close(self) -> None:
        """Close the file until the next `read`."""
        self._open = None


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
        self._file_of: dict[str, TensorFile] = {}
        self._open: TensorFile | None = None
        shapes: dict[str, tuple[int, ...]] = {}
        for file in map(TensorFile, self.files):
            shapes |= file.shapes
            self._file_of |= dict.fromkeys(file.shapes, file)
        self.model = self.family.stored(self.model, shapes)
        self._places = _find_tensors(path, self.family, self.model, shapes)
        self._check_copies()

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name in the family.

        Raises:
            TrainerError: the file cannot be read.
        """
        place, shape = self._places[name]
        return self._load(place.stored, place.index(shape))

    def _load(self, stored: str, index: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """A tensor of a file, or the part of it at `index`."""
        file = self._file_of[stored]
        if self._open is not None and self._open is not file:
            self._open.close()
        self._open = file
        return file.read(stored, index)

    def _check_copies(self) -> None:
        for name, original in self.family.copies(self.model).items():
            if name not in self._file_of or torch.equal(self._load(name), self.read(original)):
                continue
            hint = ". If both are right, set tie_word_embeddings to false in config.json"
            raise TrainerError(
                f"{name} differs from {original}, although config.json ties them"
                f"{hint if name == HEAD else ''}",
                where=self.path,
            )


def _header(file: Path) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor in a safetensors file.

    Raises:
        TrainerError: the file is damaged, or has a tensor of a type that a checkpoint cannot contain.
    """
    shapes = {}
    try:
        require_regular(file)
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  # not a dictionary
                part = tensors.get_slice(name)
                shapes[name] = tuple(part.get_shape())
                if part.get_dtype() not in FLOATS and not name.endswith(BUFFERS):
                    raise TrainerError(
                        f"{name} has the type {part.get_dtype()}; supported are {', '.join(FLOATS)}",
                        where=file,
                    )
    except (SafetensorError, OSError) as error:
        raise TrainerError(
            pointer_problem(file) or f"{file} is not a valid safetensors file: {error}"
        ) from error
    return shapes


def _read_config(path: Path) -> tuple[Family, ModelConfig]:
    file = path / "config.json"
    if not path.is_dir():
        raise TrainerError(
            f"{path} is not a directory. Name a local copy of a Hugging Face model, "
            "from hf download MODEL --local-dir DIR"
        )
    if not file.exists():
        raise TrainerError(
            f"{path} has no config.json, so it is not a Hugging Face model.{layouts.found(path, layouts.NO_CONFIG)}"
        )
    document = read_json(file)
    try:
        return model_of(document)
    except ConfigError as error:
        raise TrainerError(str(error), where=file) from error


def read_json(file: Path) -> Any:
    """The content of a JSON file.

    Raises:
        TrainerError: it cannot be read, or is invalid.
    """
    try:
        if file.stat().st_size > MAX_INDEX_BYTES:
            raise TrainerError(f"{file} is larger than {MAX_INDEX_BYTES // 2**20} MiB")
        return json.loads(read_bytes(file))
    except (OSError, ValueError, RecursionError) as error:
        raise TrainerError(pointer_problem(file) or f"{file} cannot be read ({error})") from error


def _weight_files(path: Path) -> list[Path]:
    """The safetensors files, in the order of their names.

    Raises:
        TrainerError: there are none, or the index names one that is missing.
    """
    if (path / SINGLE).exists():
        return [path / SINGLE]
    if not (path / INDEX).exists():
        raise TrainerError(
            f"{path} has neither {SINGLE} nor {INDEX}.{layouts.found(path, layouts.NO_WEIGHTS)}"
        )
    index = read_json(path / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, Mapping) else None
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise TrainerError(f"{path / INDEX} has no weight_map")
    names = sorted(set(weight_map.values()))
    for name in names:
        if not _is_file_name(name):
            raise TrainerError(f"{path / INDEX} names {shown(name)}, which is not a file in its directory")
        if not (path / name).is_file():
            raise TrainerError(f"{path / name} is missing, but {INDEX} names it")
    return [path / name for name in names]


def _is_file_name(name: str) -> bool:
    is_short = len(name.encode(errors="replace")) <= MAX_NAME_LENGTH
    return is_short and name.isprintable() and "/" not in name and name not in ("", ".", "..")


def _find_tensors(
    path: Path, family: Family, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[TensorPart, tuple[int, ...]]]:
    """Where the files have each tensor of the family, and its shape.

    Raises:
        TrainerError: a tensor is missing, has another shape, or is unknown.
    """
    found = {}
    tied = None if model.untie_embeddings_and_output_weights else family.output(model)
    unused = {name for name in shapes if not name.endswith(BUFFERS)} - family.copies(model).keys()
    for weight in family.weights(model):
        for pattern, shape in expected_shapes(weight, model).items():
            for layer in range(model.num_layers if weight.in_layers else 1):
                name = pattern.format(n=layer)
                possible = places(name, tied, model.num_moe_experts or 1)
                place = next((place for place in possible if place.stored in shapes), None)
                if place is None:
                    hint = layouts.unusual_names(name, shapes)
                    raise TrainerError(
                        f"{path} has no tensor {name}, which {family.architecture} needs.{hint}"
                    )
                expected = place.stored_shape(shape)
                if shapes[place.stored] != expected:
                    hint = layouts.unusual_shapes(shapes)
                    raise TrainerError(
                        f"{place.stored} has the shape {list(shapes[place.stored])}, but config.json gives "
                        f"{list(expected)}.{hint}",
                        where=path,
                    )
                found[name] = place, shape
                unused.discard(place.stored)
    if unused:
        raise TrainerError(
            f"{path} has tensors that {family.architecture} does not: {few(sorted(unused), 5)}"
        )
    return found
