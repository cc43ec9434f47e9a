"""The rules on random runs: right about what fits, and true to their hints."""

from __future__ import annotations

import random
import re
import types
import typing
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planning.repairs import WARNINGS, check
from tests.planning.cases import MLA, MTP, YARN, valid_facts
from trainer.contract.config import RecomputeModule, TrainerConfig, field_hints
from trainer.contract.config.resolve import resolve
from trainer.contract.problem import Problem
from trainer.contract.rules.engine import ERRORS, TRAINING, facts_of, require
from trainer.contract.rules.facts import Facts

SIZES = {
    "model__num_layers": st.integers(1, 12),
    "model__hidden_size": st.sampled_from([32, 48, 60, 64]),
    "model__num_attention_heads": st.sampled_from([1, 2, 4, 6, 8, 12]),
    "model__num_query_groups": st.sampled_from([None, 1, 2, 3, 4]),
    "model__ffn_hidden_size": st.sampled_from([None, 100, 128]),
    "model__seq_length": st.sampled_from([32, 36, 64, 65]),
    "model__vocab_size": st.just(1000),
    "parallelism__tensor_model_parallel_size": st.integers(1, 8),
    "parallelism__pipeline_model_parallel_size": st.integers(1, 4),
    "parallelism__virtual_pipeline_model_parallel_size": st.sampled_from([None, None, 1, 2, 3]),
    "parallelism__context_parallel_size": st.sampled_from([1, 1, 2, 3]),
    "parallelism__sequence_parallel": st.booleans(),
    "model__num_moe_experts": st.sampled_from([None, None, 4, 6, 8]),
    "model__add_bias_linear": st.just(False),
    "parallelism__expert_model_parallel_size": st.sampled_from([1, 1, 1, 2, 3, 4]),
    "parallelism__expert_tensor_parallel_size": st.sampled_from([None, None, None, 1, 2, 3]),
    "parallelism__num_distributed_optimizer_instances": st.sampled_from([1, 1, 1, 1, 2, 3, 16]),
    "training__micro_batch_size": st.integers(1, 3),
    "training__global_batch_size": st.integers(1, 48),
    "nodes": st.integers(1, 6),
}
FEW = settings(max_examples=12)
"""For tests that compute many runs in each example."""

RUNS = st.fixed_dictionaries(SIZES).map(lambda changes: valid_facts(**changes))


def fits(facts: Facts) -> bool:
    """The conditions of a layout, written independently of the rules."""
    model, axes, training = facts.model, facts.parallelism, facts.training
    tp, pp, cp = (
        axes.tensor_model_parallel_size,
        axes.pipeline_model_parallel_size,
        axes.context_parallel_size,
    )
    vpp = axes.virtual_pipeline_model_parallel_size or 1
    heads, groups = model.num_attention_heads, model.num_query_groups or model.num_attention_heads
    ranks, replica = facts.world.count * 8, tp * pp * cp
    if ranks % replica or training.global_batch_size % (training.micro_batch_size * (ranks // replica)):
        return False
    num_microbatches = training.global_batch_size // (training.micro_batch_size * (ranks // replica))
    ffn = model.ffn_hidden_size or 4 * model.hidden_size
    ep, etp = axes.expert_model_parallel_size, axes.expert_tensor_parallel_size
    instances = axes.num_distributed_optimizer_instances
    if model.num_moe_experts is None:
        experts_fit = ep == 1 and etp is None
    else:
        etp = etp or tp
        experts_fit = (
            model.num_moe_experts % ep == 0
            and ranks % (etp * ep * pp) == 0
            and ranks // (etp * ep * pp) % instances == 0
            and ffn % etp == 0
            and (tp == 1 or axes.sequence_parallel)
        )
    return (
        experts_fit
        and ranks // (tp * pp) % instances == 0
        and model.hidden_size % heads == 0
        and heads % groups == 0
        and heads % tp == 0
        and (groups % tp == 0 or tp % groups == 0)
        and (heads + 2 * groups) * (model.hidden_size // heads) % tp == 0
        and (model.num_moe_experts is not None or ffn % tp == 0)
        and 1024 % tp == 0
        and model.num_layers % (pp * vpp) == 0
        and (vpp == 1 or (pp > 1 and num_microbatches % pp == 0))
        and (cp == 1 or (model.seq_length % (2 * cp) == 0 and model.hidden_size // heads % 8 == 0))
        and (not axes.sequence_parallel or (tp > 1 and model.seq_length % (cp * tp) == 0))
    )


def offered(hint: str) -> list[object]:
    """The values in "use 1, 2 or null, or advice"; none when the hint is advice alone."""
    values: dict[str, object] = {"null": None, "false": False, "true": True}
    words = re.findall(r"(?:use|,|or) (\d+|null|false|true)\b", hint)
    return [values[word] if word in values else int(word) for word in words]


@settings(max_examples=50)
@given(RUNS)
def test_errors_are_reported_exactly_for_sizes_that_do_not_fit(facts):
    found, _ = check(facts)
    assert (found == []) == fits(facts)
    assert len({problem.path for problem in found}) == len(found), "every value is named once"


@FEW
@given(RUNS)
def test_every_value_offered_for_the_first_mistake_removes_it(facts):
    found, _ = check(facts)
    if found:
        for value in offered(found[0].hint):
            after, _ = check(facts.with_value(found[0].path, value))
            assert (found[0].path, found[0].reason) not in [(p.path, p.reason) for p in after]


@FEW
@given(RUNS)
def test_following_the_hints_ends_in_a_run_that_works(facts):
    """At every step the first offered value of the first mistake; no mistake is without one."""
    for _ in range(12):
        found, _ = check(facts)
        if not found:
            return
        facts = facts.with_value(found[0].path, offered(found[0].hint)[0])
    raise AssertionError(f"twelve hints were not enough: {check(facts)[0]}")


BASES = (
    {},
    MLA | {"model__add_bias_linear": False},
    MTP,
    {"model__num_moe_experts": 8, "model__add_bias_linear": False, "model__moe_aux_loss_coeff": 0.01},
    {"model__position_embedding_type": "rope", "model__rope_scaling": YARN},
    {"optimizer__lr_decay_style": "WSD"},
    {"training__precision": "fp16"},
    {"training__fp8": "hybrid"},
    {"data__reset_attention_mask": True, "data__reset_position_ids": True},
    {"parallelism__tensor_model_parallel_size": 2, "parallelism__sequence_parallel": True},
    {"parallelism__pipeline_model_parallel_size": 2},
    {"parallelism__context_parallel_size": 2},
    {"training__recompute_granularity": "selective"},
)
"""Runs in which different keys have an effect."""
KEYS = [
    (section, key, hint)
    for section in ("model", "parallelism", "training", "optimizer", "data", "checkpoint", "logging")
    for key, hint in field_hints(field_hints(TrainerConfig)[section]).items()
]


PATHS = {f"{section}.{key}" for section, key, _ in KEYS}


def random_value(hint: Any, source: random.Random) -> Any:
    """A value of this type; None for types whose values need a meaning of their own."""
    while typing.get_origin(hint) in (typing.Union, types.UnionType, typing.Annotated):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if typing.get_origin(hint) is typing.Literal:
        return source.choice(typing.get_args(hint))
    values = {
        bool: [True, False],
        int: [1, 2, 3, 4, 8, 16, 64, 128, 1000],
        float: [0.0, 0.1, 0.5, 1.0, 2.0],
        tuple[RecomputeModule, ...]: [("core_attn",), ("moe",), ("layernorm", "mla_up_proj")],
    }
    return source.choice(values.get(hint, [None]))


def random_changes(source: random.Random) -> dict[str, Any]:
    """One of BASES with random values of one or two other keys."""
    changes = dict(source.choice(BASES))
    for section, key, hint in source.sample(KEYS, source.randint(1, 2)):
        if (value := random_value(hint, source)) is not None:
            changes[f"{section}__{key}"] = value
    return changes


def test_what_is_valid_as_written_stays_valid_when_resolved() -> None:
    """hpcgen checks what is written, and the trainer of a job what hpcgen has resolved."""
    source = random.Random(34)
    valid = 0
    for _ in range(400):
        facts = valid_facts(**random_changes(source))
        sections = {section: getattr(facts, section) for section, _, _ in KEYS}
        device = source.choice(("cuda", "cpu"))
        written = TrainerConfig(name="x", run_dir="/x", device=device, world_size=16, **sections)
        if any(found for rule in TRAINING for found in rule(facts_of(written))):
            continue
        require(resolve(written))
        valid += 1
    assert valid > 80


def named_keys(problem: Problem) -> set[str]:
    """The other keys in the reason of a problem. A key without its section is in the problem's."""
    section = problem.path.rpartition(".")[0]
    names = re.findall(r"\b[a-z]\w*(?:\.\w+)*", problem.reason)
    return {name if "." in name else f"{section}.{name}" for name in names} & PATHS - {problem.path}


def test_every_key_that_a_reason_names_is_in_about() -> None:
    """If a value is from a preset or a default, the line of a key in `about` is shown."""
    source = random.Random(35)
    found: set[Problem] = set()
    for _ in range(1000):
        facts = valid_facts(**random_changes(source))
        errors = {problem for rule in ERRORS for problem in rule(facts)}
        found |= errors or {problem for rule in WARNINGS for problem in rule(facts)}
    assert len({problem.path for problem in found}) > 40
    for problem in found:
        assert named_keys(problem) <= set(problem.about), problem


def test_the_settings_that_a_problem_offers_solve_it() -> None:
    source = random.Random(36)
    solved = set[str]()
    for _ in range(500):
        facts = valid_facts(**random_changes(source))
        for rule in ERRORS:
            for problem in rule(facts):
                changed = facts
                for setting in problem.settings:
                    changed = changed.with_value(setting.path, setting.value)
                if problem.settings:
                    assert problem.path not in {left.path for left in rule(changed)}, problem
                    solved.add(rule.__name__)
    assert len(solved) > 5
