"""Exports the adapters of a checkpoint as a directory of PEFT."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from trainer.contract.errors import TrainerError
from trainer.contract.families.model_family import Family
from trainer.contract.model.adapters import linears
from trainer.contract.wording import counted, few
from trainer.huggingface import card, check, tokenizer_files
from trainer.huggingface.adapters import StoredAdapters
from trainer.huggingface.destination import Report, new_directory, write_json, write_text
from trainer.huggingface.exporting import DTYPES, Options, prepare, save_tensors
from trainer.huggingface.peft_modules import PeftModule, peft_modules
from trainer.huggingface.source import Source
from trainer.huggingface.torch_dist import with_own_storage

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def export_adapter(checkpoint: Path, destination: Path, options: Options, report: Report) -> None:
    """Write the adapters of the checkpoint in an `iter_...` directory as a new directory of PEFT.

    Raises:
        TrainerError: the checkpoint has no adapters, or PEFT cannot express them. Nothing is written.
        NotSavedError: the destination cannot be written.
    """
    source, tokenizer, family = prepare(checkpoint, options)
    if source.base is None:
        raise TrainerError(f"{checkpoint} has no adapters, but a complete model. Export it without --adapter")
    adapters = StoredAdapters(checkpoint, source.lora, source.model)
    modules = list(peft_modules(family, source.model, adapters.linears))
    check_names(modules, family)
    base = options.base_model or source.huggingface_origin.get("name")
    dtype = DTYPES[options.dtype] if options.dtype else adapters.dtype
    with new_directory(destination) as directory:
        started = time.monotonic()
        tensors = _tensors(adapters, modules, dtype)
        save_tensors(tensors, directory / WEIGHTS)
        write_json(directory / CONFIG, adapter_config(source, family, modules, base))
        if tokenizer is not None:
            tokenizer_files.copy_tokenizer(tokenizer, directory, source.model.max_position_embeddings)
        write_text(
            directory / "README.md",
            card.adapter_card(source, family, str(dtype).removeprefix("torch."), base),
        )
        if options.check:
            report(check.compare_adapter(source, directory, base, dtype))
        seconds = time.monotonic() - started
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    report(
        f"exported the adapters of {checkpoint} for {family.architecture} to {destination}: "
        f"{counted(len(modules), 'module')}, {size / 1e6:,.2f} MB in {seconds:,.1f} s"
    )
    if base is None:
        report(f"{destination / CONFIG} names no base model. To name it, export with --base-model")


def adapter_config(
    source: Source, family: Family, modules: Sequence[PeftModule], base: str | None
) -> dict[str, Any]:
    """Content of adapter_config.json, without keys that have PEFT's defaults."""
    lora = source.lora
    assert lora.rank
    assert lora.alpha
    fused = {module.kind: len(module.parts) for module in modules if len(module.parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "lora_dropout": source.record["lora"]["dropout"],
        "target_modules": _target_modules(source, family, modules),
        "rank_pattern": {kind: parts * lora.rank for kind, parts in fused.items()},
        "alpha_pattern": {kind: _number(parts * lora.alpha) for kind, parts in fused.items()},
        "fan_in_fan_out": family.name == "gpt2",  # its matrices are Conv1D
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
    }


def _target_modules(source: Source, family: Family, modules: Sequence[PeftModule]) -> list[str]:
    """The last parts of the names of modules, if all modules that end so have an adapter, else complete names."""
    possible = Counter(
        module.kind for module in peft_modules(family, source.model, list(linears(source.model)))
    )
    present = Counter(module.kind for module in modules)
    return sorted(
        {module.kind if present[module.kind] == possible[module.kind] else module.name for module in modules}
    )


def _number(value: float) -> float | int:
    return int(value) if value == int(value) else value


def check_names(modules: Sequence[PeftModule], family: Family) -> None:
    """Check that PEFT can tell the adapters of experts from others.

    transformers stacks the experts of a layer, and PEFT converts adapters of separate experts by the last part of their
    names. It would convert other modules with these names too.

    Raises:
        TrainerError: other modules have such names.
    """
    of_experts = {module.kind for module in modules if module.expert is not None}
    others = [module.name for module in modules if module.expert is None and module.kind in of_experts]
    if others:
        raise TrainerError(
            f"PEFT cannot tell the adapters of the experts of {family.architecture} from those of {few(others, 2)}, "
            "which have the same names. Export without --adapter to merge them into the model"
        )


def _tensors(
    adapters: StoredAdapters, modules: Sequence[PeftModule], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    tensors = {}
    for module in modules:
        matrices = module.joined(adapters.matrices(module.linear, module.expert))
        for name, matrix in zip(module.tensor_names(), matrices, strict=True):
            tensors[name] = with_own_storage(matrix.to(dtype))
    return tensors
