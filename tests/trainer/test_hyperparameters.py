"""Hyperparameters that may differ from a checkpoint, and the messages if they differ without being named."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import pytest

from trainer.contract import config as configuration
from trainer.contract.config import ConfigError, Count, ModelConfig, TrainerConfig, fingerprint
from trainer.contract.config.resolve import resolve
from trainer.contract.config.resume import Fixed, Free, Grouped, Resume, resume_words
from trainer.contract.errors import TrainerError
from trainer.contract.model.batch_size import total_samples
from trainer.contract.model.experts import MODEL_KEYS
from trainer.contract.record import config_section
from trainer.contract.resuming import hyperparameters
from trainer.contract.resuming.change import show
from trainer.contract.resuming.hyperparameters import (
    NAMES,
    Change,
    check_changes,
    planned_training,
    sections,
)

DOCUMENT: dict[str, Any] = {
    "name": "test",
    "run_dir": "/tmp/test",
    "device": "cpu",
    "world_size": 1,
    "model": {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 8, "vocab_size": 10},
    "parallelism": {},
    "training": {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": 100},
    "optimizer": {"lr": 1e-2},
    "data": {"datasets": [{"prefix": "/a", "weight": 0.5}, {"prefix": "/b", "weight": 0.5}]},
}


def run(changed: tuple[str, ...] = (), **changes: Any) -> TrainerConfig:
    """The run with other values at "section__key"."""
    document = DOCUMENT | {"checkpoint": {"changed": list(changed)}}
    for name, value in changes.items():
        section, key = name.split("__")
        document[section] = document[section] | {key: value}
    return resolve(configuration.from_dict(TrainerConfig, document, "test"))


SAVED = sections(run())


def test_a_word_in_a_type_changes_nothing_else() -> None:
    @config_section
    class Section:
        bounded: Fixed[Count]
        optional: Free[Count | None] = None
        choice: Grouped[Literal["a", "b"]] = "a"
        plain: Count = 1

    assert configuration.field_hints(Section) == {
        "bounded": Count,
        "optional": Count | None,
        "choice": Literal["a", "b"],
        "plain": Count,
    }
    assert resume_words(Section) == {
        "bounded": Resume.FIXED,
        "optional": Resume.FREE,
        "choice": Resume.GROUPED,
    }
    with pytest.raises(ConfigError, match="bounded = 0 must be at least 1"):
        configuration.from_dict(Section, {"bounded": 0}, "test")


def test_the_same_configuration_changes_nothing() -> None:
    assert check_changes(SAVED, run()) == ()


def test_keys_that_affect_only_speed_or_reports_may_change() -> None:
    free = run(training__micro_batch_size=2, training__eval_interval=7, data__num_workers=0)
    assert check_changes(SAVED, free) == ()


def test_all_unnamed_differences_are_one_error_that_says_what_to_write() -> None:
    with pytest.raises(TrainerError) as error:
        check_changes(
            SAVED, run(("optimizer.lr",), training__seed=7, optimizer__lr=2e-2, optimizer__clip_grad=0.5)
        )
    assert str(error.value) == (
        "these hyperparameters differ from the checkpoint: training.seed: 1234 -> 7; optimizer.min_lr: 0.001 -> 0.002; "
        "optimizer.clip_grad: 1.0 -> 0.5. If this is intended, set checkpoint.changed: [optimizer.lr, training.seed, "
        "optimizer.min_lr, optimizer.clip_grad]; otherwise set training.seed = 1234, optimizer.min_lr = 0.001, "
        "optimizer.clip_grad = 1.0"
    )


def test_named_differences_are_returned() -> None:
    named = run(("optimizer.lr", "optimizer.min_lr", "optimizer.clip_grad"), optimizer__lr=2e-2)
    found = check_changes(SAVED, named)
    assert found == (Change("optimizer.lr", 0.01, 0.02), Change("optimizer.min_lr", 0.001, 0.002))
    assert str(found[0]) == "optimizer.lr: 0.01 -> 0.02"


def test_a_longer_run_says_that_its_schedule_moves() -> None:
    with pytest.raises(
        TrainerError, match=r"lr_decay_iters: 100 -> 200.*otherwise set optimizer.lr_decay_iters = 100"
    ):
        check_changes(SAVED, run(training__train_iters=200))
    kept = run(training__train_iters=200, optimizer__lr_decay_iters=100, optimizer__lr_warmup_iters=10)
    assert check_changes(SAVED, kept) == ()


def test_weights_of_a_blend_are_named_as_data() -> None:
    blend = [{"prefix": "/a", "weight": 0.9}, {"prefix": "/b", "weight": 0.1}]
    with pytest.raises(TrainerError, match=r"checkpoint.changed: \[data.datasets\]"):
        check_changes(SAVED, run(data__datasets=blend))
    assert [c.name for c in check_changes(SAVED, run(("data.datasets",), data__datasets=blend))] == [
        "data.datasets"
    ]


def test_a_shape_never_changes() -> None:
    with pytest.raises(
        TrainerError, match=r"another model: model.num_layers: 2 -> 4; model.swiglu: false -> true$"
    ):
        check_changes(SAVED, run(model__num_layers=4, model__swiglu=True, optimizer__lr=2e-2))


def test_positions_are_a_shape_only_where_they_are_learned() -> None:
    with pytest.raises(TrainerError, match=r"another model: model.max_position_embeddings: 8 -> 16"):
        check_changes(SAVED, run(model__max_position_embeddings=16))
    rope = {"model__position_embedding_type": "rope"}
    longer = run(("model.max_position_embeddings",), model__max_position_embeddings=16, **rope)
    assert len(check_changes(sections(run(**rope)), longer)) == 1


def test_weights_alone_fit_whatever_they_are_trained_with() -> None:
    other = run(optimizer__lr=1.0, training__seed=1, optimizer__parameter_groups=[{"match": "*"}])
    assert check_changes(SAVED, other, weights_only=True) == ()
    with pytest.raises(TrainerError, match="another model"):
        check_changes(SAVED, run(model__num_layers=4), weights_only=True)


def test_groups_of_the_optimizer_need_a_new_state() -> None:
    with pytest.raises(TrainerError, match=r"grouped differently.*finetune: true"):
        check_changes(SAVED, run(optimizer__parameter_groups=[{"match": "*"}]))


def test_keys_that_one_side_does_not_know_are_not_compared() -> None:
    assert check_changes({"optimizer": {"lr": 0.01, "momentum": 0.5}}, run()) == ()
    assert check_changes({}, run(optimizer__lr=2e-2)) == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("lr", "is not a hyperparameter; did you mean optimizer.lr?"),
        ("training.lr", "is not a hyperparameter; did you mean optimizer.lr?"),
        ("optimizer.weight_deca", "did you mean optimizer.weight_decay?"),
        ("training.train_iters", "may change without being named; remove it"),
        ("model.num_layers", "determines the shape of the weights and cannot change; remove it"),
        ("optimizer.parameter_groups", "determines the grouping of the optimizer state"),
        ("zzz", "is not a hyperparameter; write section and key, such as optimizer.lr"),
    ],
)
def test_names_that_are_not_hyperparameters_are_refused(name: str, reason: str) -> None:
    [problem] = hyperparameters.name_problems(["optimizer.lr", name])
    assert str(problem).startswith("checkpoint.changed[1] ")
    assert reason in str(problem)


def test_every_hyperparameter_may_be_named() -> None:
    assert not list(hyperparameters.name_problems(NAMES))
    plain = run()
    assert all(hasattr(getattr(plain, section), key) for section, _, key in (n.partition(".") for n in NAMES))


def test_planned_samples_follow_from_a_checkpoint() -> None:
    """The total is consumed samples plus remaining steps, so smaller batches before mean a smaller total."""
    record = {**SAVED, "iteration": 40, "consumed_samples": 160}
    reading = planned_training(record)
    assert total_samples(reading) == 400
    after_small_batches = planned_training({**record, "consumed_samples": 80})
    assert total_samples(after_small_batches) == 80 + 60 * 4


NEW_KEYS = (
    "activation_func",
    "add_qkv_bias",
    "qk_layernorm",
    "window_size",
    "rope_scaling",
    "num_moe_experts",
    *MODEL_KEYS,
)


EXPERTS = {"model__num_moe_experts": 4, "model__moe_aux_loss_coeff": 0.01, "model__add_bias_linear": False}


def test_experts_may_be_balanced_differently_but_not_replaced() -> None:
    saved = sections(run(**EXPERTS))
    other_layout = run(**EXPERTS, parallelism__expert_model_parallel_size=2)
    assert check_changes(saved, other_layout) == ()
    assert check_changes(saved, run(**EXPERTS, model__moe_layer_freq=(1, 1))) == ()
    balanced = run(("model.moe_aux_loss_coeff",), **(EXPERTS | {"model__moe_aux_loss_coeff": 0.02}))
    assert [str(change) for change in check_changes(saved, balanced)] == [
        "model.moe_aux_loss_coeff: 0.01 -> 0.02"
    ]
    for key, value in (("num_moe_experts", 8), ("moe_ffn_hidden_size", 16), ("moe_layer_freq", (0, 1))):
        with pytest.raises(TrainerError, match=f"another model: model.{key}: "):
            check_changes(saved, run(**(EXPERTS | {f"model__{key}": value})))


@config_section
class LaterConfig(TrainerConfig):
    """The configuration of a later version."""

    new_key: int | None = None


def test_a_later_version_with_more_keys_has_the_same_fingerprint() -> None:
    config = run()
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    assert fingerprint(LaterConfig(**values)) == fingerprint(config)
    assert fingerprint(LaterConfig(**values, new_key=1)) != fingerprint(config)
    assert fingerprint(run(parallelism__tensor_model_parallel_size=2)) != fingerprint(config)


def older(saved: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The record of a version without these keys."""
    return saved | {"model": {key: value for key, value in saved["model"].items() if key not in NEW_KEYS}}


@pytest.mark.parametrize(
    ("device", "model", "gelu"),
    [
        ("cuda", {}, "gelu_tanh"),
        ("cpu", {}, "gelu"),
        ("cuda", {"model__add_bias_linear": False}, "gelu"),
        ("cuda", {"model__swiglu": True}, None),
    ],
)
def test_an_older_record_means_what_was_computed(
    device: str, model: dict[str, Any], gelu: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DOCUMENT, "device", device)
    saved = older(sections(run(**model)))
    assert check_changes(saved, run(**model, model__activation_func=gelu)) == ()
    window = run(("model.window_size",), **model, model__activation_func=gelu, model__window_size=4)
    assert [str(change) for change in check_changes(saved, window)] == ["model.window_size: null -> 4"]
    with pytest.raises(TrainerError, match=r"another model: model.qk_layernorm: false -> true$"):
        check_changes(saved, run(**model, model__activation_func=gelu, model__qk_layernorm=True))
    with pytest.raises(TrainerError, match=r"another model: model.num_moe_experts: null -> 4$"):
        check_changes(saved, run(**model, model__activation_func=gelu, model__num_moe_experts=4))
    if gelu is not None:
        other = "gelu" if gelu == "gelu_tanh" else "gelu_tanh"
        with pytest.raises(TrainerError, match=f"activation_func: {gelu} -> {other}.*= {gelu}"):
            check_changes(saved, run(**model, model__activation_func=other))


def test_an_older_record_was_trained_across_documents() -> None:
    saved = sections(run())
    names = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss", "eod_id")
    saved["data"] = {key: value for key, value in saved["data"].items() if key not in names}
    assert check_changes(saved, run()) == ()
    with pytest.raises(TrainerError, match=r"data.eod_mask_loss: false -> true\. If this is intended"):
        check_changes(saved, run(data__eod_mask_loss=True, data__eod_id=7))
    changed = run(("data.eod_mask_loss",), data__eod_mask_loss=True, data__eod_id=7)
    assert [str(change) for change in check_changes(saved, changed)] == ["data.eod_mask_loss: false -> true"]


@config_section
class LaterModel(ModelConfig):
    """The section `model` of a later version."""

    new_shape: Fixed[bool] = False


def test_a_new_fixed_key_that_an_older_record_lacks_must_have_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(hyperparameters.SECTIONS, "model", LaterModel)
    monkeypatch.setattr(hyperparameters, "FIXED", hyperparameters.FIXED | {"model.new_shape"})

    def later(*, new_shape: bool) -> TrainerConfig:
        config = run()
        values = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(config.model)}
        return dataclasses.replace(config, model=LaterModel(**values, new_shape=new_shape))

    assert check_changes(SAVED, later(new_shape=False)) == ()
    with pytest.raises(TrainerError, match=r"another model: model.new_shape: false -> true$"):
        check_changes(SAVED, later(new_shape=True))


WITHOUT_KEY = {
    "model.activation_func": ["model.activation_func: gelu -> gelu_tanh"],
    "model.vocab_size": ["model.vocab_size: null -> 10"],
    "data.datasets": ["data.datasets: [] -> " + show(SAVED["data"]["datasets"])],
}
"""Differences from a record that lacks a key: only the keys that `run` sets, and what older versions computed."""


@pytest.mark.parametrize("section", hyperparameters.SECTIONS)
def test_a_key_that_a_record_lacks_had_its_default(section: str) -> None:
    """Null means what follows from the other keys, such as a min_lr of lr / 10."""
    for key in SAVED[section]:
        record = SAVED | {section: {name: value for name, value in SAVED[section].items() if name != key}}
        found = [str(change) for change in hyperparameters.differences(record, run())]
        assert found == WITHOUT_KEY.get(f"{section}.{key}", []), key
