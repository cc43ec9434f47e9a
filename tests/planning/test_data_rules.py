"""Rules for the source of samples from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import broken, errors, warnings
from trainer.contract.config import Dataset, DataStage, ValidationSet
from trainer.contract.rules import chats, context_parallel, cuda_graphs, data, data_stages

OTHER = Dataset(prefix="other")
NAMED = ValidationSet(name="wiki", datasets=(OTHER,))
ON_PAIRS = {"data__mock": False, "data__datasets": (Dataset(prefix="corpus"),)}
CORPUS, WEIGHED = Dataset(prefix="corpus"), Dataset(prefix="weighed", weight=0.5)

CHAT_SET = ValidationSet(name="chats", datasets=(WEIGHED,), sft=True)
CHATS = {"data__mock": False, "data__datasets": (CORPUS,), "data__sft": True}
EXPERTS = {"model__num_moe_experts": 8, "model__moe_router_topk": 2, "model__add_bias_linear": False}
PREDICTING_EXPERTS = EXPERTS | {"model__mtp_num_layers": 1, "model__position_embedding_type": "rope"}

REFUSED = {
    "data two ways": (
        {"data__datasets": (CORPUS,)},
        "data.mock",
        data.data_has_one_source,
    ),
    "samples of one's own and a blend": (
        {"data__mock": False, "data__train": (CORPUS,), "data__dataset": "own.py:f"},
        "data.dataset",
        data.data_has_one_source,
    ),
    "samples from a file without a function": (
        {"data__mock": False, "data__dataset": "own.py"},
        "data.dataset",
        data.dataset_is_an_import_path,
    ),
    "samples of one's own as chats": (
        {"data__mock": False, "data__dataset": "own.py:f", "data__sft": True},
        "data.sft",
        chats.chats_are_tokenized,
    ),
    "no data": (
        {"data__mock": False},
        "data",
        data.data_has_one_source,
    ),
    "validation without training data": (
        {"data__mock": False, "data__valid": (CORPUS,)},
        "data.valid",
        data.held_out_blends_need_train,
    ),
    "some weights": (
        {"data__mock": False, "data__datasets": (WEIGHED, CORPUS)},
        "data.datasets[1].weight",
        data.weights_are_given_for_all_or_none,
    ),
    "split below zero": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "99,-1,2"},
        "data.split",
        data.split_is_valid,
    ),
    "evaluation without documents": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__split": "100,0,0"},
        "training.eval_iters",
        data.evaluation_has_samples,
    ),
    "chats without pairs": ({"data__sft": True}, "data.sft", chats.chats_are_tokenized),
    "chats as documents": (
        CHATS | {"data__reset_attention_mask": True},
        "data.reset_attention_mask",
        chats.chats_are_separate,
    ),
    "an end of document in chats": (CHATS | {"data__eod_id": 5}, "data.eod_id", chats.chats_are_separate),
    "packing without chats": ({"data__sft_packing": False}, "data.sft_packing", chats.packing_needs_chats),
    "chats that are not exchanged": (
        CHATS | {"parallelism__context_parallel_size": 2, "parallelism__cp_comm_type": "p2p"},
        "parallelism.cp_comm_type",
        context_parallel.exchange_fits_attention,
    ),
    "chats in graphs": (
        CHATS | {"training__cuda_graph_impl": "transformer_engine"},
        "training.cuda_graph_impl",
        cuda_graphs.cuda_graphs_need_one_document,
    ),
    "chats with torch's attention on GPUs": (
        CHATS | {"training__transformer_impl": "torch"},
        "data.sft",
        data.documents_need_transformer_engine_on_gpus,
    ),
    "a validation set of chats in a run on texts": (
        {"data__mock": False, "data__datasets": (CORPUS,), "data__validation": (CHAT_SET,)},
        "data.validation[0].sft",
        chats.validation_sets_of_chats_are_separate,
    ),
    "chats with experts that predict": (
        CHATS | PREDICTING_EXPERTS,
        "model.mtp_num_layers",
        chats.predicting_layers_see_masks,
    ),
    "samples of one's own with experts that predict": (
        {"data__mock": False, "data__dataset": "own.py:f", **PREDICTING_EXPERTS},
        "model.mtp_num_layers",
        chats.predicting_layers_see_masks,
    ),
    "chats with a capacity": (
        CHATS | {**EXPERTS, "model__moe_expert_capacity_factor": 1.0},
        "model.moe_expert_capacity_factor",
        chats.chats_have_no_capacity,
    ),
    "a validation set of chats with a capacity": (
        {
            "data__mock": False,
            "data__datasets": (CORPUS,),
            "data__validation": (CHAT_SET,),
            "data__reset_attention_mask": True,
            "data__eod_id": 5,
            **EXPERTS,
            "model__moe_expert_capacity_factor": 1.0,
        },
        "model.moe_expert_capacity_factor",
        chats.chats_have_no_capacity,
    ),
    "validation set with a path as its name": (
        ON_PAIRS | {"data__validation": (ValidationSet(name="a/b", datasets=(OTHER,)),)},
        "data.validation[0].name",
        data.validation_sets_have_names,
    ),
    "two validation sets with one name": (
        ON_PAIRS | {"data__validation": (NAMED, NAMED)},
        "data.validation[1].name",
        data.validation_sets_have_names,
    ),
    "validation set without pairs": (
        ON_PAIRS | {"data__validation": (ValidationSet(name="a", datasets=()),)},
        "data.validation[0].datasets",
        data.validation_sets_are_evaluated,
    ),
    "validation set without evaluation": (
        ON_PAIRS | {"data__validation": (NAMED,), "training__eval_iters": 0},
        "data.validation",
        data.validation_sets_are_evaluated,
    ),
    "validation set of mock samples": (
        {"data__validation": (NAMED,)},
        "data.validation",
        data.validation_sets_are_evaluated,
    ),
    "validation set that is trained on": (
        ON_PAIRS | {"data__validation": (ValidationSet(name="a", datasets=(OTHER, CORPUS)),)},
        "data.validation[0].datasets[1].prefix",
        data.validation_sets_are_held_out,
    ),
    "some weights in a validation set": (
        ON_PAIRS | {"data__validation": (ValidationSet(name="a", datasets=(WEIGHED, OTHER)),)},
        "data.validation[0].datasets[1].weight",
        data.weights_are_given_for_all_or_none,
    ),
}

CODE, MATH = Dataset(prefix="code"), Dataset(prefix="math")
PAIRS = {"data__mock": False, "data__train": (CODE, MATH)}


def stage(name: str, train: tuple[Dataset, ...], until_iter: int | None = None) -> DataStage:
    return DataStage(name=name, train=train, until_iter=until_iter)


def stages(*until: int | None, train: tuple[Dataset, ...] = (CODE, MATH)) -> dict[str, object]:
    return {"data__stages": tuple(stage(f"stage {n}", train, end) for n, end in enumerate(until))}


REFUSED |= {
    "stages without pairs": (stages(10, None), "data.stages", data_stages.stages_have_pairs),
    "a stage without an end": (
        PAIRS | stages(10, None, None),
        "data.stages[1].until_iter",
        data_stages.stages_follow_each_other,
    ),
    "a last stage with an end": (
        PAIRS | stages(10, 20),
        "data.stages[1].until_iter",
        data_stages.stages_follow_each_other,
    ),
    "stages in the wrong order": (
        PAIRS | stages(10, 10, None),
        "data.stages[1].until_iter",
        data_stages.stages_follow_each_other,
    ),
    "two stages of one name": (
        PAIRS | {"data__stages": (stage("main", (CODE,), 10), stage("main", (MATH,)))},
        "data.stages[1].name",
        data_stages.stages_have_names,
    ),
    "a stage without a name": (
        PAIRS | {"data__stages": (stage(" ", (CODE, MATH)),)},
        "data.stages[0].name",
        data_stages.stages_have_names,
    ),
    "a stage of no pair": (
        PAIRS | {"data__stages": (stage("main", (CODE, MATH), 10), stage("decay", ()))},
        "data.stages[1].train",
        data_stages.stages_mix_listed_pairs,
    ),
    "a stage of another pair": (
        PAIRS | stages(None, train=(CODE, MATH, CORPUS)),
        "data.stages[0].train[2].prefix",
        data_stages.stages_mix_listed_pairs,
    ),
    "a pair twice in a stage": (
        PAIRS | stages(None, train=(CODE, MATH, CODE)),
        "data.stages[0].train[2].prefix",
        data_stages.stages_mix_listed_pairs,
    ),
    "some weights in a stage": (
        PAIRS | stages(None, train=(CODE, Dataset(prefix="math", weight=0.5))),
        "data.stages[0].train[0].weight",
        data_stages.stages_mix_listed_pairs,
    ),
    "a pair in no stage": (
        PAIRS | stages(None, train=(CODE,)),
        "data.train[1].prefix",
        data_stages.stages_mix_listed_pairs,
    ),
    "a pair listed twice for stages": (
        {"data__mock": False, "data__train": (CODE, CODE)} | stages(None, train=(CODE,)),
        "data.train[1].prefix",
        data_stages.stages_mix_listed_pairs,
    ),
    "weights next to those of stages": (
        {"data__mock": False, "data__train": (WEIGHED,)} | stages(None, train=(WEIGHED,)),
        "data.train[0].weight",
        data_stages.weights_are_those_of_stages,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
    "chats": CHATS,
    "chats in samples of their own": CHATS | {"data__sft_packing": False},
    "chats with context parallelism": CHATS | {"parallelism__context_parallel_size": 2},
    "datasets": {"data__mock": False, "data__datasets": (CORPUS, CORPUS)},
    "weighed datasets": {"data__mock": False, "data__datasets": (WEIGHED, WEIGHED)},
    "a blend per split": {"data__mock": False, "data__train": (CORPUS,), "data__valid": (WEIGHED,)},
    "samples of one's own": {"data__mock": False, "data__dataset": "own.py:f"},
    "stages": PAIRS | stages(10, 20, None),
    "a stage of some pairs": PAIRS
    | {"data__stages": (stage("main", (CODE,), 10), stage("decay", (CODE, MATH)))},
    "validation of pairs that no stage reads": {"data__mock": False, "data__datasets": (CODE, MATH)}
    | stages(None, train=(CODE,)),
    "training data alone": {"data__mock": False, "data__train": (CORPUS,)},
    "a split with spaces and fractions": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "0.9, .05, 0.05",
    },
    "no evaluation": {
        "data__mock": False,
        "data__datasets": (CORPUS,),
        "data__split": "100,0,0",
        "training__eval_iters": 0,
    },
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


def test_a_stage_that_is_not_reached_is_a_warning():
    found = warnings(**PAIRS, **stages(10, 10_000_000, None))
    assert any(
        line.startswith("data.stages[1].until_iter") and "stage 2 is not reached" in line for line in found
    )


@pytest.mark.parametrize(
    "split", ["", "99", "90,10", "1,2,3,4", "0,1,1", "a,b,c", "1;2;3", "9" * 400 + ",1,1"]
)
def test_a_split_is_three_weights(split):
    found = broken(data__mock=False, data__datasets=(CORPUS,), data__split=split)
    assert found == [("data.split", data.split_is_valid)]


def test_named_validation_sets_take_the_place_of_a_split() -> None:
    assert not errors(**ON_PAIRS, data__validation=(NAMED,), data__split="1,0,0")
