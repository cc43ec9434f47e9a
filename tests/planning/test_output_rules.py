"""Rules for checkpoints, evaluation and logging from both sides."""

from __future__ import annotations

import pytest

from tests.planning.cases import GROUPS, HEADS, errors, warnings
from trainer.contract.evaluation import EvaluationData

WIKITEXT = EvaluationData(name="wikitext", prefix="wikitext")
TEXT = {"evaluation__data": (WIKITEXT,)}
EVALUATION_TP = "evaluation__tensor_model_parallel_size"
EVALUATION_PP = "evaluation__pipeline_model_parallel_size"

REFUSED = {
    "checkpoints to keep that are not written": (
        {"checkpoint__keep_every": 250, "checkpoint__save_interval": 100},
        "checkpoint.keep_every is not a multiple of checkpoint.save_interval = 100 (250 / 100); use 200 or 300",
    ),
    "steps to keep with saves by the clock": (
        {"checkpoint__keep_every": 250},
        "checkpoint.keep_every keeps only multiples of this step, but without checkpoint.save_interval any "
        "step may be saved; use null, or set checkpoint.save_interval to a divisor of it",
    ),
    "finetuning of nothing": (
        {"checkpoint__finetune": True},
        "checkpoint.finetune loads weights from checkpoint.load, which is null; use false, or set "
        "checkpoint.load to a directory of checkpoints",
    ),
    "a change of nothing": (
        {"checkpoint__changed": ("optimizer.lr", "training.lr")},
        "checkpoint.changed[1] is not a hyperparameter; did you mean optimizer.lr?",
    ),
    "evaluation of checkpoints that are not written": (
        {**TEXT, "evaluation__every": 250, "checkpoint__save_interval": 100},
        "evaluation.every is not a multiple of checkpoint.save_interval = 100 (250 / 100); use 200 or 300",
    ),
    "evaluation with saves by the clock": (
        {**TEXT, "evaluation__every": 250},
        "evaluation.every selects multiples of this step, but without checkpoint.save_interval any step may be saved; "
        "use null, or set checkpoint.save_interval to a divisor of it",
    ),
    "evaluation of nothing": (
        {"evaluation__every": 200, "checkpoint__save_interval": 100},
        "evaluation.every queues jobs with nothing to compute, because evaluation.data and evaluation.tasks are empty; "
        "use null, or set evaluation.data or evaluation.tasks",
    ),
    "two texts of one name": (
        {"evaluation__data": (WIKITEXT, EvaluationData(name="wikitext", prefix="other"))},
        "evaluation.data[1].name is a duplicate of evaluation.data[0].name; remove it",
    ),
    "a task twice": (
        {"evaluation__tasks": ("hellaswag", "piqa", "hellaswag")},
        "evaluation.tasks[2] is a duplicate of evaluation.tasks[0]; remove it",
    ),
    "TP of the evaluation does not divide heads": (
        {EVALUATION_TP: 3, "evaluation_ranks": 24},
        "evaluation.tensor_model_parallel_size does not divide model.num_attention_heads = 16 (16 / 3); "
        "use 1, 2, 4 or 8",
    ),
    "TP of the evaluation and query groups": (
        {EVALUATION_TP: 8, HEADS: 48, "model__hidden_size": 3072, GROUPS: 4},
        "evaluation.tensor_model_parallel_size does not divide model.num_query_groups = 4 (4 / 8); use 1, 2 or 4",
    ),
    "stages of the evaluation without a layer": (
        {EVALUATION_PP: 16, "evaluation_ranks": 16},
        "evaluation.pipeline_model_parallel_size is more than model.num_layers = 12; use 12",
    ),
    "more model-parallel ranks than the evaluation job has": (
        {EVALUATION_TP: 16},
        "evaluation.tensor_model_parallel_size results in TP x PP = 16 x 1 = 16, which does not divide 1 x 8 = 8 ranks "
        "of the evaluation job (8 / 16); use 1, 2, 4 or 8, or change slurm.evaluate.nodes",
    ),
    "PP does not divide the ranks of the evaluation job": (
        {EVALUATION_PP: 3, EVALUATION_TP: 2},
        "evaluation.pipeline_model_parallel_size results in TP x PP = 2 x 3 = 6, which does not divide 1 x 8 = 8 ranks "
        "of the evaluation job (8 / 6); use 1, 2 or 4, or change slurm.evaluate.nodes",
    ),
    "a profile that ends before it starts": (
        {"logging__profile_step_start": 10, "logging__profile_step_end": 10},
        "logging.profile_step_end must be greater than logging.profile_step_start = 10; use 12",
    ),
    "a profile after the run": (
        {"logging__profile_step_start": 1000},
        "logging.profile_step_start must be less than training.train_iters = 1000; use 998",
    ),
    "the end of no profile": (
        {"logging__profile_step_end": 12},
        "logging.profile_step_end has no effect, because logging.profile_step_start is null; use null",
    ),
    "a profile of ranks that are not there": (
        {"logging__profile_step_start": 10, "logging__profile_ranks": (0, 16)},
        "logging.profile_ranks contains rank 16, but the last of 2 x 8 = 16 ranks is rank 15; use [0]",
    ),
    "a memory history of no profile": (
        {"logging__record_memory_history": True},
        "logging.record_memory_history is written at the end of a profile, but logging.profile_step_start "
        "is null; use false, or set logging.profile_step_start",
    ),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED)
def test_a_broken_rule_is_one_message_with_values_that_work(changes, message):
    assert errors(**changes) == [message]


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


def test_training_does_not_queue_the_final_checkpoint_unless_it_is_a_multiple():
    evaluated = {**TEXT, "checkpoint__save_interval": 100}
    assert warnings(**evaluated, evaluation__every=200) == []
    assert warnings(**evaluated, evaluation__every=300) == [
        "evaluation.every does not divide training.train_iters = 1000, so training does not queue an evaluation of the "
        "final checkpoint; use 100 or 200"
    ]


def test_tasks_without_a_directory_of_data_sets_are_a_warning():
    tasks = {"evaluation__tasks": ("hellaswag", "own.yaml", "mmlu")}
    assert warnings(**tasks) == [
        "evaluation.hf_home is null, so a job of the cluster finds no data set for evaluation.tasks (hellaswag, mmlu); "
        "set it to a directory that python -m trainer.evaluate --download has filled"
    ]
    assert warnings(**tasks, evaluation__hf_home="/huggingface") == []
    assert warnings(evaluation__tasks=("own.yaml",)) == []
