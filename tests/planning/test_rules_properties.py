"""The rules on random runs: right about what fits, and true to their hints."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcgen.planning.repairs import check
from tests.planning.cases import valid_facts
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
    "training__micro_batch_size": st.integers(1, 3),
    "training__global_batch_size": st.integers(1, 48),
    "nodes": st.integers(1, 6),
}
FEW = settings(max_examples=30)
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
    if model.num_moe_experts is None:
        experts_fit = ep == 1 and etp is None
    else:
        etp = etp or tp
        experts_fit = (
            model.num_moe_experts % ep == 0
            and ranks % (etp * ep * pp) == 0
            and ffn % etp == 0
            and (tp == 1 or axes.sequence_parallel)
        )
    return (
        experts_fit
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
