"""Checks of the pairs that a training and its evaluations will read: what their jobs would refuse when they start.

Only complete pairs on this machine are checked, and only if the extra `data` is installed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpcgen.config.validation import located
from hpcgen.errors import ConfigErrors, Problem
from hpcgen.planning.paths import trainer_data
from hpcgen.run_plan.plan import Plan
from hpcgen.text import counted
from trainer.contract.config import TrainerConfig
from trainer.contract.files.index_header import CHECKED_DOCUMENTS, is_complete
from trainer.contract.files.loss_mask import can_learn, has_mask, kind_problem, mask_path, size_problem
from trainer.contract.files.regular_file import open_regular
from trainer.contract.record import replaced
from trainer.contract.rules.data import split_weights
from trainer.contract.validation import config_of_split

if TYPE_CHECKING:
    from hpcgen.data.pair import Pair

_LARGER_SPLITS = ("98,1,1", "90,5,5", "70,15,15")
"""Values of data.split to suggest for small corpora."""
_CHECKED_CHATS = 1000
"""Number of chats of each pair that are checked for an answer that fits. The trainer checks all."""
_READ_BYTES = 2**28
"""Maximum size of the indices and masks that are read completely, within a second."""


def check_training_data(plan: Plan) -> None:
    """Refuses pairs of chats that the run would read as texts or the reverse, pairs that are not as recorded or whose
    documents do not end as the run requires, and a split that leaves a set without documents.

    Raises:
        ConfigErrors: there are such pairs, or the split does.
        HpcgenError: a pair is damaged.
    """
    trainer = plan.trainer
    if trainer is None or any(stage.kind.makes_pairs for stage in plan.stages.values()):
        return
    read = plan.prefixes
    datasets = [dataset for blend in trainer.data.blends.values() for dataset in blend]
    pairs = _open_pairs([dataset.prefix for dataset in datasets if dataset.prefix in read])
    evaluation = plan.config.evaluation
    texts = _open_pairs([text.prefix for text in evaluation.data] if evaluation.every is not None else [])
    ends = (_end_problem(trainer, pair) for pair in (*pairs, *texts) if trainer.data.needs_eod)
    first = next(filter(None, ends), None)
    documents = [len(pair.lengths) for pair in pairs]
    _refuse(
        plan,
        [
            *_mask_problems(trainer, read),
            *_record_problems(trainer, read),
            *_packing_problems(trainer, read),
            *([first] if first else []),
            *(_split_problems(trainer, documents) if pairs else []),
        ],
    )


def check_tokenizers(plan: Plan) -> None:
    """Refuses pairs that were not made with the run's tokenizer, as far as their records and their ids show.

    Raises:
        ConfigErrors: there are such pairs.
        HpcgenError: a pair is damaged.
    """
    if any(stage.kind.makes_pairs for stage in plan.stages.values()):
        return
    if not (prefixes := {key: prefix for key, prefix in _prefixes(plan).items() if is_complete(prefix)}):
        return
    try:
        from hpcgen.data.pair_tokenizers import other_tokenizers  # needs the extra `data`
    except ModuleNotFoundError:
        return
    data, unique = plan.config.data, [Path(prefix) for prefix in dict.fromkeys(prefixes.values())]
    found = other_tokenizers(data.tokenizer, unique, data.eod_id)
    _refuse(
        plan,
        [
            Problem(
                key,
                f"was made with a different tokenizer than data.tokenizer: {found[Path(prefix)]}",
                "name the tokenizer that made the pair in data.tokenizer, or tokenize the text again",
                about=("data.tokenizer",),
            )
            for key, prefix in prefixes.items()
            if Path(prefix) in found
        ],
    )


def _prefixes(plan: Plan) -> dict[str, str]:
    """Prefixes of the pairs that the planned stages read, or that their tokenizer must fit, by key."""
    read = plan.prefixes
    fits = any(stage.kind.uses_tokenizer for stage in plan.stages.values())
    data, evaluation = trainer_data(plan.config), plan.config.evaluation
    named = {
        f"data.{key}[{number}].prefix": dataset.prefix
        for key, blend in data.blends.items()
        for number, dataset in enumerate(blend)
        if fits or dataset.prefix in read
    }
    texts = {
        f"evaluation.data[{number}].prefix": text.prefix
        for number, text in enumerate(evaluation.data)
        if text.prefix in read or (evaluation.every is not None and named)
    }
    return named | texts


def _open_pairs(prefixes: Sequence[str]) -> list[Pair]:
    """The pairs; none if a file is missing, or the extra `data`. Without prefixes, numpy is not imported."""
    if not prefixes or not all(map(is_complete, prefixes)):
        return []
    try:
        from hpcgen.data.pair import open_pair  # needs the extra `data`
    except ModuleNotFoundError:
        return []
    return [open_pair(Path(prefix)) for prefix in prefixes]


def check_split(plan: Plan, documents: Sequence[int]) -> None:
    """Refuses a split that leaves a set without documents, given the number of documents that each pair will have.

    Raises:
        ConfigErrors: the split does.
    """
    if plan.trainer is not None:
        _refuse(plan, [*_split_problems(plan.trainer, documents)])


def _refuse(plan: Plan, problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigErrors([located(problem, plan.run.document, plan.run.config) for problem in problems])


def _split_problems(trainer: TrainerConfig, documents: Sequence[int]) -> Iterator[Problem]:
    """Yields a problem if data.split leaves training or validation without documents.

    `documents` is the number of documents with tokens in each pair.
    """
    evaluates = trainer.training.eval_iters > 0
    if not trainer.data.datasets or not (empty := empty_split(trainer.data.split, documents, evaluates)):
        return
    larger = next((split for split in _LARGER_SPLITS if not empty_split(split, documents, evaluates)), None)
    advice = [f"use larger shares, such as {larger}"] if larger else []
    advice += ["use fewer pairs (data.corpus.num_output_files)"] if len(documents) > 1 else []
    advice += ["set training.eval_iters: 0"] if empty == "valid" else []
    reason = f"leaves no document for {empty}: the largest pair has {counted(max(documents), 'document')}"
    yield Problem("data.split", reason, ", or ".join(advice) or "add documents")


def empty_split(split: str, documents: Sequence[int], evaluates: bool) -> str | None:
    """The first of train and valid that the run reads and that gets no document of any pair; None if there is none.

    A pair with n documents gives a set with the share [a, b) the documents round(a n) to round(b n) - 1, as in
    Megatron-Core.
    """
    weights = split_weights(split)
    if weights is None:
        return None
    bounds = [0.0, *itertools.accumulate(weight / sum(weights) for weight in weights)]
    sets = (("train", True), ("valid", evaluates))
    for (name, is_read), first, end in zip(sets, bounds, bounds[1:], strict=False):
        if is_read and not any(round(end * count) > round(first * count) for count in documents):
            return name
    return None


def _mask_problems(trainer: TrainerConfig, read: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each pair with a loss mask in a run on texts, or without a valid one in a run on chats.

    Only the pairs with the prefixes `read` are checked.
    """
    chats = {
        f"validation[{index}].datasets": config_of_split(trainer, each.split).data.sft
        for index, each in enumerate(trainer.data.validation)
    }
    for field, blend in trainer.data.blends.items():
        sft = chats.get(field, trainer.data.sft)
        for number, dataset in enumerate(blend):
            if dataset.prefix in read and is_complete(dataset.prefix):
                path = f"data.{field}[{number}].prefix"
                key = "sft" if field in chats else "data.sft"
                yield from _mask_problem(path, dataset.prefix, sft, key, trainer.model.seq_length)


def _mask_problem(path: str, prefix: str, sft: bool, key: str, seq_length: int) -> Iterator[Problem]:
    if other_kind := kind_problem(prefix, sft=sft, key=key):
        yield replaced(other_kind, path=path, subject="")
    elif sft:
        for pair in _open_pairs([prefix]):
            if problem := size_problem(prefix, int(pair.lengths.sum(dtype="int64"))):
                yield Problem(
                    path, f"has a loss mask, {mask_path(prefix)}, which {problem.reason}", problem.hint
                )
            elif pair.num_documents and not any(can_learn(mask, seq_length) for mask in _first_masks(pair)):
                chats = counted(min(pair.num_documents, _CHECKED_CHATS), "chat")
                reason = f"leaves nothing to learn of the first {chats} of {prefix}: no answer ends within a sample"
                hint = "use the length of most chats, or other chats"
                yield Problem("model.seq_length", reason, hint, about=(path,))


def _first_masks(pair: Pair) -> Iterator[bytes]:
    """The loss mask of each of the first chats of a pair."""
    with open_regular(Path(mask_path(pair.prefix))) as file:
        for length in pair.document_lengths()[:_CHECKED_CHATS].tolist():
            yield file.read(length)


def _packing_problems(trainer: TrainerConfig, read: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each pair of chats of which the training would read too few, if the masks are small. The job
    packs the chats in any case."""
    prefixes = [dataset.prefix for dataset in trainer.data.datasets or trainer.data.train]
    is_read = trainer.data.sft and all(
        prefix in read and is_complete(prefix) and has_mask(prefix) for prefix in prefixes
    )
    if not is_read or sum(os.stat(mask_path(prefix)).st_size for prefix in prefixes) > _READ_BYTES:  # noqa: PTH116
        return
    from hpcgen.planning.mixture import pair_readings  # runs on texts need none of it
    from hpcgen.run_plan.pair_summary import refused_chats

    yield from refused_chats(trainer, pair_readings(trainer))


def _record_problems(trainer: TrainerConfig, read: Collection[str]) -> Iterator[Problem]:
    """Yields a problem for each pair whose index or loss mask is not as the data stage recorded it, if these files are
    small. The job compares them in any case."""
    named = {
        dataset.prefix: f"data.{field}[{number}].prefix"
        for field, blend in trainer.data.blends.items()
        for number, dataset in enumerate(blend)
        if dataset.prefix in read and is_complete(dataset.prefix)
    }
    if not named:
        return
    from trainer.contract.resuming import recorded_pairs  # runs without pairs need none of it

    keys = {path: key for prefix, key in named.items() for path in recorded_pairs.compared_files(prefix)}
    if sum(path.stat().st_size for path in keys) > _READ_BYTES:
        return
    for problem in recorded_pairs.record_problems(named):
        yield Problem(keys[Path(problem.where)], f"has {problem.where}, but {problem.reason}", problem.hint)


def _end_problem(trainer: TrainerConfig, pair: Pair) -> Problem | None:
    """The problem of a pair if none of its first documents ends with the end-of-document token that the run needs."""
    data = trainer.data
    ends = list[int]()
    for number in range(min(pair.num_documents, CHECKED_DOCUMENTS)):
        token = pair.last_token(number)
        if token == data.eod_id:
            return None
        if token is not None:
            ends.append(token)
    if not ends:
        return None
    keys = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
    return Problem(
        f"data.{next(key for key in keys if getattr(data, key))}",
        f"needs documents that end with the token {data.eod_id}, but none of the first {len(ends):,} of {pair.prefix} "
        f"does. The first ends with {ends[0]}",
        "set data.eod_id to the end-of-document token of the pair, or tokenize it again with one (hpcgen "
        "always adds it; Megatron-LM's preprocess_data.py needs --append-eod)",
    )
