"""The model card of an exported model: what it is and how it was trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.contract.config import LoraConfig
from trainer.contract.families.model_family import Family
from trainer.contract.files.checkpoint_files import COMPLETE, consumed_tokens
from trainer.contract.files.hashing import sha256
from trainer.contract.files.regular_file import read_bytes
from trainer.contract.model.adapters import adapter_parameter_count
from trainer.contract.wording import few
from trainer.huggingface.source import Source
from trainer.huggingface.transforms import expected_shapes


def model_card(source: Source, family: Family, dtype: str) -> str:
    """README.md as Hugging Face's Hub shows it. It names datasets, but no directory of the cluster."""
    rows = "\n".join(f"| {title} | {text} |" for title, text in _facts(source, family, dtype))
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
        "# Model card\n\n"
        f"A {family.architecture}, exported by hpcgen from a checkpoint that was trained with Megatron-Core.\n\n"
        f"| | |\n| --- | --- |\n{rows}\n"
    )


def adapter_card(source: Source, family: Family, dtype: str, base: str | None) -> str:
    """README.md of a directory of PEFT. `base` is the name of the base model, or its path."""
    count = adapter_parameter_count(source.lora, source.model)
    facts = [
        ("parameters", f"{count:,} ({dtype})"),
        ("adapters", _described(source.lora)),
        *_training(source),
    ]
    rows = "\n".join(f"| {title} | {text} |" for title, text in facts)
    return (
        "---\nlibrary_name: peft\npipeline_tag: text-generation\n---\n\n"
        "# Model card\n\n"
        f"LoRA adapters of {f'`{Path(base).name}`' if base else 'a base model'} ({family.architecture}), exported by "
        f"hpcgen from a checkpoint that was trained with Megatron-Core.\n\n| | |\n| --- | --- |\n{rows}\n"
    )


def _facts(source: Source, family: Family, dtype: str) -> Iterator[tuple[str, str]]:
    model = source.model
    yield "parameters", f"{num_parameters(source, family):,} ({dtype})"
    shape = f"{model.num_layers} layers, hidden size {model.hidden_size}, {model.num_attention_heads} attention heads"
    if model.num_query_groups != model.num_attention_heads:
        shape += f", {model.num_query_groups} key/value heads"
    yield "shape", shape
    yield "vocabulary", f"{model.vocab_size:,} tokens"
    if source.base is not None:
        yield "adapters", f"{_described(source.lora)}, merged into the weights of the base model"
    yield from _training(source)


def _described(lora: LoraConfig) -> str:
    return f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}"


def _training(source: Source) -> Iterator[tuple[str, str]]:
    """Origin of the weights, and how they were trained."""
    model, record = source.model, source.record
    yield "checkpoint", f"{source.path.name}{_digest(source)}"
    if origin := source.huggingface_origin:
        yield "weights imported from", Path(str(origin.get("name", ""))).name
    if not source.iteration:
        return  # these weights were imported and not trained further
    yield "iteration", f"{source.iteration:,}"
    if samples := record.get("consumed_samples"):
        tokens = consumed_tokens(record)
        last = "" if tokens == samples * model.seq_length else ", the last ones"
        yield "training tokens", f"{tokens:,} ({samples:,} samples{last} of {model.seq_length:,})"
    training, optimizer = record.get("training", {}), record.get("optimizer", {})
    if "global_batch_size" in training:
        yield "global batch", f"{training['global_batch_size']:,} samples"
    if "lr" in optimizer:
        yield "learning rate", f"{optimizer['lr']:g}, {optimizer.get('lr_decay_style')}"
    if precision := record.get("precision") or training.get("precision"):
        yield "precision", str(precision)
    data = record.get("data") or {}
    if names := _datasets(data):
        yield "data", names
    if data.get("reset_attention_mask"):
        yield "documents", "separate: a text begins with its first token, without a special token before it"
    if versions := record.get("versions"):
        yield "trained with", ", ".join(f"{name} {version}" for name, version in versions.items())


def num_parameters(source: Source, family: Family) -> int:
    """Number of parameters without padding of the vocabulary."""
    return sum(
        math.prod(shape) * (source.model.num_layers if weight.in_layers else 1)
        for weight in family.weights(source.model)
        for shape in expected_shapes(weight, source.model).values()
    )


def _digest(source: Source) -> str:
    record = source.path / COMPLETE
    return f", record SHA-256 {sha256(read_bytes(record))}" if record.exists() else ""


def _datasets(data: dict[str, Any]) -> str:
    datasets = data.get("datasets") or data.get("train") or []
    names = [Path(str(dataset.get("prefix"))).name for dataset in datasets if isinstance(dataset, dict)]
    return few([f"`{name}`" for name in names], 10)
