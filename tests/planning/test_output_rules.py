"""Rules for checkpoints, evaluation and logging from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import GROUPS, HEADS, broken, errors, warned, warnings
from trainer.contract.config import EarlyStopping
from trainer.contract.evaluation import EvaluationData
from trainer.contract.rules import answers, checkpoint, evaluation, logging

WIKITEXT = EvaluationData(name="wikitext", prefix="wikitext")
TEXT = {"evaluation__data": (WIKITEXT,)}
EVALUATION_TP = "evaluation__tensor_model_parallel_size"
EVALUATION_PP = "evaluation__pipeline_model_parallel_size"

REFUSED = {
    "new tokens with the state of the optimizer": (
        {"checkpoint__load": "/base", "checkpoint__resize_vocabulary": True},
        "checkpoint.resize_vocabulary",
        checkpoint.new_tokens_need_weights,
    ),
    "checkpoints to keep that are not written": (
        {"checkpoint__keep_every": 250, "checkpoint__save_interval": 100},
        "checkpoint.keep_every",
        checkpoint.kept_checkpoints_are_written,
    ),
    "steps to keep with saves by the clock": (
        {"checkpoint__keep_every": 250},
        "checkpoint.keep_every",
        checkpoint.kept_checkpoints_are_written,
    ),
    "answers drawn from more than all tokens": (
        {"answers__prompts": "prompts.jsonl", "answers__temperature": 1.0, "answers__top_p": 1.5},
        "answers.top_p",
        answers.answers_can_be_chosen,
    ),
    "answers without prompts": (
        {"answers__max_new_tokens": 8},
        "answers.max_new_tokens",
        answers.answers_have_prompts,
    ),
    "answers of experts with a capacity": (
        {
            "answers__prompts": "prompts.jsonl",
            "model__num_moe_experts": 8,
            "model__add_bias_linear": False,
            "model__moe_expert_capacity_factor": 1.0,
        },
        "answers.prompts",
        answers.answers_are_independent,
    ),
    "early stopping without evaluations": (
        {"training__early_stopping": EarlyStopping()},
        "training.early_stopping",
        checkpoint.evaluations_can_end_the_run,
    ),
    "early stopping by a set that is not evaluated": (
        {
            "training__early_stopping": EarlyStopping(monitor="valid/wiki/loss"),
            "training__eval_interval": 100,
        },
        "training.early_stopping",
        checkpoint.evaluations_can_end_the_run,
    ),
    "the best checkpoint without evaluations": (
        {"checkpoint__keep_best": True, "training__eval_interval": 100, "training__eval_iters": 0},
        "checkpoint.keep_best",
        checkpoint.evaluations_can_end_the_run,
    ),
    "finetuning of nothing": (
        {"checkpoint__finetune": True},
        "checkpoint.finetune",
        checkpoint.finetuning_needs_weights,
    ),
    "a change of nothing": (
        {"checkpoint__changed": ("optimizer.lr", "training.lr")},
        "checkpoint.changed[1]",
        checkpoint.changed_names_hyperparameters,
    ),
    "evaluation of checkpoints that are not written": (
        {**TEXT, "evaluation__every": 250, "checkpoint__save_interval": 100},
        "evaluation.every",
        evaluation.evaluated_checkpoints_are_written,
    ),
    "evaluation with saves by the clock": (
        {**TEXT, "evaluation__every": 250},
        "evaluation.every",
        evaluation.evaluated_checkpoints_are_written,
    ),
    "evaluation of nothing": (
        {"evaluation__every": 200, "checkpoint__save_interval": 100},
        "evaluation.every",
        evaluation.evaluation_has_work,
    ),
    "two texts of one name": (
        {"evaluation__data": (WIKITEXT, EvaluationData(name="wikitext", prefix="other"))},
        "evaluation.data[1].name",
        evaluation.names_are_unique,
    ),
    "a task twice": (
        {"evaluation__tasks": ("hellaswag", "piqa", "hellaswag")},
        "evaluation.tasks[2]",
        evaluation.names_are_unique,
    ),
    "TP of the evaluation does not divide heads": (
        {EVALUATION_TP: 3, "evaluation_ranks": 24},
        "evaluation.tensor_model_parallel_size",
        evaluation.layout_fits_model,
    ),
    "TP of the evaluation and query groups": (
        {EVALUATION_TP: 8, HEADS: 48, "model__hidden_size": 3072, GROUPS: 4},
        "evaluation.tensor_model_parallel_size",
        evaluation.layout_fits_model,
    ),
    "stages of the evaluation without a layer": (
        {EVALUATION_PP: 16, "evaluation_ranks": 16},
        "evaluation.pipeline_model_parallel_size",
        evaluation.layout_fits_model,
    ),
    "more model-parallel ranks than the evaluation job has": (
        {EVALUATION_TP: 16},
        "evaluation.tensor_model_parallel_size",
        evaluation.layout_divides_ranks,
    ),
    "PP does not divide the ranks of the evaluation job": (
        {EVALUATION_PP: 3, EVALUATION_TP: 2},
        "evaluation.pipeline_model_parallel_size",
        evaluation.layout_divides_ranks,
    ),
    "a profile that ends before it starts": (
        {"logging__profile_step_start": 10, "logging__profile_step_end": 10},
        "logging.profile_step_end",
        logging.profile_ends_after_its_start,
    ),
    "a profile after the run": (
        {"logging__profile_step_start": 1000},
        "logging.profile_step_start",
        logging.profile_ends_after_its_start,
    ),
    "the end of no profile": (
        {"logging__profile_step_end": 12},
        "logging.profile_step_end",
        logging.profile_ends_after_its_start,
    ),
    "a profile of ranks that are not there": (
        {"logging__profile_step_start": 10, "logging__profile_ranks": (0, 16)},
        "logging.profile_ranks",
        logging.profiled_ranks_exist,
    ),
    "a memory history of no profile": (
        {"logging__record_memory_history": True},
        "logging.record_memory_history",
        logging.memory_history_needs_profile,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_problem(changes, path, rule):
    assert broken(**changes) == [(path, rule)]


ACCEPTED = {
    "checkpoints to keep": {"checkpoint__keep_every": 300, "checkpoint__save_interval": 100},
    "evaluation": {**TEXT, "evaluation__every": 200, "checkpoint__save_interval": 100},
    "evaluation by hand": {"evaluation__tasks": ("hellaswag",), EVALUATION_TP: 4, EVALUATION_PP: 2},
    "changed hyperparameters": {"checkpoint__changed": ("optimizer.lr", "data.datasets")},
    "a profile": {"logging__profile_step_start": 10, "logging__record_memory_history": True},
}


@pytest.mark.parametrize("changes", ACCEPTED.values(), ids=ACCEPTED)
def test_valid_values_pass(changes):
    assert errors(**changes) == []


WARNED = {
    "a final checkpoint that no job evaluates": (
        {**TEXT, "checkpoint__save_interval": 100, "evaluation__every": 300},
        "evaluation.every",
        evaluation.final_checkpoint_is_evaluated,
    ),
    "tasks without a directory of datasets": (
        {"evaluation__tasks": ("hellaswag", "own.yaml", "mmlu")},
        "evaluation.hf_home",
        evaluation.tasks_have_data,
    ),
}


@pytest.mark.parametrize(("changes", "path", "rule"), WARNED.values(), ids=WARNED)
def test_what_may_not_be_meant_is_a_warning(changes, path, rule):
    assert warned(**changes) == [(path, rule)]


@pytest.mark.parametrize(
    "changes",
    [
        {**TEXT, "checkpoint__save_interval": 100, "evaluation__every": 200},
        {"evaluation__tasks": ("hellaswag", "own.yaml", "mmlu"), "evaluation__hf_home": "/huggingface"},
        {"evaluation__tasks": ("own.yaml",)},
    ],
)
def test_evaluation_without_a_warning(changes):
    assert warnings(**changes) == []
