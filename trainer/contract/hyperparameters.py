"""What may change when a run goes on from a checkpoint, and what must be named for it; standard library only.

A checkpoint keeps the resolved sections model, training, optimizer and data of the configuration that made it. Each
of their keys is one of three: it may change freely; it may change when `checkpoint.changed` names it, which says that
it is meant; or it must stay, since the weights or the optimizer's state would not fit.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.contract.batch_size import covering
from trainer.contract.config import (
    BlendConfig,
    ConfigError,
    ModelConfig,
    OptimizerConfig,
    TrainerConfig,
    TrainingConfig,
)
from trainer.contract.errors import TrainerError

SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "training": TrainingConfig,
    "optimizer": OptimizerConfig,
    "data": BlendConfig,
}
"""The sections that a checkpoint keeps."""

FREE = frozenset(
    {
        "model.init_method_std",
        "model.vocab_size",
        "training.micro_batch_size",
        "training.train_iters",
        "training.transformer_impl",
        "training.cuda_graph_impl",
        "training.deterministic_mode",
        "training.recompute_granularity",
        "training.recompute_method",
        "training.recompute_num_layers",
        "training.eval_interval",
        "training.eval_iters",
        "training.distributed_timeout_minutes",
        "training.distributed_timeout_seconds_after_init",
        "training.loss_spike_factor",
        "training.skip_loss_spikes",
        "optimizer.lr_warmup_fraction",
        "optimizer.initial_loss_scale",
        "optimizer.min_loss_scale",
        "data.valid",
        "data.test",
        "data.num_workers",
        "data.cache_dir",
    }
)
"""Keys that change nothing of what is learnt, only how fast, how long and what is reported."""

FIXED = frozenset(
    {
        "model.num_layers",
        "model.hidden_size",
        "model.num_attention_heads",
        "model.ffn_hidden_size",
        "model.num_query_groups",
        "model.kv_channels",
        "model.position_embedding_type",
        "model.normalization",
        "model.swiglu",
        "model.add_bias_linear",
        "model.untie_embeddings_and_output_weights",
        "model.padded_vocab_size",
    }
)
"""Keys that decide the shapes of the weights, and what they mean."""

OF_OPTIMIZER_STATE = frozenset({"optimizer.parameter_groups"})
"""Keys that decide how the optimizer's state is grouped: another one starts with a new state."""

NAMES = tuple(
    name
    for section, cls in SECTIONS.items()
    for field in dataclasses.fields(cls)
    if (name := f"{section}.{field.name}") not in FREE | FIXED | OF_OPTIMIZER_STATE
)
"""The hyperparameters: what `checkpoint.changed` may name."""


ANOTHER_RUN = "Name another run_dir for another experiment"
"""The hint for a finished run that is in the way."""


@dataclass(frozen=True)
class Change:
    """A hyperparameter that differs from the checkpoint's."""

    name: str
    """As "optimizer.lr"."""
    before: Any
    """The checkpoint's value, as JSON has it."""
    after: Any
    is_content: bool = False
    """Whether the value is the same, and the content of a file that it names differs: before and after say how."""

    def __str__(self) -> str:
        return f"{self.name}: {_show(self.before)} -> {_show(self.after)}"


def sections(config: TrainerConfig) -> dict[str, dict[str, Any]]:
    """What a checkpoint keeps of the resolved `config`: plain data, equal to itself after a trip through JSON."""
    plain = {name: dataclasses.asdict(getattr(config, name)) for name in SECTIONS}
    result: dict[str, dict[str, Any]] = json.loads(json.dumps(plain))
    return result


def check_changes(
    saved: Mapping[str, Mapping[str, Any]],
    config: TrainerConfig,
    *,
    weights_only: bool = False,
    contents: Sequence[Change] = (),
) -> tuple[Change, ...]:
    """The hyperparameters of the resolved `config` that differ from the `saved` sections, all of them named.

    `contents` are files that differ from the checkpoint's, which must be named as well (`trainer.contract.provenance`).
    Keys that either side does not know (another version's) are not compared. With `weights_only`, for
    `checkpoint.finetune`, only what must fit the weights is, and the result is empty.

    Raises:
        ConfigError: checkpoint.changed names no hyperparameter.
        TrainerError: a shape differs, or hyperparameters that are not named; one message lists all.
    """
    check_names(config.checkpoint.changed)
    differing = list(_differing(saved, sections(config)))
    if misfits := [change for change in differing if change.name in _fixed(config)]:
        raise TrainerError(f"the checkpoint is of another model: {_list(misfits)}")
    if weights_only:
        return ()
    if misfits := [change for change in differing if change.name in OF_OPTIMIZER_STATE]:
        raise TrainerError(
            f"the checkpoint's optimizer state is grouped in another way: {_list(misfits)}; keep its groups, or take "
            "only its weights, with checkpoint.load and checkpoint.finetune: true"
        )
    changes = [*(change for change in differing if change.name not in FREE), *contents]
    unnamed = [change for change in changes if change.name not in config.checkpoint.changed]
    if unnamed:
        raise TrainerError(_unnamed(unnamed, config))
    return tuple(changes)


def check_finished(
    saved: Mapping[str, Mapping[str, Any]],
    config: TrainerConfig,
    *,
    where: str,
    contents: Sequence[Change] = (),
) -> None:
    """Checks that the resolved `config` asks for what the finished run at `where` has done.

    Nothing may differ but what is free, named in `checkpoint.changed` or not: there is no step left for a change to
    act on. `contents` are files that differ from the checkpoint's (`trainer.contract.provenance`).

    Raises:
        TrainerError: something differs; one message lists all.
    """
    differing = [change for change in _differing(saved, sections(config)) if change.name not in FREE]
    differing += contents
    if not differing:
        return
    message = (
        f"{where} is finished, and this configuration asks for another run: {_list(differing)}. {ANOTHER_RUN}"
    )
    if not any(change.name in _fixed(config) | OF_OPTIMIZER_STATE for change in differing):
        changed = dict.fromkeys(change.name for change in differing)
        message += (
            "; or, to train on with this configuration, set a larger train_iters and checkpoint.changed: "
            f"[{', '.join(changed)}]"
        )
    raise TrainerError(message)


def check_iteration(iteration: int, config: TrainerConfig) -> None:
    """Checks that a run that goes on from `iteration` ends no earlier.

    Raises:
        TrainerError: train_iters is less.
    """
    last = config.training.train_iters
    if iteration > last:
        raise TrainerError(
            f"it is of iteration {iteration}, and training.train_iters = {last} ends before it. Set train_iters to "
            f"{iteration} or more; for a shorter run, name another run_dir"
        )


def earlier_reading(record: Mapping[str, Any] | None) -> TrainingConfig | None:
    """How many samples the life asked for that saved the checkpoint of this `record`; None of Megatron-LM's."""
    if record is None or "training" not in record:
        return None
    saved = record["training"]
    training = TrainingConfig(
        micro_batch_size=saved["micro_batch_size"],
        global_batch_size=saved["global_batch_size"],
        train_iters=saved["train_iters"],
        rampup_batch_size=tuple(saved.get("rampup_batch_size") or ()) or None,
    )
    return covering(training, record["iteration"], record["consumed_samples"])


def check_names(changed: Sequence[str]) -> None:
    """Checks that `checkpoint.changed` names hyperparameters.

    Raises:
        ConfigError: the first that it names and that is none, with what may have been meant.
    """
    for name in changed:
        if reason := name_problem(name):
            raise ConfigError(f"checkpoint.changed: {name!r} {reason[0]}; {reason[1]}")


def name_problem(name: str) -> tuple[str, str] | None:
    """Why `name` is no hyperparameter that may be named, and what to do; None when it is one."""
    if name in NAMES:
        return None
    if name in FREE:
        return "may change without being named", "remove it"
    if name in FIXED:
        return "decides the shape of the weights and cannot change", "remove it"
    if name in OF_OPTIMIZER_STATE:
        return (
            "decides how the optimizer's state is grouped and cannot change",
            "take only the weights (checkpoint.finetune)",
        )
    ends = [known for known in NAMES if known.partition(".")[2] == name.rpartition(".")[2]]
    near = ends or difflib.get_close_matches(name, NAMES, n=1)
    return "is no hyperparameter", f"did you mean {' or '.join(near)}?" if near else "write as optimizer.lr"


def _fixed(config: TrainerConfig) -> frozenset[str]:
    """The shapes; a learned table of positions has one row per position, rotary embeddings have no table."""
    learned = config.model.position_embedding_type == "learned_absolute"
    return FIXED | {"model.max_position_embeddings"} if learned else FIXED


def _differing(
    saved: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]
) -> Iterator[Change]:
    for section, keys in wanted.items():
        there = saved.get(section, {})
        for key, value in keys.items():
            if key in there and there[key] != value:
                yield Change(f"{section}.{key}", there[key], value)


def _unnamed(unnamed: Sequence[Change], config: TrainerConfig) -> str:
    names = list(dict.fromkeys((*config.checkpoint.changed, *(change.name for change in unnamed))))
    values = [f"{change.name} = {_show(change.before)}" for change in unnamed if not change.is_content]
    instead = [f"set {', '.join(values)}"] if values else []
    if len(values) < len(unnamed):
        instead.append(
            "put the files back as they were (pairs with their modification times: cp -p, rsync -t)"
        )
    return (
        f"these differ from the checkpoint's: {_list(unnamed)}. If that is meant, write "
        f"checkpoint.changed: [{', '.join(names)}]; else {' and '.join(instead)}"
    )


def _list(changes: Sequence[Change]) -> str:
    return "; ".join(map(str, changes))


def _show(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
