"""Rules for changing the configuration when a run resumes from a checkpoint.

A checkpoint records the resolved sections model, training, optimizer and data of its configuration. The type of each
key says how it may change (`config.resume`): freely; never, since the weights or the optimizer state would not fit; or,
without a word, if `checkpoint.changed` names it, which confirms the intent (`confirmations`).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainer.contract.config import (
    BlendConfig,
    LoraConfig,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.config.resolve import resolve
from trainer.contract.config.resume import Resume, resume_words
from trainer.contract.errors import TrainerError
from trainer.contract.model.batch_size import covering
from trainer.contract.problem import Problem
from trainer.contract.resuming import base_model
from trainer.contract.resuming.change import Change, show
from trainer.contract.resuming.confirmations import SEPARATOR, Confirmations
from trainer.contract.spelling import did_you_mean
from trainer.contract.wording import one_of

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": BlendConfig,
    "lora": LoraConfig,
}
"""Sections that a checkpoint records."""

WORDS = {
    f"{section}.{key}": word for section, cls in SECTIONS.items() for key, word in resume_words(cls).items()
}


def _with_word(word: Resume) -> frozenset[str]:
    return frozenset(name for name, each in WORDS.items() if each is word)


FREE = _with_word(Resume.FREE)
"""Keys that may change freely."""

FIXED = _with_word(Resume.FIXED)
"""Keys that must not change."""

FIXED_BY_OPTIMIZER_STATE = _with_word(Resume.GROUPED)
"""Keys that can only change together with a new optimizer state."""

NAMES = tuple(
    name
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if (name := f"{section}.{field.name}") not in WORDS
)
"""Hyperparameters: the keys that `checkpoint.changed` may name."""

LATER_SECTIONS = frozenset({"lora"})
"""Sections that earlier versions did not have. A record without one has its defaults."""

NOT_IN_OLDER_RECORDS = frozenset({"data.eod_id"})
"""Keys that are not compared with a record that lacks them, instead of with their defaults.

data.eod_id comes from the tokenizer and matters only for keys that are compared: reset_attention_mask,
reset_position_ids and eod_mask_loss.
"""

_ITERATION = re.compile(r"[0-9]{1,15}")

MORE_TOKENS = (
    "If tokens were added to the tokenizer of the checkpoint, set checkpoint.resize_vocabulary: true"
)
"""Hint for weights of another vocabulary."""

OF_VOCABULARY = frozenset({"model.padded_vocab_size", "model.vocab_size"})
"""Keys that differ if tokens were added."""

ANOTHER_RUN = "Use another paths.run_dir for another experiment"
"""Hint for the case that a finished run already uses the run directory."""


def sections(config: TrainerConfig) -> dict[str, dict[str, Any]]:
    """Sections of the resolved `config` that a checkpoint records, as plain data that survives a JSON round trip."""
    plain = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    result: dict[str, dict[str, Any]] = json.loads(json.dumps(plain))
    return result


def check_changes(
    saved: Mapping[str, Mapping[str, Any]],
    config: TrainerConfig,
    *,
    weights_only: bool = False,
    contents: Sequence[Change] = (),
    confirmations: Confirmations | None = None,
) -> tuple[Change, ...]:
    """Check that the resolved `config` may resume from the `saved` sections, and return the changed hyperparameters.

    `contents` are changed files, which must be named as well (`provenance`). `confirmations` is what
    checkpoint.changed still confirms. Default: all of its names, as if the checkpoint recorded none. With
    `weights_only`, for `checkpoint.finetune`, only the keys that must fit the weights are compared, the checkpoint may
    have MTP layers that the model lacks, and the result is empty.

    Raises:
        TrainerError: a shape differs, or a hyperparameter that is not named. Lists all of them.
    """
    misfits, differing = compare(saved, config, weights_only=weights_only)
    if misfits and all(change.name.startswith("lora.") for change in misfits):
        raise TrainerError(f"the checkpoint has other adapters: {_list(misfits)}")
    if misfits:
        is_of_vocabulary = {change.name for change in misfits} <= OF_VOCABULARY
        hint = f". {MORE_TOKENS}" if is_of_vocabulary and may_add_tokens(config, weights_only) else ""
        raise TrainerError(f"the checkpoint belongs to another model: {_list(misfits)}{hint}")
    if weights_only:
        return ()
    if regrouped := [change for change in differing if change.name in FIXED_BY_OPTIMIZER_STATE]:
        raise TrainerError(
            f"the checkpoint's optimizer state is grouped differently: {_list(regrouped)}. Keep its groups, or load "
            "only its weights with checkpoint.load and checkpoint.finetune: true"
        )
    changes = [*(change for change in differing if change.name not in FREE), *contents]
    confirmations = confirmations or Confirmations(config.checkpoint.changed)
    if any(change.name not in confirmations.names for change in changes):
        raise TrainerError(_unconfirmed_message(changes, confirmations))
    return tuple(changes)


def check_finished(
    saved: Mapping[str, Mapping[str, Any]],
    config: TrainerConfig,
    *,
    where: str,
    contents: Sequence[Change] = (),
    confirmations: Confirmations | None = None,
) -> None:
    """Check that the resolved `config` describes the run that is finished at `where`.

    Only free keys may differ. Naming other keys in `checkpoint.changed` does not help, because no step is left that a
    change could affect. `contents` are changed files (`provenance`).

    Raises:
        TrainerError: something differs. Lists all differences.
    """
    differing = [change for change in differences(saved, config) if change.name not in FREE]
    differing += contents
    if not differing:
        return
    message = (
        f"{where} is finished, but this configuration differs from it: {_list(differing)}. {ANOTHER_RUN}"
    )
    if not any(change.name in _fixed(config) | FIXED_BY_OPTIMIZER_STATE for change in differing):
        confirmations = confirmations or Confirmations(config.checkpoint.changed)
        message += (
            "; or, to continue training with this configuration, set a larger training.train_iters and "
            f"checkpoint.changed: {confirmations.list_for(differing)}"
        )
    raise TrainerError(message)


def check_iteration(iteration: int, config: TrainerConfig) -> None:
    """Check that a run that resumes from `iteration` does not end before it.

    Raises:
        TrainerError: train_iters is smaller.
    """
    last = config.training.train_iters
    if iteration > last:
        raise TrainerError(
            f"it is at iteration {iteration}, but training.train_iters = {last} is smaller. Set train_iters to "
            f"{iteration} or more; for a shorter run, use another paths.run_dir"
        )


def planned_training(record: Mapping[str, Any]) -> TrainingConfig:
    """Batch sizes of the attempt that saved `record`, and the train_iters that a run from the first sample would need.

    The trainer of hpcgen 0.2.0 planned its blend for this run.
    """
    saved = record["training"]
    training = TrainingConfig(
        micro_batch_size=saved["micro_batch_size"],
        global_batch_size=saved["global_batch_size"],
        train_iters=saved["train_iters"],
        rampup_batch_size=tuple(saved.get("rampup_batch_size") or ()) or None,
    )
    return covering(training, record["iteration"], record["consumed_samples"])


def name_problems(changed: Sequence[str]) -> Iterator[Problem]:
    """Yields the entries that `checkpoint.changed` may not have."""
    for index, entry in enumerate(changed):
        yield from _name_problems(f"checkpoint.changed[{index}]", entry)


def _name_problems(path: str, entry: str) -> Iterator[Problem]:
    name, separator, iteration = entry.partition(SEPARATOR)
    if separator and not _ITERATION.fullmatch(iteration):
        hint = f"write the iteration of the checkpoint, {name}{SEPARATOR}1000"
        yield Problem(path, f"has no iteration after {SEPARATOR}", hint)
    elif name in FREE:
        yield Problem(path, "may change without being named", "remove it")
    elif name in FIXED:
        yield Problem(path, "determines the shape of the weights and cannot change", "remove it")
    elif name in FIXED_BY_OPTIMIZER_STATE:
        reason = "determines the grouping of the optimizer state and cannot change"
        yield Problem(path, reason, "load only the weights (checkpoint.finetune)")
    elif name not in NAMES:
        ends = [known for known in NAMES if known.partition(".")[2] == name.rpartition(".")[2]]
        hint = f"did you mean {one_of(ends)}?" if ends else did_you_mean(name, NAMES, most=1)
        hint = hint or "write section and key, such as optimizer.lr"
        yield Problem(path, "is not a hyperparameter", hint)


def _fixed(config: TrainerConfig) -> frozenset[str]:
    """Keys that must not change. A learned table of positions has one row per position; rope has no table."""
    learned = config.model.position_embedding_type == "learned_absolute"
    return FIXED | {"model.max_position_embeddings"} if learned else FIXED


def _drops_mtp(change: Change) -> bool:
    """True if the model has no MTP layers, but the checkpoint does. The other weights do not depend on them."""
    return change.name == "model.mtp_num_layers" and change.after is None


def _adds_tokens(change: Change, saved: Mapping[str, Mapping[str, Any]], config: TrainerConfig) -> bool:
    """True if checkpoint.resize_vocabulary fills the rows of the vocabulary, which only grows."""
    if change.name != "model.padded_vocab_size" or not config.checkpoint.resize_vocabulary:
        return False
    before, after = saved["model"].get("vocab_size"), config.model.vocab_size
    return before is not None and after is not None and before <= after


def _uses_untrained_rows(change: Change) -> bool:
    """True if tokens were added in rows that padded the embedding of the checkpoint. These rows were never trained."""
    return (
        change.name == "model.vocab_size"
        and None not in (change.before, change.after)
        and (change.before < change.after)
    )


def may_add_tokens(config: TrainerConfig, weights_only: bool) -> bool:
    """True if checkpoint.resize_vocabulary is false and could be set."""
    return weights_only and not config.checkpoint.resize_vocabulary and config.lora.rank is None


def compare(
    saved: Mapping[str, Mapping[str, Any]], config: TrainerConfig, *, weights_only: bool
) -> tuple[list[Change], list[Change]]:
    """The `differences` that do not fit the weights of the checkpoint, and the others.

    With `weights_only`, for `checkpoint.finetune`, the others do not matter and are left out, and the checkpoint may
    have MTP layers that the model lacks.
    """
    differing, fixed = list(differences(saved, config)), _fixed(config)
    if config.lora.rank is not None and not base_model.has_adapters(saved):  # then the adapters are new
        differing = [change for change in differing if not change.name.startswith("lora.")]
    if weights_only:
        differing = [
            change for change in differing if not (_drops_mtp(change) or _adds_tokens(change, saved, config))
        ]
    misfits = [change for change in differing if change.name in fixed]
    # The new tokens of a larger vocabulary have rows of padding, which fit but were never trained.
    if weights_only and not misfits and not config.checkpoint.resize_vocabulary:
        misfits = [change for change in differing if _uses_untrained_rows(change)]
    return misfits, [] if weights_only else [change for change in differing if change.name not in fixed]


def differences(saved: Mapping[str, Mapping[str, Any]], config: TrainerConfig) -> Iterator[Change]:
    """Yields the keys whose values differ between the `saved` sections and the resolved `config`.

    A key that a section of an earlier version lacks had its default then (`_in_older_records`). Keys that only a later
    version has are not compared, and neither are missing sections.
    """
    for section, keys in sections(config).items():
        saved_keys = saved.get(section) or {}
        if saved_keys or section in LATER_SECTIONS:
            before = {**_in_older_records(section, saved_keys, config), **saved_keys}
            for key, value in keys.items():
                if key in before and before[key] != value:
                    yield Change(f"{section}.{key}", before[key], value)


def completed(partial: Mapping[str, Mapping[str, Any]], config: TrainerConfig) -> dict[str, dict[str, Any]]:
    """The `partial` sections of a checkpoint of Megatron-LM. Keys that its arguments lack count as unchanged."""
    return {section: {**keys, **partial.get(section, {})} for section, keys in sections(config).items()}


def _in_older_records(section: str, saved: Mapping[str, Any], config: TrainerConfig) -> dict[str, Any]:
    """Meaning of the keys that a section of an earlier version lacks: their defaults, with the listed exceptions."""
    result = _functions_in_older_records(saved, config.device) if section == "model" else {}
    current = getattr(config, section)
    for field in dataclasses.fields(SECTIONS[section]):
        is_known = field.name in saved or field.name in result or field.default is dataclasses.MISSING
        is_exception = f"{section}.{field.name}" in NOT_IN_OLDER_RECORDS
        # a default does not differ from itself, and resolving takes a while
        if not is_known and not is_exception and getattr(current, field.name) != field.default:
            result[field.name] = _default(section, field, config)
    return result


def _default(section: str, field: dataclasses.Field[Any], config: TrainerConfig) -> Any:
    """Value that `config` has without this key. Null thus means what follows from the other keys."""
    values = dataclasses.replace(getattr(config, section), **{field.name: field.default})
    return sections(resolve(dataclasses.replace(config, **{section: values})))[section][field.name]


def _functions_in_older_records(model: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Meaning of the keys of `model` whose meaning in records of earlier versions depends on the record.

    These computed the tanh approximation of GELU only in Core's fused kernel, on GPUs and with biases. A record does
    not contain its device, which is assumed to be the current one.
    """
    has_biases = model.get("add_bias_linear", True)
    gelu = "gelu_tanh" if device == "cuda" and has_biases else "gelu"
    return {"activation_func": None if model.get("swiglu") else gelu, "add_qkv_bias": has_biases}


def _unconfirmed_message(changes: Sequence[Change], confirmations: Confirmations) -> str:
    unconfirmed = [change for change in changes if change.name not in confirmations.names]
    values = [f"{change.name} = {show(change.before)}" for change in unconfirmed if not change.is_content]
    instead = [f"set {', '.join(values)}"] if values else []
    if len(values) < len(unconfirmed):
        instead.append("restore the original files (pairs with their modification times: cp -p, rsync -t)")
    spent = "".join(f". checkpoint.changed has {entry}" for entry in confirmations.spent(unconfirmed))
    return (
        f"these hyperparameters differ from the checkpoint: {_list(unconfirmed)}. If this is intended, set "
        f"checkpoint.changed: {confirmations.list_for(changes)}; otherwise {' and '.join(instead)}{spent}"
    )


def _list(changes: Sequence[Change]) -> str:
    return "; ".join(map(str, changes))
