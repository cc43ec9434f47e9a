"""Imports the adapters in a directory of PEFT as a checkpoint with adapters only.

The trainer has one rank and one scale for all adapters, and adapters for all parts of a linear layer. What PEFT has
otherwise is expressed exactly: an adapter of a lower rank is filled up with zeros, as is the adapter of a part without
one in PEFT. Gradients of such zeros are zero, so training leaves them as they are. Another scale becomes part of
lora_B.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.contract.config import ConfigError, LoraConfig
from trainer.contract.errors import TrainerError
from trainer.contract.families.huggingface import FAMILIES, family_for
from trainer.contract.files import checkpoint_files
from trainer.contract.model.adapters import LINEARS, Linear, linears
from trainer.contract.resuming import base_model
from trainer.contract.wording import few, shown
from trainer.huggingface.adapter_exporting import CONFIG, WEIGHTS
from trainer.huggingface.adapters import MATRICES, matrix_shapes, tensor_name
from trainer.huggingface.destination import Report
from trainer.huggingface.new_checkpoint import record_of_import, report_use, write_checkpoint
from trainer.huggingface.peft_modules import Matrices, PeftModule, peft_modules
from trainer.huggingface.reading import TensorFile, read_json
from trainer.huggingface.source import Source, read_source
from trainer.huggingface.torch_dist import WeightsWriter

NUMBERS: dict[str, tuple[type, ...]] = {"r": (int,), "lora_alpha": (int, float), "lora_dropout": (int, float)}
"""Keys of adapter_config.json that are numbers, and their types."""

CARRIED = {
    *NUMBERS,
    *("peft_type", "task_type", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights"),
    # The tensors show which modules have adapters.
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    # These do not change what the adapters compute.
    *(
        "base_model_name_or_path",
        "revision",
        "inference_mode",
        "peft_version",
        "auto_mapping",
        "runtime_config",
    ),
    *("eva_config", "fan_in_fan_out", "megatron_core", "qalora_group_size", "ensure_weight_tying"),
}
"""Keys of adapter_config.json that may have other values than null, false, "none" and empty ones."""

PLAIN_INITIALIZATIONS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that leave the weights of the base model as they are."""

MAX_WEIGHTS_NAMED = 3

MAX_NUMBER = 1e9
"""Limit of the numbers in adapter_config.json. Larger ones are not meant, and would overflow."""


@dataclass(frozen=True)
class PeftConfig:
    """The settings of adapters that decide what they compute."""

    rank: int
    alpha: float
    dropout: float
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    base_model: str | None = None
    """Name on the Hub or path of the model that they were trained on."""

    def rank_of(self, module: PeftModule) -> int:
        """Rank of the adapter of a module."""
        return next(
            (rank for key, rank in self.rank_pattern.items() if _matches(key, module.name)), self.rank
        )

    def scale_of(self, module: PeftModule) -> float:
        """The output of the adapter of a module is scale x B A x."""
        alpha = next((a for key, a in self.alpha_pattern.items() if _matches(key, module.name)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def import_adapter(source: Path, base: Path, destination: Path, report: Report) -> None:
    """Write the adapters in the directory `source` as iteration 0 in a new directory of checkpoints.

    `base` is the checkpoint with the weights of their base model.

    Raises:
        TrainerError: the adapters are damaged, not supported, or do not fit the base model. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    model = read_source(base)
    if model.base is not None:
        raise TrainerError(
            f"{base} contains adapters, not a complete model. Name the checkpoint of the base model with --base"
        )
    peft = read_config(source)
    if not (source / WEIGHTS).is_file():
        raise TrainerError(
            f"{source} has no {WEIGHTS}. save_pretrained of PEFT writes it; pickled weights are not read"
        )
    file = TensorFile(source / WEIGHTS)
    modules = _modules(model, file, source)
    lora = _lora(peft, model, modules)

    def write(writer: WeightsWriter) -> dict[str, Any]:
        _write_adapters(peft, lora, modules, file, writer)
        return _record(model, lora, source)

    write_checkpoint(destination, 0, write)
    report(f"imported {source} ({len(modules)} modules with adapters) to {destination}")
    imported = model.huggingface_origin.get("name")
    if peft.base_model and imported and _model_name(peft.base_model) != _model_name(imported):
        report(
            f"warning: {CONFIG} names the base model {peft.base_model}, but {base} was imported from {imported}. "
            "Adapters are useless with other weights; compare the two"
        )
    if len({peft.scale_of(module) for module in modules}) > 1:
        report("the adapters have different scales, which became part of lora_B")
    report_use(destination, report, "train the adapters further")
    report(f"lora: {_section(lora)}")


def read_config(path: Path) -> PeftConfig:
    """The settings in adapter_config.json of the directory `path`.

    Raises:
        TrainerError: the file is damaged, or describes adapters that the trainer does not have. Names all such keys.
    """
    if not (path / CONFIG).is_file():
        raise TrainerError(f"{path} has no {CONFIG}, so it has no adapters of PEFT")
    document = read_json(path / CONFIG)
    if not isinstance(document, dict):
        raise TrainerError(f"{path / CONFIG} is not a JSON object")
    if problems := list(_problems(document)):
        raise TrainerError("; ".join(problems), where=path / CONFIG)
    return PeftConfig(
        document["r"],
        float(document["lora_alpha"]),
        float(document.get("lora_dropout", 0.0)),
        document.get("rank_pattern") or {},
        document.get("alpha_pattern") or {},
        bool(document.get("use_rslora")),
        document.get("base_model_name_or_path"),
    )


def _problems(document: Mapping[str, Any]) -> Iterator[str]:
    if document.get("peft_type") != "LORA":
        yield f"peft_type = {shown(document.get('peft_type'))} is not supported; only LORA is"
        return
    if document.get("task_type") not in (None, "CAUSAL_LM"):
        yield f"task_type = {shown(document['task_type'])} is not supported; only CAUSAL_LM is"
    if not isinstance(document.get("base_model_name_or_path"), str | None):
        yield f"base_model_name_or_path = {shown(document['base_model_name_or_path'])} is not a text"
    for key, types in NUMBERS.items():
        value = document.get(key, 0.0 if key == "lora_dropout" else None)
        is_valid = _is_positive(value, types) or (key == "lora_dropout" and value == 0)
        if not is_valid or (key == "lora_dropout" and value >= 1):
            yield f"{key} = {shown(value)} is not a valid number"
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = document.get(key) or {}
        types = NUMBERS["r" if key == "rank_pattern" else "lora_alpha"]
        if not isinstance(pattern, dict) or not all(_is_positive(each, types) for each in pattern.values()):
            yield f"{key} = {shown(pattern)} does not give a positive number for each module"
        elif regular := [name for name in pattern if not re.fullmatch(r"\^?[\w.-]+", name)]:
            yield f"{key} has regular expressions ({few(regular, 2)}); only names of modules are supported"
    if (start := document.get("init_lora_weights")) not in PLAIN_INITIALIZATIONS:
        yield (
            f"init_lora_weights = {shown(start)} changes the weights of the base model. Save the adapters with "
            "path_initial_model_for_weight_conversion of PEFT, which converts them"
        )
    for key, value in document.items():
        if key not in CARRIED and value not in (None, False, "none", [], {}, ""):
            yield f"{key} = {shown(value)} is not supported. Merge the adapters with merge_and_unload of PEFT"


def _model_name(path: str) -> str:
    """The name of a model without the names of its owner and of directories, such as qwen3-8b. For a snapshot in the
    cache of the Hub, a directory above has it."""
    cached = re.search(r"models--[^/]*?--([^/]+)/snapshots/", path)
    return (cached[1] if cached else Path(path).name).lower()


def _is_positive(value: Any, types: tuple[type[int] | type[float], ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool) and 0 < value <= MAX_NUMBER


def _matches(key: str, name: str) -> bool:
    """True if PEFT applies an entry of a pattern to the module `name` (get_pattern_key of PEFT)."""
    return name == key.removeprefix("^") or (not key.startswith("^") and name.endswith(f".{key}"))


def _modules(model: Source, file: TensorFile, source: Path) -> list[PeftModule]:
    """The modules with adapters in a file.

    Raises:
        TrainerError: the base model has no such module, or no family of transformers expresses it.
    """
    origin = model.huggingface_origin.get("family")
    try:
        family = family_for(model.model, origin if origin in FAMILIES else None)
    except ConfigError as error:
        raise TrainerError(f"{model.path} has no names in transformers: {error}") from error
    possible = list(peft_modules(family, model.model, list(linears(model.model))))
    found = [module for module in possible if any(name in file.shapes for name in module.tensor_names())]
    known = {name for module in found for name in module.tensor_names()}
    if unknown := sorted(file.shapes.keys() - known):
        raise TrainerError(
            f"{file.path} has tensors that are not matrices of adapters of {family.architecture}: "
            f"{few(unknown, MAX_WEIGHTS_NAMED)}. Supported are adapters of "
            f"{', '.join(sorted({module.kind for module in possible}))}"
        )
    if missing := sorted(known - file.shapes.keys()):
        raise TrainerError(f"{file.path} has no {few(missing, MAX_WEIGHTS_NAMED)}")
    if not found:
        raise TrainerError(f"{file.path} has no adapters")
    return found


def _lora(peft: PeftConfig, model: Source, modules: Sequence[PeftModule]) -> LoraConfig:
    """The section `lora` with the highest rank, and the scale of the first module."""
    rank = max(map(peft.rank_of, modules))
    names = {module.linear.name for module in modules}
    return LoraConfig(
        rank=rank,
        alpha=peft.scale_of(modules[0]) * rank,
        dropout=peft.dropout,
        target_modules=_target_modules(list(linears(model.model)), names),
    )


def _target_modules(possible: Sequence[Linear], names: set[str]) -> tuple[str, ...]:
    """The shortest resolved lora.target_modules that choose the linear layers in `names`."""
    chosen: list[str] = []
    for kind in LINEARS:
        of_kind = [linear.name for linear in possible if linear.kind == kind]
        present = [name for name in of_kind if name in names]
        chosen += [kind] if present == of_kind and present else present
    return tuple(chosen)


def _write_adapters(
    peft: PeftConfig, lora: LoraConfig, modules: Sequence[PeftModule], file: TensorFile, writer: WeightsWriter
) -> None:
    """Write all matrices in fp32, and the index."""
    assert lora.rank
    by_place: dict[tuple[str, int | None], list[PeftModule]] = {}
    for module in modules:
        by_place.setdefault((module.linear.name, module.expert), []).append(module)
    for linear in {module.linear.name: module.linear for module in modules}.values():
        for expert in [None] if linear.num_experts is None else range(linear.num_experts):
            matrices: dict[str, Matrices] = {}
            for module in by_place.get((linear.name, expert), ()):
                matrices |= module.split(*_read(peft, lora, module, file))
            _write_linear(linear, expert, lora.rank, matrices, writer)
    writer.finish()


def _read(peft: PeftConfig, lora: LoraConfig, module: PeftModule, file: TensorFile) -> Matrices:
    """The matrices of a module with the rank and the scale of `lora`.

    Raises:
        TrainerError: the file cannot be read, or a matrix has another shape or numbers that are not finite.
    """
    assert lora.rank
    assert lora.alpha
    own = peft.rank_of(module)
    names = module.tensor_names()
    for name, shape in zip(names, ((own, module.inputs), (module.outputs, own)), strict=True):
        if file.shapes[name] != shape:
            raise TrainerError(
                f"{name} has the shape {list(file.shapes[name])}, but the base model and {CONFIG} give {list(shape)}",
                where=file.path,
            )
    a, b = (file.read(name).float() for name in names)
    b = b * (peft.scale_of(module) / (lora.alpha / lora.rank))
    for name, matrix in zip(names, (a, b), strict=True):
        if not bool(matrix.isfinite().all()):
            raise TrainerError(f"{name} has numbers that are not finite", where=file.path)
    padding = lora.rank - own
    return torch.nn.functional.pad(a, (0, 0, 0, padding)), torch.nn.functional.pad(b, (0, padding))


def _write_linear(
    linear: Linear, expert: int | None, rank: int, matrices: Mapping[str, Matrices], writer: WeightsWriter
) -> None:
    """Write the matrices of all parts, with zeros for parts that `matrices` does not have."""
    index = () if expert is None else (expert,)
    experts = () if linear.num_experts is None else (linear.num_experts,)
    for part in linear.parts:
        shapes = matrix_shapes(part, rank)
        pair = matrices.get(part.name) or tuple(torch.zeros(shapes[name]) for name in MATRICES)
        for name, matrix in zip(MATRICES, pair, strict=True):
            writer.write_part(tensor_name(linear, part, name), (*experts, *shapes[name]), index, matrix)


def _record(base: Source, lora: LoraConfig, source: Path) -> dict[str, Any]:
    """Content of COMPLETE, without the files."""
    return record_of_import(
        base.record["precision"],
        {**base.record["model"], "mtp_num_layers": None},
        {
            base_model.ORIGIN: base_model.entry(checkpoint_files.describe(base.path)),
            "peft": {
                "name": str(source.absolute()),
                **{name: checkpoint_files.describe_file(source / name) for name in (CONFIG, WEIGHTS)},
            },
        },
        lora=json.loads(json.dumps(dataclasses.asdict(lora))),
    )


def _section(lora: LoraConfig) -> str:
    """The section `lora` of a run file that trains the adapters further."""
    keys = {
        "rank": lora.rank,
        "alpha": lora.alpha,
        "dropout": lora.dropout,
        "target_modules": lora.target_modules,
    }
    return "{" + ", ".join(f"{key}: {json.dumps(value)}" for key, value in keys.items() if value) + "}"
