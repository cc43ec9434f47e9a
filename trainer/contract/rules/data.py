"""Rules for the source of samples: exactly one source, and valid weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from trainer.contract.config import BlendConfig
from trainer.contract.problem import Problem, Setting
from trainer.contract.rules.facts import Facts, Rule, unread
from trainer.contract.rules.model import import_path

SPLIT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*", re.ASCII)

SET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


def data_has_one_source(facts: Facts) -> Iterator[Problem]:
    """Exactly one of datasets, train (with valid and test), dataset and mock (megatron/training/arguments.py,
    validate_args)."""
    data = facts.data
    given = [key for key in ("datasets", "train", "dataset", "mock") if getattr(data, key)]
    if len(given) > 1:
        yield Problem(
            path=f"data.{given[-1]}",
            reason=f"conflicts with data.{' and data.'.join(given[:-1])}. Samples come from only one of them",
            hint=f"keep one of {', '.join(given)}",
        )
    elif not given and not data.valid and not data.test:
        yield Problem(
            path="data",
            reason="has no source of samples",
            hint="set data.corpus, data.datasets, data.train (with valid and test), data.dataset, or data.mock: true",
        )


def dataset_is_an_import_path(facts: Facts) -> Iterator[Problem]:
    """dataset is package.module:function or file.py:function (trainer/contract/code/imports.py)."""
    yield from import_path("data.dataset", facts.data.dataset)


def held_out_blends_need_train(facts: Facts) -> Iterator[Problem]:
    """valid and test need train (megatron/training/arguments.py, validate_args)."""
    data = facts.data
    for key in ("valid", "test"):
        if getattr(data, key) and not data.train:
            yield Problem(
                path=f"data.{key}",
                reason="requires data.train, which is empty",
                hint=f"set data.train, or remove data.{key} and divide data.datasets with data.split",
                about=("data.train",),
            )


def weights_are_given_for_all_or_none(facts: Facts) -> Iterator[Problem]:
    """All datasets of a blend have a weight, or none (hpcgen's rule: null has no meaning next to weights)."""
    for key, blend in facts.data.blends.items():
        missing = [index for index, dataset in enumerate(blend) if dataset.weight is None]
        if missing and len(missing) < len(blend):
            yield Problem(
                path=f"data.{key}[{missing[0]}].weight",
                reason=f"is missing, but other datasets of data.{key} have a weight",
                hint="give all datasets a weight, or none to weight them by tokens",
            )


def split_is_valid(facts: Facts) -> Iterator[Problem]:
    """Three weights, the first above 0 (hpcgen's rule).

    Core's parse_and_normalize_split (megatron/core/datasets/blended_megatron_dataset_config.py) extracts digits and
    dots from any text, so -1 would count as 1.
    """
    if not facts.data.datasets:
        return
    weights = split_weights(facts.data.split)
    if weights is None or weights[0] == 0:
        yield Problem(
            path="data.split",
            reason="must be three weights, for train, valid and test, with train's above 0",
            candidates=["99990,8,2"],
            about=("data.train", "data.valid", "data.test"),
        )


def split_divides_datasets(facts: Facts) -> Iterator[Problem]:
    """split does not divide data.train (hpcgen's rule: nothing would be evaluated)."""
    if facts.data.train and facts.data.split != BlendConfig.split:
        yield Problem(
            path="data.split",
            reason="has no effect with data.train, which is not divided",
            hint="remove it, or name the pairs in data.datasets in place of data.train",
            about=("data.train",),
        )


def split_weights(split: str) -> tuple[float, float, float] | None:
    """The weights of train, valid and test; None if `split` is invalid."""
    matches = [SPLIT.fullmatch(part) for part in split.split(",")]
    weights = [float(match[1]) for match in matches if match]
    if len(matches) != 3 or len(weights) != 3 or not math.isfinite(sum(weights)):
        return None
    return weights[0], weights[1], weights[2]


def evaluation_has_samples(facts: Facts) -> Iterator[Problem]:
    """With eval_iters > 0, split has validation documents (hpcgen's rule: Core would loop forever).

    With a blend per split or with named validation sets, valid is optional.
    """
    weights = split_weights(facts.data.split)
    if facts.data.validation:
        return
    if facts.data.datasets and facts.training.eval_iters and weights and weights[0] and not weights[1]:
        yield Problem(
            path="training.eval_iters",
            reason=f"requires validation documents, but data.split = {facts.data.split} leaves none",
            candidates=[0],
            hint="set a data.split with a weight for valid, such as 99990,8,2, or name pairs in data.validation",
            about=("data.split",),
        )


def validation_sets_have_names(facts: Facts) -> Iterator[Problem]:
    """Names of validation sets are unique, and parts of metrics and file names (hpcgen's rule)."""
    seen = set[str]()
    for index, each in enumerate(facts.data.validation):
        if not SET_NAME.fullmatch(each.name):
            yield Problem(
                path=f"data.validation[{index}].name",
                reason="must be 1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit",
            )
        elif each.name in seen:
            yield Problem(
                path=f"data.validation[{index}].name",
                reason="is the name of two validation sets",
                hint="give each set a name of its own",
            )
        seen.add(each.name)


def validation_sets_are_evaluated(facts: Facts) -> Iterator[Problem]:
    """Named validation sets need pairs and an evaluation (hpcgen's rule: they would have no effect)."""
    data = facts.data
    for index, each in enumerate(data.validation):
        if not each.datasets:
            yield Problem(
                path=f"data.validation[{index}].datasets", reason="is empty", hint="name at least one pair"
            )
    if data.validation and not facts.training.eval_iters:
        yield Problem(
            path="data.validation",
            reason="has no effect with training.eval_iters = 0, which disables evaluation",
            hint="remove it, or set training.eval_iters",
            about=("training.eval_iters",),
        )
    elif data.validation and data.mock:
        yield Problem(
            path="data.validation",
            reason="conflicts with data.mock, whose token IDs mean nothing",
            hint="remove data.validation, or train on pairs",
            about=("data.mock",),
        )


def validation_sets_are_held_out(facts: Facts) -> Iterator[Problem]:
    """No pair of a named validation set is also trained on or tested (hpcgen's rule, as for valid and test)."""
    data = facts.data
    others = {dataset.prefix: key for key in ("datasets", "train", "test") for dataset in data.blends[key]}
    for index, each in enumerate(data.validation):
        for number, dataset in enumerate(each.datasets):
            if dataset.prefix in others:
                yield Problem(
                    path=f"data.validation[{index}].datasets[{number}].prefix",
                    reason=f"is also in data.{others[dataset.prefix]}, so its documents would be in both",
                    hint="name other pairs",
                    about=(f"data.{others[dataset.prefix]}",),
                )


def documents_need_transformer_engine_on_gpus(facts: Facts) -> Iterator[Problem]:
    """Separate documents need Transformer Engine on GPUs (hpcgen's rule).

    torch's kernels would need a mask of all queries and keys, which the trainer only builds on CPUs.
    """
    if facts.data.separates_documents and facts.device == "cuda" and facts.engine_problem:
        yield Problem(
            path=facts.data.separating_key,
            reason=f"requires Transformer Engine on GPUs, but {facts.engine_problem}",
            about=("training.transformer_impl",),
            candidates=[] if facts.data.sft else [False],
            settings=(Setting("training.transformer_impl", "transformer_engine"),),
        )


def positions_are_learned(facts: Facts) -> Iterator[Problem]:
    """reset_position_ids alone needs learned positions (megatron/core/models/gpt/gpt_model.py, _preprocess).

    Core computes rope from the number of tokens. With reset_attention_mask, its angles act like positions that begin
    with each document, because they only depend on distances. A custom model may read the positions.
    """
    model, data = facts.model, facts.data
    is_rope = model.position_embedding_type == "rope" and model.model_provider is None
    if is_rope and not data.separates_documents:
        reason = (
            "has no effect with model.position_embedding_type = rope and without data.reset_attention_mask"
        )
        yield from unread(
            facts,
            ["data.reset_position_ids"],
            reason,
            settings=(Setting("data.reset_attention_mask", True),),
            about=("model.position_embedding_type", "data.reset_attention_mask"),
        )


def end_of_document_is_used(facts: Facts) -> Iterator[Problem]:
    """eod_id needs a key that reads it (hpcgen's rule: it would have no effect)."""
    if not facts.data.needs_eod and not facts.data.sft:
        reason = "has no effect without reset_attention_mask, reset_position_ids or eod_mask_loss"
        yield from unread(
            facts,
            ["data.eod_id"],
            reason,
            about=("data.reset_attention_mask", "data.reset_position_ids", "data.eod_mask_loss"),
        )


def end_of_document_has_row(facts: Facts) -> Iterator[Problem]:
    """eod_id < padded_vocab_size (hpcgen's rule: no token has such an ID, so no document would end)."""
    eod_id, rows = facts.data.eod_id, facts.resolved_model.padded_vocab_size
    if eod_id is not None and rows is not None and eod_id >= rows:
        yield Problem(
            path="data.eod_id",
            reason=f"is not below the size of the vocabulary, model.padded_vocab_size = {rows}",
            hint="use the ID of the token at the end of each document",
            about=("model.padded_vocab_size",),
        )


RULES: tuple[Rule, ...] = (
    data_has_one_source,
    dataset_is_an_import_path,
    held_out_blends_need_train,
    weights_are_given_for_all_or_none,
    split_is_valid,
    split_divides_datasets,
    evaluation_has_samples,
    validation_sets_have_names,
    validation_sets_are_evaluated,
    validation_sets_are_held_out,
    documents_need_transformer_engine_on_gpus,
    positions_are_learned,
    end_of_document_is_used,
    end_of_document_has_row,
)

WARNINGS: tuple[Rule, ...] = ()

OF_MODEL: tuple[Rule, ...] = ()
