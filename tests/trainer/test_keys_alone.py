"""Each key alone in a run: it changes Megatron-Core's configuration or the arguments of its model, or is answered."""

from __future__ import annotations

import dataclasses
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import pytest

from hpcgen.planning.repairs import check
from tests.planning.cases import valid_facts
from trainer.contract.config import (
    ModelConfig,
    OptimizerConfig,
    ParallelismConfig,
    RopeScaling,
    TrainerConfig,
    field_hints,
)
from trainer.contract.config.resolve import resolve
from trainer.contract.rules.facts import Facts
from trainer.model.core_config import transformer_config
from trainer.model.kernels import Kernels
from trainer.optimizer.schedule import Schedule

pytestmark = pytest.mark.filterwarnings("ignore")  # Megatron-Core warns about its own defaults

PLAIN = Kernels(None, "torch", "native", None, on_gpu=False)
OF_THE_MODEL = (
    *("max_position_embeddings", "padded_vocab_size", "position_embedding_type"),
    *("untie_embeddings_and_output_weights", "layer_spec", "model_provider"),
)
"""Keys that GPTModel reads, or that choose it (trainer/model/build.py)."""
ELSEWHERE = {
    "model.seq_length": "the samples",
    "model.vocab_size": "padded_vocab_size",
    "model.init_method_std": "trainer/model/initialization.py",
    "parallelism.num_distributed_optimizer_instances": "the groups of ranks",
    "parallelism.overlap_grad_reduce": "DistributedDataParallelConfig",
    "parallelism.use_sharp": "the groups of ranks",
}
"""Keys with an effect outside of the model, with its place."""
BASE = {"model__add_bias_linear": False}
KEYS = [
    f"{section}.{field.name}"
    for section, cls in (("model", ModelConfig), ("parallelism", ParallelismConfig))
    for field in dataclasses.fields(cls)
]


def other_value(path: str) -> Any:
    """A value of the key `path` that is not its default."""
    section, key = path.split(".")
    given = getattr(getattr(valid_facts(**BASE), section), key)
    hint = field_hints({"model": ModelConfig, "parallelism": ParallelismConfig}[section])[key]
    while typing.get_origin(hint) in (Union, types.UnionType, Annotated):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is Literal:
        return next(choice for choice in reversed(typing.get_args(hint)) if choice != given)
    if typing.get_origin(hint) is tuple:
        return (1, *[0] * 11)
    values = {
        bool: not given,
        int: 2 if given is None else 2 * given,
        float: 0.5,
        str: "Et*6|t*6L" if "layout" in key else "module:name",
        RopeScaling: RopeScaling(rope_type="linear", factor=2.0),
    }
    return values[hint]


def effects(facts: Facts, directory: Path) -> dict[str, Any]:
    """Core's configuration of the run, and the arguments of its model."""
    config = TrainerConfig(
        name="alone",
        run_dir=str(directory),
        device="cpu",
        world_size=facts.world.size,
        **{name: getattr(facts, name) for name in ("model", "parallelism", "training", "optimizer", "data")},
    )
    resolved = resolve(config)
    return vars(transformer_config(resolved, PLAIN)) | {
        key: getattr(resolved.model, key) for key in OF_THE_MODEL
    }


@pytest.mark.parametrize("path", [key for key in KEYS if key not in ELSEWHERE])
def test_a_key_that_changes_nothing_alone_is_answered(path: str, tmp_path: Path) -> None:
    base = valid_facts(**BASE)
    alone = base.with_value(path, other_value(path))
    answers = [f"{problem.path} {problem.reason}" for problem in check(alone)[0]]
    if not answers:
        assert effects(alone, tmp_path) != effects(base, tmp_path)
    else:
        assert any(path.partition(".")[2] in answer for answer in answers)


def test_two_equal_runs_have_the_same_effects(tmp_path: Path) -> None:
    base = valid_facts(**BASE)
    assert effects(base, tmp_path) == effects(base, tmp_path)


SCHEDULE = {
    "min_lr": 5e-5,
    "lr_decay_iters": 40,
    "lr_wsd_decay_style": "linear",
    "lr_wsd_decay_iters": 7,
    "lr_warmup_init": 1e-6,
    "lr_warmup_iters": 3,
    "lr_warmup_fraction": 0.25,
}
STYLES = typing.get_args(field_hints(OptimizerConfig)["lr_decay_style"])


def rates(facts: Facts) -> list[float]:
    """The learning rates of all steps of the run."""
    optimizer: Any = types.SimpleNamespace(param_groups=[{}])
    steps = facts.training.train_iters
    schedule = Schedule(facts.resolved_optimizer, optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(schedule.rate())
        schedule.step(1)
    return found


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("key", SCHEDULE)
def test_a_key_of_the_schedule_changes_rates_or_is_answered(key: str, style: str) -> None:
    base = valid_facts(optimizer__lr=1e-4, optimizer__lr_decay_style=style, training__train_iters=50)
    path = f"optimizer.{key}"
    alone = dataclasses.replace(base.with_value(path, SCHEDULE[key]), set_by_user=(path,))
    answers = [problem.path for problem in check(alone)[0]]
    assert answers in ([], [path])
    assert (rates(alone) == rates(base)) == bool(answers)
